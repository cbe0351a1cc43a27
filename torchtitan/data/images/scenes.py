"""Images that are drawn instead of read: patterns with classes, for trials without a download.

The class is what the pattern is: stripes, rings, dots, ... Its colors, its scale, place and
direction are drawn independently of the class, and so are noise and light. So a mean color, or any
single pixel, says next to nothing about the class; how pixels lie to each other says it all.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Pattern = Callable[[np.random.Generator, Array, Array], Array]
"""(random numbers, coordinates in turns of the pattern, both (H, W)) to a pattern in -1..1."""

TURN: Final = 2 * np.pi
SCENES: Final = 3
"""Tells the draws of scenes from others of the same seed."""


def _around(draw: np.random.Generator, x: Array, y: Array) -> tuple[Array, Array]:
    """Distance and angle from a place inside the image."""
    row, column = draw.integers(len(x), size=2)
    x, y = x - x[row, column], y - y[row, column]
    return np.hypot(x, y), np.arctan2(y, x)


def _stripes(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return np.sin(TURN * x)


def _waves(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return np.sin(TURN * (x + 0.35 * np.sin(TURN * 0.7 * y)))


def _checks(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return 2 * np.sin(TURN * x / 2) * np.sin(TURN * y / 2)


def _grid(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return 3 * np.maximum(np.cos(TURN * x), np.cos(TURN * y)) - 1.5


def _dots(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return 3 * (np.cos(TURN * x) + np.cos(TURN * y)) / 2 - 0.75


def _rings(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return np.sin(TURN * _around(draw, x, y)[0])


def _spokes(draw: np.random.Generator, x: Array, y: Array) -> Array:
    return np.sin(draw.integers(4, 9) * _around(draw, x, y)[1])


def _blobs(draw: np.random.Generator, x: Array, y: Array) -> Array:
    angles, phases = draw.uniform(0, TURN, size=(2, 6))
    waves = [
        np.sin(TURN * 0.7 * (x * np.cos(a) + y * np.sin(a)) + p)
        for a, p in zip(angles, phases, strict=True)
    ]
    total: Array = np.sum(waves, axis=0)
    return total / 1.5


PATTERNS: Final[dict[str, Pattern]] = {
    "stripes": _stripes,
    "waves": _waves,
    "checks": _checks,
    "grid": _grid,
    "dots": _dots,
    "rings": _rings,
    "spokes": _spokes,
    "blobs": _blobs,
}


class Scenes:
    """Scenes by number; each is a function of (seed, number) alone."""

    classes: Sequence[str] = tuple(PATTERNS)

    def __init__(
        self, *, seed: int = 0, size: int = 32, channels: int = 3, length: int = 50_000
    ) -> None:
        """
        Args:
            size: height and width in pixels.
            length: how many there are; more of them are the same ones, and others after them.
        """
        self._seed, self._size, self._channels, self._length = seed, size, channels, length
        self.fingerprint = f"scenes, version 1, {size} x {size} x {channels}, seed {seed}"

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """What messages call it."""
        return f"scene {index}"

    def image(self, index: int) -> tuple[Tensor, int]:
        """A scene, (channels, size, size) float32 in 0..1, and the number of its class."""
        draw = np.random.default_rng([self._seed, index, 0, SCENES])
        label = int(draw.integers(len(PATTERNS)))
        angle = draw.uniform(0, TURN)
        turns = draw.uniform(2.5, 5.0)  # periods of the pattern across the image
        dark, bright = draw.uniform(0.1, 0.9, size=(2, self._channels, 1, 1))
        x, y = np.meshgrid(*2 * [np.arange(self._size) * turns / self._size])
        x, y = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        x, y = x + draw.uniform(), y + draw.uniform()
        pattern = np.clip(PATTERNS[self.classes[label]](draw, x, y), -1, 1) / 2 + 0.5
        image = dark + (bright - dark) * pattern
        image += draw.normal(scale=0.03, size=image.shape)
        return torch.from_numpy(np.clip(image, 0, 1).astype(np.float32)), label

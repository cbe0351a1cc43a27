"""Synthetic images: figures with classes, for experiments without a download.

A scene is a figure on a ground. Both have the same stripes, vertical in the figure and horizontal
in the ground, and the class is the shape of the figure. The phase of the stripes, their contrast
and tint, and the position of the figure are drawn independently of the class. So the mean of a
pixel is the same in all classes, and no patch alone reveals the class: only where stripes turn.

Stripes repeat after `PERIOD` pixels, which divides the usual patches. So a hidden patch can be
restored from visible ones, given whether it is inside the figure, which a masked autoencoder must
learn.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Figure = Callable[[Array, Array], npt.NDArray[np.bool_]]
"""Function from columns and rows, both (H, W) in -0.5..0.5 from the center, to the inside."""

TURN: Final = 2 * np.pi
PERIOD: Final = 4
"""Number of pixels after which stripes repeat."""
MOVED: Final = 0.1
"""Maximum distance of a figure from the center, as a fraction of the image."""
SCENES: Final = 3
"""Number that distinguishes the draws of scenes from others of the same seed."""

FIGURES: Final[dict[str, Figure]] = {
    "left": lambda x, y: x < 0,
    "top": lambda x, y: y < 0,
    "falling": lambda x, y: x > y,
    "rising": lambda x, y: x < -y,
    "disc": lambda x, y: np.hypot(x, y) < 0.4,
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) < 0.2,
    "quarters": lambda x, y: (x < 0) ^ (y < 0),
    "bars": lambda x, y: np.sin(2 * TURN * x) < 0,
}


class Scenes:
    """Scenes by number; each is a function of (seed, number) alone."""

    classes: Sequence[str] = tuple(FIGURES)
    has_classes = True

    def __init__(
        self, *, seed: int = 0, size: int = 32, channels: int = 3, length: int = 50_000
    ) -> None:
        """
        Args:
            size: height and width in pixels.
            length: number of scenes; a larger number adds scenes after the same ones.
        """
        self._seed, self._size, self._channels, self._length = seed, size, channels, length
        self.fingerprint = f"scenes, version 2, {size} x {size} x {channels}, seed {seed}"

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """Return the name of a scene in messages."""
        return f"scene {index}"

    def label(self, index: int) -> int:
        """Return the number of a scene's class, which is drawn first."""
        return self._begin(index)[0]

    def _begin(self, index: int) -> tuple[int, np.random.Generator]:
        draw = np.random.default_rng([self._seed, index, 0, SCENES])
        return int(draw.integers(len(FIGURES))), draw

    def image(self, index: int) -> Tensor:
        """Return a scene, (channels, size, size) float32 in 0..1."""
        label, draw = self._begin(index)
        column, row = np.meshgrid(*2 * [np.arange(self._size)])
        right, down = draw.uniform(-MOVED, MOVED, size=2)
        center = (self._size - 1) / 2
        inside = FIGURES[self.classes[label]](
            (column - center) / self._size - right, (row - center) / self._size - down
        )
        upright, level = draw.uniform(size=2)
        turns = np.where(inside, column / PERIOD + upright, row / PERIOD + level)
        light, tint = draw.uniform(-1, 1, size=(2, self._channels, 1, 1))
        contrast = draw.uniform(0.25, 0.4) * (1 + 0.15 * tint)
        image = 0.5 + 0.05 * light + contrast * np.sin(TURN * turns)
        image += draw.normal(scale=0.03, size=image.shape)
        return torch.from_numpy(np.clip(image, 0, 1).astype(np.float32))

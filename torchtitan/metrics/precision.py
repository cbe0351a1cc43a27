"""Rounding errors of converted layers, measured at a set pace.

For the input, the weight and the output's gradient of each converted linear, and for the queries,
keys and values of each converted attention, a row in metrics.jsonl (and the other sinks) reports

    underflow   the share of elements that are not zero and become zero
    saturation  the share of elements beyond the largest number of the format
    scale       what elements are multiplied with; where there are several, the smallest, which is
                that of the largest elements

under `precision/<layer>/<input, weight, gradient, q, k or v>/<which>`, of the rank where it is
worst. To see them, one microbatch of the step runs forward and backward once more before the step,
outside compiled code, and its gradients are dropped: the run itself does not change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from torchtitan.convert import ConverterConfig, Rounding
from torchtitan.data import Batch
from torchtitan.logging import logger
from torchtitan.parallel import ParallelModel, World

Found = dict[tuple[str, str], dict[str, Tensor]]
"""Shares by layer and quantity; without tensors, which would fill the memory."""


class PrecisionWatch:
    """Measures how the converted layers of a model round, when due."""

    def __init__(
        self, every: int, converters: Sequence[ConverterConfig], model: ParallelModel, world: World
    ) -> None:
        """`every`: number of steps between reports; 0 disables them."""
        self.every = every
        self.converters, self.model, self.world = converters, model, world

    def is_due(self, step: int) -> bool:
        """Whether there is something to measure before this step is made."""
        return self.every > 0 and step % self.every == 0

    def measure(self, step: int, batch: Batch, tokens: Tensor) -> dict[str, float]:
        """Measure a batch; gradients accumulate. All ranks call it together."""
        found: Found = {}
        with torch.compiler.set_stance("force_eager"), self._watching(found):
            self.model.forward_backward([batch], tokens)
        mine = {
            key: {name: float(value) for name, value in shares.items()}
            for key, shares in found.items()
        }
        everyones = self.world.gather(mine)
        worst: dict[str, float] = {}
        for shares in everyones:
            for (layer, what), values in shares.items():
                for name, value in values.items():
                    key = f"precision/{layer}/{what}/{name}"
                    choose = min if name == "scale" else max
                    worst[key] = choose(worst.get(key, value), value)
        if self.world.rank == 0:
            logger.info("step %d: %s", step, _summary(worst))
        return worst

    @contextmanager
    def _watching(self, found: Found) -> Iterator[None]:
        """Fill `found` with the inputs of the converted layers inside this context."""
        hooks = []
        for part in self.model.parts:
            for name, module in part.named_modules():
                converter = next((c for c in self.converters if c.has_converted(module)), None)
                if converter is not None:
                    hooks += list(converter.watch(module, partial(_keep, found, name)))
        try:
            yield
        finally:
            for remove in hooks:
                remove()


def _keep(found: Found, name: str, what: str, rounding: Rounding) -> None:
    found[name, what] = rounding.shares()


def _summary(worst: dict[str, float]) -> str:
    """The layer that loses most, in a line."""
    parts = []
    for name in ("underflow", "saturation"):
        values = {key: value for key, value in worst.items() if key.endswith(name)}
        key = max(values, key=values.__getitem__, default="")
        if key and values[key]:
            _, layer, what, _ = key.split("/")
            parts.append(f"{name} of at most {values[key]:.2%} ({what} of {layer})")
        else:
            parts.append(f"no {name}")
    return "precision: " + ", ".join(parts)

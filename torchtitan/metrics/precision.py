"""Watches what few bits do to numbers: at a set pace, how converted layers round.

Of what goes into each converted linear, of its weight and of the gradient of what comes out, and of
the queries, keys and values of each converted attention, a row in metrics.jsonl (and the other
sinks) says

    underflow   the share of elements that are not zero and become zero
    saturation  the share of elements beyond the largest number of the format
    scale       what elements are multiplied with; where there are several, the smallest, which is
                that of the largest elements

under `precision/<layer>/<input, weight, gradient, q, k or v>/<which>`, of the rank where it is
worst. To see them, one microbatch of the step runs forward and backward once more before the step,
outside of what is compiled, and its gradients are dropped: the run itself does not change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.convert import ConverterConfig, Rounding
from torchtitan.data import Batch
from torchtitan.logging import logger
from torchtitan.parallel import ParallelModel, World
from torchtitan.research.hadamard_attention.low_precision_attention import RoundedAttention

Found = dict[tuple[str, str], dict[str, Tensor]]
"""By name of layer, and what of it: the shares alone, since tensors would fill the memory."""


class PrecisionWatch:
    """Measures how the converted layers of a model round, when due."""

    def __init__(
        self,
        every: int,
        converters: Sequence[ConverterConfig],
        model: ParallelModel,
        world: World,
    ) -> None:
        """`every` so many steps; 0: never."""
        self.every = every
        self.converters, self.model, self.world = converters, model, world

    def is_due(self, step: int) -> bool:
        """Whether there is something to measure before this step is made."""
        return self.every > 0 and step % self.every == 0

    def measure(self, step: int, batch: Batch, tokens: Tensor) -> dict[str, float]:
        """What the batch shows; gradients are left behind. All ranks call it."""
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
        """Fill `found` with what the converted layers are given meanwhile."""
        hooks = []
        for part in self.model.parts:
            for name, module in part.named_modules():
                converter = next((c for c in self.converters if c.has_converted(module)), None)
                if converter is not None:
                    note = partial(_note, found, converter, module, name)
                    hooks += list(_watch(module, note))
                elif isinstance(module, RoundedAttention):
                    hooks.append(_watch_attention(module, partial(_keep, found, name)))
        try:
            yield
        finally:
            for remove in hooks:
                remove()


def _note(
    found: Found, converter: ConverterConfig, module: nn.Module, name: str, what: Any, x: Tensor
) -> None:
    with torch.no_grad():
        rounding = converter.rounding(module, what, x.detach())
        if rounding is not None:
            _keep(found, name, what, rounding)


def _keep(found: Found, name: str, what: str, rounding: Rounding) -> None:
    found[name, what] = rounding.shares()


def _watch_attention(
    module: RoundedAttention, keep: Callable[[str, Rounding], None]
) -> Callable[[], None]:
    """Have `keep` called with what is rounded; returns what ends it."""

    def forget() -> None:
        module.watch = None

    module.watch = keep
    return forget


def _watch(module: Any, note: Callable[[str, Tensor], None]) -> Iterator[Callable[[], None]]:
    """Have `note` called for all that is rounded; yields what ends it."""
    weight = module.weight

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        note("input", inputs[0])
        # Where it was gathered in Float8, this rank's part of it was not.
        note("weight", module.weight)
        note("weight", weight)

    def leave(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(note, "gradient"))  # type: ignore[no-untyped-call]

    # Before tensor parallelism makes parts of it again.
    yield module.register_forward_pre_hook(enter).remove
    yield module.register_forward_hook(leave, prepend=True).remove
    if hasattr(module, "wire"):
        wire = module.wire

        def forget() -> None:
            wire.watch = None

        wire.watch = note
        yield forget


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

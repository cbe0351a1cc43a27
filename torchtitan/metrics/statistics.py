"""Statistics of each layer every few steps, for activations, gradients and weights:

    rms         the root of the mean of squares
    absmax      the largest absolute value
    mean        the mean
    zeros       the share of elements that are 0
    non_finite  how many elements are infinite or not a number; the others are of the rest

as `activation/<module>/<which>`, `gradient/<parameter>/<which>` and `weight/<parameter>/<which>` in
a row of metrics.jsonl, and as scalars in the other sinks.

They cover the whole of each tensor, on all ranks that have a part of it, and the whole global
batch, so that they do not depend on the layout. Gradients are those of the step itself, before
clipping. Activations are the outputs of embedding, blocks, norm and output layer, in an additional
forward pass without a backward and without compilation: the run itself does not change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.logging import logger
from torchtitan.metrics.meter import Meter
from torchtitan.models.spec import ModelSpec
from torchtitan.optim import Optimizers
from torchtitan.optim.parameters import local
from torchtitan.parallel import Losses, ParallelismConfig, ParallelModel, stages
from torchtitan.step import Hooks
from torchtitan.timeline import Timeline

# Elements that are looked at together: few copies of a tensor are made, and none of a large one.
CHUNK = 2**22

Sums = Tensor
"""Counters in float64 (5,): elements, their sum, their sum of squares, zeros, not finite."""


class Statistics:
    """Measures activations, gradients and weights when due."""

    def __init__(
        self,
        every: int,
        model: ParallelModel,
        optimizers: Optimizers,
        spec: ModelSpec[Any],
        layout: ParallelismConfig,
    ) -> None:
        """`every`: number of steps between measurements; 0: never."""
        self.every, self.spec, self.layout = every, spec, layout
        self.model, self.optimizers, self.world = model, optimizers, model.world
        self.units = {n for part in model.parts for unit in stages.units(spec, part) for n in unit}
        """Names of the modules whose output is measured."""
        self.sizes = {
            f"{kind}/{name}": parameter.numel()
            for parameter, name in optimizers.names.items()
            for kind in ("gradient", "weight")
        }
        """Elements of each parameter on all ranks together, without copies."""

    def hooks(self, steps_done: Callable[[], int], meter: Meter, timeline: Timeline) -> Hooks:
        """Return hooks that measure a step that is due before clipping, and report it after."""
        found: dict[str, float] = {}

        def measure(batches: Sequence[Batch], losses: Losses) -> None:
            found.clear()
            if self.is_due(steps_done() + 1):
                with timeline.pause("statistics"):
                    found.update(self.measure(batches))

        def report(step: int) -> None:
            if found:
                meter.measured(step, "statistics", **found)

        return Hooks(after_backward=measure, after_step=report)

    def copies(self, name: str) -> int:
        """Return the number of ranks with the same output of a module."""
        is_logits = self.spec.tensor_plan.get(name) == "logits"
        whole = "disable_loss_parallel" if is_logits else "disable_sequence_parallel"
        return self.world.degrees.tp if getattr(self.layout, whole) else 1

    def is_due(self, step: int) -> bool:
        """Whether there is something to measure in this step."""
        return self.every > 0 and step % self.every == 0

    def measure(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Measure the step's microbatches, its gradients, and the weights before it."""
        seen: dict[str, TensorSums] = {}
        with torch.compiler.set_stance("force_eager"), self._watching(seen):
            self.model.evaluate(batches)
        for parameter, name in self.optimizers.names.items():
            of_kind = {"gradient": parameter.grad, "weight": parameter}
            for kind, tensor in of_kind.items():
                if tensor is not None:
                    self._seen(seen, f"{kind}/{name}").look(local(tensor.detach()))
        return self._over_ranks(seen)

    @contextmanager
    def _watching(self, seen: "dict[str, TensorSums]") -> Iterator[None]:
        hooks = []
        for part in self.model.parts:
            for name, module in part.named_modules():
                if name in self.units:
                    note = partial(self._note, seen, f"activation/{name}")
                    hooks.append(module.register_forward_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(
        self,
        seen: "dict[str, TensorSums]",
        key: str,
        module: nn.Module,
        inputs: Any,
        output: Tensor,
    ) -> None:
        self._seen(seen, key).look(output.detach())

    def _seen(self, seen: "dict[str, TensorSums]", key: str) -> "TensorSums":
        return seen.setdefault(key, TensorSums(self.world.device.torch_device))

    def _over_ranks(self, seen: "dict[str, TensorSums]") -> dict[str, float]:
        """The values of everything that any rank has a part of."""
        sizes: dict[str, int] = {}
        for those_of_rank in self.world.gather({key: self.sizes.get(key, 0) for key in seen}):
            sizes |= those_of_rank
        nothing = TensorSums(self.world.device.torch_device)
        each = [seen.get(key, nothing) for key in sizes]
        sums = torch.stack([one.sums for one in each])
        largest = torch.stack([one.largest for one in each])
        dist.all_reduce(sums)
        self.world.max(largest)
        found: dict[str, float] = {}
        for (key, size), row, peak in zip(
            sizes.items(), sums.tolist(), largest.tolist(), strict=True
        ):
            copies = row[0] / size if size else self.copies(key.partition("/")[2])
            found |= {f"{key}/{name}": value for name, value in values(row, peak, copies).items()}
        if self.world.rank == 0:
            logger.info("%s", summary(found))
        return found


class TensorSums:
    """Sums over this rank's part of a tensor, in pieces, so that no large copy is made."""

    def __init__(self, device: torch.device) -> None:
        self.sums: Sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.largest = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def look(self, tensor: Tensor) -> None:
        """Add a part of it, or of another microbatch."""
        for piece in torch.split(tensor.reshape(-1), CHUNK):
            if not len(piece):
                continue
            exact = piece.double()
            finite = exact.isfinite()
            exact = exact.where(finite, 0.0)
            counts = (exact.new_tensor(len(piece)), exact.sum(), exact.square().sum())
            shares = ((exact == 0).logical_and(finite).sum(), (~finite).sum())
            self.sums += torch.stack([*counts, *shares]).to(self.sums)
            self.largest = torch.maximum(self.largest, exact.abs().max().to(self.largest))


def values(sums: Sequence[float], largest: float, copies: float) -> dict[str, float]:
    """The reported statistics of a tensor."""
    elements, total, squares, zeros, lost = sums
    finite = max(elements - lost, 1)
    return {
        "rms": (squares / finite) ** 0.5,
        "absmax": largest,
        "mean": total / finite,
        "zeros": zeros / elements,
        "non_finite": round(lost / copies),
    }


def summary(found: dict[str, float]) -> str:
    """The extremes, in a line."""
    parts = []
    for kind in ("activation", "gradient", "weight"):
        peaks = {k: v for k, v in found.items() if k.startswith(kind) and k.endswith("/absmax")}
        if peaks:
            key = max(peaks, key=peaks.__getitem__)
            parts.append(f"largest {kind} {peaks[key]:.3g} ({key.split('/')[1]})")
    lost = [key for key, value in found.items() if key.endswith("/non_finite") and value]
    if lost:
        parts.append(f"not finite: {', '.join(key.rpartition('/')[0] for key in lost[:3])}")
    return f"statistics: {', '.join(parts)}"

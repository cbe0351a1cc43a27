"""The loss of a model, from its logits, or inside the model, a chunk of logits at a time.

FSDP gathers the output weight for the forward of the model, so a loss that computes its own logits
must run inside that forward: `apply` sets the core of the model's `LinearLoss`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.losses import (
    AuxiliaryLossConfig,
    LossConfig,
    linear_losses,
    squared_normalizer,
    summed_squares,
)
from torchtitan.models.output import AuxiliaryLoss, LinearLoss, auxiliary_losses
from torchtitan.parallel import compile
from torchtitan.parallel.compile import CompileConfig
from torchtitan.tasks import LossFunction, Task
from torchtitan.torch_private.runtime import is_in_backward


class _WithGradient(torch.autograd.Function):
    """Identity of `x` whose backward passes `scale` to `total` as its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(scale.to(total.dtype))
        return x.data  # not a view: a stage cannot detach one

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = context.saved_tensors
        return gradient, scale, None


class AuxiliaryLosses:
    """Auxiliary losses of this rank's parts of a model, summed over the microbatches of a step."""

    def __init__(self, names: Sequence[str], configs: Iterable[AuxiliaryLossConfig] = ()) -> None:
        """
        Args:
            names: names of all auxiliary losses of the model, so that all ranks report the same.
            configs: losses that the recipe adds, some of which are in the model.
        """
        self.configs = list(configs)
        self.sums: dict[str, Tensor] | None = None
        self.weighted: dict[str, Tensor] = {}
        self.count = torch.ones(())
        self.weights: dict[str, float] = {}
        self.partial: list[str] = []
        self.group: ProcessGroup | None = None
        self.begin(1)
        self.names = sorted({*names, *self.weights})

    def attach(
        self, parts: Iterable[nn.Module], blocks: Iterable[nn.Module], group: ProcessGroup | None
    ) -> None:
        """Collect the auxiliary losses of the modules in `parts`.

        Args:
            blocks: modules whose losses cover only this rank's part of a sequence.
            group: ranks with the other parts of the sequence (tp), if any.
        """
        for module in (module for part in parts for module in auxiliary_losses(part)):
            module.core = self._add
        if group is not None:
            self.group = group
            inside = (module for block in blocks for module in auxiliary_losses(block))
            self.partial = sorted({module.name for module in inside})

    def begin(self, step: int) -> None:
        """Set the weights for this step."""
        for config in self.configs:
            self.weights |= config.weights(step)

    @contextmanager
    def recording(self, count: Tensor) -> Iterator[dict[str, Tensor]]:
        """Record losses during the passes of a step with `count` units in its global batch.

        On exit the yielded dict has this rank's share of each loss by name, and of their weighted
        sum as "loss".
        """
        shares: dict[str, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float32, device=count.device)
        self.count = count
        self.sums, self.weighted = ({name: zero.clone() for name in self.names} for _ in range(2))
        try:
            yield shares
            if self.partial:
                self._add_up_parts(self.sums, self.weighted)
            shares["loss"] = sum(self.weighted.values(), zero) / count
            shares.update({f"loss/{name}": total / count for name, total in self.sums.items()})
        finally:
            self.sums = None

    def _add_up_parts(self, *sums: dict[str, Tensor]) -> None:
        """Sum the losses of parts of sequences over the ranks that share them."""
        mine = torch.stack([each[name] for each in sums for name in self.partial])
        dist.all_reduce(mine, group=self.group)
        for each, totals in zip(sums, mine.chunk(len(sums)), strict=True):
            each.update(zip(self.partial, totals, strict=True))

    def add(self, name: str, loss: Tensor, total: Callable[[], Tensor]) -> Tensor:
        """Return the main loss, with the gradient of an auxiliary loss attached.

        Args:
            loss: main loss of a microbatch (0-d).
            total: returns the sum of the auxiliary loss over the same units (0-d).
        """
        weight = self.weights[name]
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
            return loss if self.sums is None else self._join(name, weight, loss, total())

    def _add(self, loss: AuxiliaryLoss, x: Tensor, total: Tensor) -> Tensor:
        if self.sums is None:  # not training
            return x
        return self._join(loss.name, self.weights.get(loss.name, loss.weight), x, total)

    def _join(self, name: str, weight: float, x: Tensor, total: Tensor) -> Tensor:
        assert self.sums is not None
        if not is_in_backward():  # a recomputation is already counted
            self.sums[name] += total.detach()
            self.weighted[name] += weight * total.detach() if weight else 0.0
        if not weight:
            return x
        trained: Tensor = _WithGradient.apply(x, total, weight / self.count)  # type: ignore[no-untyped-call]
        return trained


Z_LOSS = "z_loss"


def of_outputs(
    task: type[Task],
    group: ProcessGroup | None,
    size: int,
    config: CompileConfig,
    auxiliary: AuxiliaryLosses,
) -> LossFunction:
    """Return the task's loss, of outputs that are whole, or split over `group` (tp) on a dim of
    `size`; the z-loss is added if `auxiliary` has one.
    """
    loss: LossFunction = task.loss if group is None else task.split_loss(group, size)
    z_loss: LossFunction = partial(squared_normalizer, group=group)
    if config.compiles("loss"):
        loss, z_loss = compile.compiled(loss, config), compile.compiled(z_loss, config)
    if Z_LOSS not in auxiliary.weights:
        return loss
    return lambda outputs, targets: auxiliary.add(
        Z_LOSS, loss(outputs, targets), lambda: z_loss(outputs, targets)
    )


def apply(
    model: nn.Module,
    config: LossConfig,
    vocabulary: int,
    mesh: DeviceMesh | None,
    *,
    sequence_parallel: bool,
    compile_config: CompileConfig,
    auxiliary: AuxiliaryLosses,
) -> None:
    """Make `model` compute its own loss when it is given targets.

    Args:
        mesh: mesh over which the output weight is split (tp), if it is.
        sequence_parallel: whether each of its ranks has a part of the sequence.
    """
    group = None if mesh is None else mesh.get_group()
    backend = compile_config.backend if compile_config.compiles("loss") else ""

    def core(x: Tensor, weight: Tensor, targets: Tensor, is_main: bool) -> Tensor:
        if mesh is not None:
            x, weight = _local(x, weight, mesh, sequence_parallel)
        chunk = config.vocabulary_chunk
        loss, lse = linear_losses(x, weight, targets, chunk, group, vocabulary, backend)
        if not is_main or Z_LOSS not in auxiliary.weights:
            return loss
        return auxiliary.add(Z_LOSS, loss, lambda: summed_squares(lse, targets))

    for module in model.modules():
        if isinstance(module, LinearLoss):
            module.core = partial(core, is_main=module.is_main)


def _local(
    x: Tensor, weight: Tensor, mesh: DeviceMesh, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the whole sequence, and this rank's rows of the weight.

    Each rank computes its own rows' contribution to the gradient of the hidden states.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert isinstance(weight, DTensor)
    given = Shard(1) if sequence_parallel else Replicate()
    stream = DTensor.from_local(x, mesh, [given], run_check=False)
    whole = stream.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), weight.to_local()

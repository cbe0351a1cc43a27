"""All parameters of a run under one optimizer, with state keyed by parameter name.

A name means the same on every layout, so state saved under any layout loads under any other,
whatever number of model parts or parameter groups held it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.optim.settings import OptimizerConfig


class Optimizers:
    """The optimizer over every model part of this rank."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`stages` are the ranks that hold the other parts of the model, if there are any."""
        self.stages = stages
        self.names: dict[Tensor, str] = {
            p: name for part in parts for name, p in part.named_parameters() if p.requires_grad
        }
        free = _free_of_decay(parts, config)
        decayed = [p for p in self.names if p not in free]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}]
        if free:
            groups.append({"params": [p for p in self.names if p in free], "weight_decay": 0.0})
        self.optimizer = config.build(groups)
        self.peak_lr = config.lr

    def set_lr_factor(self, factor: float) -> float:
        """Set the learning rate to `factor` times its peak and return it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr * factor
        return self.peak_lr * factor

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients, to be changed in place."""
        return [local(p.grad) for p in self.names if p.grad is not None]

    def clip(
        self, max_norm: float, agree: Callable[[Tensor], Tensor] = lambda norm: norm
    ) -> Tensor:
        """Scale the gradients so that their global 2-norm is at most `max_norm` (0: no limit).

        Args:
            max_norm: the limit.
            agree: from the norm of these ranks to that of all who take this step.

        Returns:
            The global norm before clipping, a plain 0-d tensor that is the same on every rank.
        """
        gradients = [p.grad for p in self.names if p.grad is not None]
        norm = agree(global_norm(gradients, self.stages))
        if max_norm > 0:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(self.gradients(), scale)
        return norm

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """`{"<parameter>.<state>": tensor}`; the tensors are the live ones, to load in place."""
        if not self.optimizer.state:
            self._allocate()
        return {
            f"{self.names[p]}.{key}": value
            for p, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _allocate(self) -> None:
        """Have the optimizer make its state, by a step that cannot move a weight."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self.names:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.zero_grad()
        # Where nothing is loaded into it, the first update must find what it would have found.
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def global_norm(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm, in float32, over all gradients of all ranks.

    Gradients are grouped by how they lie on a mesh: each group's square is summed over the mesh
    axes that split it, and over no axis that holds copies of it; then all are added up over
    `stages`, whose ranks have gradients of other parameters.
    """
    from torch.distributed.tensor import DTensor  # takes a second

    by_layout: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        layout = None
        if isinstance(gradient, DTensor):
            layout = (gradient.device_mesh, gradient.placements)
        by_layout.setdefault(layout, []).append(local(gradient))
    squares = []
    for layout, group in by_layout.items():
        square = torch.stack(torch._foreach_norm(group, 2, torch.float32)).square().sum()
        for axis, placement in enumerate(layout[1] if layout else ()):
            if not placement.is_replicate():
                dist.all_reduce(square, group=layout[0].get_group(axis))
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _free_of_decay(parts: Sequence[nn.Module], config: OptimizerConfig) -> set[Tensor]:
    free: set[Tensor] = set()
    for module in (module for part in parts for module in part.modules()):
        for parameter in module.parameters(recurse=False):
            is_embedding = isinstance(module, nn.Embedding)
            if ("norms" in config.no_weight_decay_on and parameter.ndim == 1) or (
                "embeddings" in config.no_weight_decay_on and is_embedding
            ):
                free.add(parameter)
    return free

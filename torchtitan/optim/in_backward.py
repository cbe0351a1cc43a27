"""Updates in the backward: each parameter as soon as its gradient is complete, which is then freed.

At most the gradients of one FSDP unit are then alive, instead of all (LOMO, Lv et al., 2023,
arXiv:2306.09782). Whatever needs all gradients before the first update is impossible: clipping to a
global norm, gradient accumulation, skipping the step. The norm is still known, afterwards.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.grouping import Assignment, groups_of
from torchtitan.optim.norm import Layout, combined, layout_of, local, local_norms
from torchtitan.optim.optimizer_group import Optimizers
from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import OptimizerConfig, UpdateRule


class InBackward(Optimizers):
    """Optimizer over every model part of this rank that steps while the backward runs."""

    in_backward = True

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None,
        redistribute_grads: Callable[[Iterable[Tensor]], None],
    ) -> None:
        """`redistribute_grads` moves gradients to the layout of their parameters."""
        self.redistribute_grads = redistribute_grads
        self.optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        self.norms: dict[Tensor, tuple[Layout, Tensor]] = {}
        """Gradient norms of this backward, by parameter."""
        super().__init__(parameters, config, stages)
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def _build(self, assignments: Sequence[Assignment]) -> dict[torch.optim.Optimizer, UpdateRule]:
        for one in assignments:
            self.optimizer_of[one.parameter.tensor] = one.chosen.build(groups_of([one]))
        return {self.optimizer_of[one.parameter.tensor]: one.chosen for one in assignments}

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        self.redistribute_grads([parameter])
        gradient = parameter.grad
        assert gradient is not None
        (norm,) = local_norms([local(gradient)])
        self.norms[parameter] = layout_of(gradient), norm
        self.optimizer_of[parameter].step()
        parameter.grad = None

    def norm(self) -> Tensor:
        """Return the global norm of the gradients of the last backward."""
        by_layout: dict[Layout, list[Tensor]] = {}
        for layout, norm in (self.norms[p] for p in self.names if p in self.norms):
            by_layout.setdefault(layout, []).append(norm)
        self.norms.clear()
        return combined(by_layout, self.stages)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        raise AssertionError("the update is made")

    def step(self) -> None:
        """Do nothing: the backward has updated the parameters."""

"""All parameters of a run under one optimizer, with state keyed by parameter name.

A name means the same on every layout, so state saved under any layout loads under any other,
regardless of the number of model parts or parameter groups held it.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.average import AverageRule, WeightAverage
from torchtitan.optim.grouping import Assignment, assign, build_all, groups_of
from torchtitan.optim.parameters import (
    GradientNorm,
    Layout,
    NamedParameter,
    combined,
    layout_of,
    local,
    local_norms,
    norm_of,
    redistribute_grads,
)
from torchtitan.optim.settings import PEAK, OptimizerConfig, UpdateRule


class Optimizers:
    """The optimizer over every model part of this rank."""

    in_backward = False
    """Whether weights change during the backward, so that no step can be skipped."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`stages`: ranks that hold the other parts of the model, if any."""
        self.stages = stages
        self.names: dict[Tensor, str] = {p.tensor: p.name for p in parameters}
        self.peak_lr = config.lr
        self.assignments = assign(parameters, config)
        self.rules = self._build(self.assignments)
        """Update rule of each torch optimizer."""
        self.average: WeightAverage | None = None
        """Average of the weights, which `step` does not update."""
        self.stateful = dict(self.rules)
        """Rule of each torch optimizer, and of the average."""
        if config.average is not None:
            rule = AverageRule(decay=config.average)
            self.average = rule.build(groups_of(self.assignments))
            self.stateful[self.average] = rule

    def _build(self, assignments: Sequence[Assignment]) -> dict[torch.optim.Optimizer, UpdateRule]:
        """Build one optimizer for each rule."""
        return build_all(assignments, self.stages)

    def begin(self, factor: float) -> float:
        """Prepare a step: set each rate to `factor` times its peak, and drop the gradients.

        Returns:
            The learning rate of parameters that are in no group.
        """
        self.zero_grad()
        for optimizer in self.rules:
            for group in optimizer.param_groups:
                rate = group[PEAK] * factor
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)  # compiled code would specialize on a number
                else:
                    group["lr"] = rate
        return self.peak_lr * factor

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.names:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients, to be changed in place."""
        return [local(p.grad) for p in self.names if p.grad is not None]

    def norm(self) -> GradientNorm:
        """Return the global 2-norm of the gradients."""
        gradients = [p.grad for p in self.names if p.grad is not None]
        return norm_of(gradients, self.stages)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose global 2-norm is `norm`, to a 2-norm of at most `max_norm`."""
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if gradients := self.gradients():
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))  # perhaps offloaded

    def step(self) -> None:
        """Update the parameters."""
        for optimizer in self.rules:
            optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return `{"<parameter>.<state>": tensor}`, to save or to load into.

        The tensors are live, except states that are saved in another form. Call `load_state_dict`
        after loading.
        """
        for optimizer, rule in self.stateful.items():
            if not optimizer.state:
                rule.allocate(optimizer)
        return {name: rule.saved(state) for name, rule, state in self._states()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt the tensors of `state_dict` after loading into them, perhaps with new weights."""
        for name, rule, state in self._states():
            if name in tensors:
                rule.restore(state, tensors[name])

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `<parameter>.<state>` and the live tensor of each, as stored."""
        return ((name, state) for name, _, state in self._states())

    def state_bytes(self) -> int:
        """Return the bytes of all states on this rank, as stored."""
        return sum(rule.size(state) for _, rule, state in self._states())

    def _states(self) -> Iterator[tuple[str, UpdateRule, Tensor]]:
        for optimizer, rule in self.stateful.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{self.names[parameter]}.{key}", rule, value

    def describe(self) -> list[str]:
        """Return the lines to log at the start about each rule."""
        rules = {id(rule): rule for rule in self.rules.values()}.values()
        lines = [rule.describe((n, s) for n, r, s in self._states() if r is rule) for rule in rules]
        return [line for line in lines if line]


class InBackward(Optimizers):
    """Optimizer over every model part of this rank that steps while the backward runs."""

    in_backward = True

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None,
    ) -> None:
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
        redistribute_grads([parameter])
        gradient = parameter.grad
        assert gradient is not None
        (norm,) = local_norms([local(gradient)])
        self.norms[parameter] = layout_of(gradient), norm
        self.optimizer_of[parameter].step()
        parameter.grad = None

    def norm(self) -> GradientNorm:
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

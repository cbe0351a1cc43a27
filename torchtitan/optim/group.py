"""All parameters of a run under one optimizer, with state keyed by parameter name.

A name means the same on every layout, so state saved under any layout loads under any other,
whatever number of model parts or parameter groups held it.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.grouping import Assignment, assign, build_all
from torchtitan.optim.low_bit import size
from torchtitan.optim.norm import global_norm, local
from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import PEAK, OptimizerConfig, UpdateRule

__all__ = ["Optimizers", "local"]


class Optimizers:
    """The optimizer over every model part of this rank."""

    in_backward = False
    """Whether weights change while the backward runs, so that no step can be skipped."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`stages` are the ranks that hold the other parts of the model, if there are any."""
        self.stages = stages
        self.names: dict[Tensor, str] = {p.tensor: p.name for p in parameters}
        self.peak_lr = config.lr
        self.assignments = assign(parameters, config)
        self.rules = self._build(self.assignments)
        """Of each torch optimizer."""

    def _build(self, assignments: Sequence[Assignment]) -> dict[torch.optim.Optimizer, UpdateRule]:
        """One optimizer for each rule."""
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
                    group["lr"].fill_(rate)  # compiled code would take a number for a constant
                else:
                    group["lr"] = rate
        return self.peak_lr * factor

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.names:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients, to be changed in place."""
        return [local(p.grad) for p in self.names if p.grad is not None]

    def norm(self) -> Tensor:
        """The global 2-norm of the gradients, a plain 0-d tensor that is the same on every rank."""
        gradients = [p.grad for p in self.names if p.grad is not None]
        return global_norm(gradients, self.stages)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients so that their global 2-norm, which is `norm`, is at most
        `max_norm`."""
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(self.gradients(), scale)

    def step(self) -> None:
        """Update the parameters."""
        for optimizer in self.rules:
            optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """`{"<parameter>.<state>": tensor}`, to save, or to load into.

        The tensors are the live ones, but for those that are stored in few bits. After loading,
        `load_state_dict` is to be called.
        """
        for optimizer, rule in self.rules.items():
            if not optimizer.state:
                rule.allocate(optimizer)
        return {name: rule.saved(state) for name, rule, state in self._states()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, after it was loaded into; weights may be others too."""
        for name, rule, state in self._states():
            if name in tensors:
                rule.restore(state, tensors[name])
        self.weights_changed()

    def weights_changed(self) -> None:
        """Take note that weights were written by something other than an update."""

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """`<parameter>.<state>` and the live tensor of each, as it is stored."""
        return ((name, state) for name, _, state in self._states())

    def state_bytes(self) -> int:
        """What this rank keeps of all states, as they are stored."""
        return sum(size(state) for _, state in self.states())

    def _states(self) -> Iterator[tuple[str, UpdateRule, Tensor]]:
        for optimizer, rule in self.rules.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{self._name(parameter)}.{key}", rule, value

    def _name(self, updated: Tensor) -> str:
        """Of what the optimizer updates."""
        return self.names[updated]

    def describe(self) -> list[str]:
        """What there is to log at the start, of each rule."""
        rules = {id(rule): rule for rule in self.rules.values()}.values()
        lines = [rule.describe((n, s) for n, r, s in self._states() if r is rule) for rule in rules]
        return [line for line in lines if line]

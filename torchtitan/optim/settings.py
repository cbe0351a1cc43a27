"""What every optimizer's settings have in common.

An optimizer is an update rule for all parameters, or one that hands some of them to other rules by
their roles (`rule_for`). Groups of a recipe change the numbers of a rule, never the rule itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Size, Tensor

from torchtitan.config import Config, PlannedWorld, Problem
from torchtitan.optim.matrices import Lying
from torchtitan.optim.parameters import NamedParameter

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to the same function, compiled."""


class UpdateRule(Config):
    """How parameters are updated: settings, and what is made of them."""

    lr: float = Field(8e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay.")

    def options(self) -> dict[str, Any]:
        """The numbers of an update, as the torch optimizer calls them; they may differ by group."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def build(self, groups: "Sequence[ParameterGroup]") -> torch.optim.Optimizer:
        """The optimizer over `groups`, each of which has a rule of this class."""
        raise NotImplementedError

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state that `optimizer`, which has none, would find in its first update.

        This is for a state that starts with zeros and is made in the first update: it makes one at
        a rate of zero. A rule whose state starts otherwise does it otherwise.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def state_names(self) -> frozenset[str] | None:
        """What it keeps of each parameter; None: only its first update tells."""
        return None

    def saved(self, state: Tensor) -> Tensor:
        """What a checkpoint holds of a state: itself, or a tensor that any layout can load."""
        return state

    def restore(self, state: Tensor, saved: Tensor) -> None:
        """Take over what `saved` gave, after a checkpoint was read into it."""

    def state_bytes(self, parameter_bytes: int) -> float:
        """Of each parameter, at the least."""
        return 0.0

    def bytes_of(self, shape: Size, parameter_bytes: int, rows: int = 1, columns: int = 1) -> float:
        """Of a tensor whose rows and columns are split over so many ranks: of one, at the least."""
        return shape.numel() * self.state_bytes(parameter_bytes) / (rows * columns)

    @property
    def title(self) -> str:
        """What it is called."""
        return type(self).__name__.removesuffix("Rule")

    @property
    def rounds_state(self) -> bool:
        """Whether state is stored in fewer bits than it is computed in, so that layouts differ."""
        return False

    @property
    def is_compiled(self) -> bool:
        """Whether the update needs a compiler, whatever `[compile]` says."""
        return False

    def prepare(self, optimizer: torch.optim.Optimizer, compiled: "Compiled | None") -> None:
        """Have what is costly in `optimizer`, which `build` gave, compiled; None: nothing is."""

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        """What to log at the start of `<parameter>.<state>` and the tensor of each, if anything."""


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters that are updated alike."""

    parameters: tuple[NamedParameter, ...]
    rule: UpdateRule
    """With the numbers that hold for these."""
    stages: dist.ProcessGroup | None = None
    """The ranks that hold the other parts of the model, if there are any."""

    def options(self) -> dict[str, Any]:
        """The group as a torch optimizer takes it."""
        tensors = [parameter.tensor for parameter in self.parameters]
        return {"params": tensors, PEAK: self.rule.lr, **self.rule.options()}


PEAK = "peak_lr"
"""Key of a torch optimizer's group: its rate where the factor of the schedule is 1."""


class GroupConfig(Config):
    """Settings that differ for some parameters, each of which is in the first group it matches."""

    roles: tuple[str, ...] = Field(
        (),
        description="Roles of the parameters: embedding, matrix, norm, bias, head, or others that "
        "the model has.",
    )
    names: tuple[str, ...] = Field(
        (),
        description="Names of the parameters, where * matches anything; with roles, a parameter "
        "has to match both.",
    )
    lr_factor: float = Field(1.0, ge=0, description="Multiplies the learning rate.")
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay; absent: the optimizer's."
    )

    def matches(self, parameter: NamedParameter) -> bool:
        """Whether a parameter has one of the roles and one of the names."""
        by_role = not self.roles or parameter.role in self.roles
        return by_role and (
            not self.names or any(fnmatchcase(parameter.name, name) for name in self.names)
        )

    def changes(self) -> dict[str, Any]:
        """What it sets in place of the rule's settings, except for the learning rate."""
        return self.model_dump(exclude={"roles", "names", "lr_factor"}, exclude_none=True)


class OptimizerConfig(UpdateRule):
    """Settings of an optimizer; `name` picks the subclass, `build` makes the optimizer."""

    by_role: ClassVar[bool] = False
    """Whether roles decide what updates a parameter."""
    multiplies_matrices: ClassVar[bool] = False
    """Whether its updates are products of matrices, which take a host long."""
    sends: ClassVar[bool] = False
    """Whether ranks that share parameters send each other something for an update."""

    name: str = Field(description="Which optimizer: a key of torchtitan.optim.OPTIMIZERS.")
    no_weight_decay_on: tuple[Literal["norms", "embeddings"], ...] = Field(
        (), description="Parameters that are not decayed: norms (1-D parameters), embeddings."
    )
    groups: tuple[GroupConfig, ...] = Field(
        (), description="Settings that differ for some parameters."
    )
    early_step_in_backward: bool = Field(
        False,
        description="Update each parameter as soon as its gradient is complete, and free that; "
        "nothing can then be clipped, accumulated or skipped.",
    )
    offload_states: bool = Field(
        False, description="Keep the states in host memory, and compute the updates there."
    )

    @property
    def logit_limit(self) -> float:
        """Heads of attention are scaled down whose largest logit is above it; 0: none is."""
        return 0.0

    @property
    def rounded_by(self) -> str:
        """The key that says in what states are stored, where one does."""
        return "state_dtype" if "state_dtype" in type(self).model_fields else "name"

    def rule_for(self, parameter: NamedParameter) -> UpdateRule:
        """What updates a parameter: these settings, or those of a section within them."""
        return self

    def sent_bytes(
        self,
        parameters: Sequence[NamedParameter],
        lie: Callable[[NamedParameter], Lying],
        rank: int,
    ) -> Iterator[int]:
        """Of an update, what a rank gives in each all-to-all of those that share `parameters`.

        Raises:
            NotImplementedError: where there are no formulas of what it sends.
        """
        if self.sends:
            raise NotImplementedError(f"there are no formulas of what {self.name} sends")
        return iter(())

    def misfits(self, parameters: Sequence[NamedParameter]) -> Iterator[Problem]:
        """What is wrong with the settings, given all parameters of the model."""
        return iter(())

    def summary(self, parameters: Sequence[NamedParameter]) -> Iterator[str]:
        """What it comes to for the parameters of a model, a line each, if that is not plain."""
        return iter(())

    def problems(self, recipe: Any, world: PlannedWorld) -> Iterator[Problem]:
        yield from super().problems(recipe, world)
        if self.offload_states and self.early_step_in_backward:
            message = (
                "with self.early_step_in_backward, the backward would wait for the host's updates; "
                "use false"
            )
            yield Problem("offload_states", message, ("early_step_in_backward",))
        on_cpu = world.is_here and world.device_type == "cpu"
        if self.offload_states and self.multiplies_matrices:
            message = f"{self.name} multiplies matrices, for which the host is too slow; use false"
            yield Problem("offload_states", message, ("name",))
        elif self.offload_states and on_cpu:
            message = "on a CPU, states are in host memory already; use false"
            yield Problem("offload_states", message)


class Implemented(UpdateRule):
    """Settings of an optimizer that torch implements in three ways."""

    implementation: Literal["fused", "foreach", "for-loop"] = Field(
        "fused", description="Fused kernel, loop over lists of tensors, or loop over tensors."
    )

    def how(self) -> dict[str, bool]:
        """The flags by which a torch optimizer picks its implementation."""
        return {
            "fused": self.implementation == "fused",
            "foreach": self.implementation == "foreach",
        }

"""Settings shared by all optimizers.

An optimizer is an update rule for all parameters, or delegates some of them to other rules by role
(`rule_for`). Groups of a recipe change the settings of a rule, never the rule itself.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Size, Tensor

from torchtitan.config import Config, Problem
from torchtitan.optim.parameters import NamedParameter, local

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function that compiles a function."""


class UpdateRule(Config):
    """Settings of an update rule, and the optimizer built from them."""

    lr: float = Field(8e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay."""

    def options(self) -> dict[str, Any]:
        """Return the options of an update by their torch names; they may differ by group."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def width_factor(self, parameter: NamedParameter) -> float | None:
        """Return the factor of the learning rate by the `growth` of a parameter, with which an
        update changes what it computes as in the base model; None: no such rule is published."""
        return None

    @abstractmethod
    def build(self, groups: "Sequence[ParameterGroup]") -> torch.optim.Optimizer:
        """Build the optimizer over `groups`, each of which has a rule of this class."""

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate the state that `optimizer`, which has none, would create in its first update.

        Takes a step at a rate of zero. Rules whose state does not start as zeros created in the
        first update override this.
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
        """Return the names of the state of each parameter; None if only known after an update."""
        return None

    def saved(self, state: Tensor) -> Tensor:
        """Return the checkpoint form of a state: itself, or a tensor that any layout can load."""
        return state

    def restore(self, state: Tensor, saved: Tensor) -> None:
        """Restore a state from the tensor of `saved`, after a checkpoint was read into it."""

    def size(self, state: Tensor) -> int:
        """Return the bytes of a state on this rank."""
        return local(state).nbytes

    def state_bytes(self, parameter_bytes: int) -> float:
        """Return a lower bound on the bytes of state per parameter."""
        return 0.0

    def bytes_of(self, shape: Size, parameter_bytes: int, rows: int = 1, columns: int = 1) -> float:
        """Return a lower bound on the bytes of state, sharded over `rows` and `columns`."""
        return shape.numel() * self.state_bytes(parameter_bytes) / (rows * columns)

    @property
    def title(self) -> str:
        """Display name."""
        return type(self).__name__.removesuffix("Rule")

    @property
    def rounds_state(self) -> bool:
        """Whether state is stored in fewer bits than it is computed in; layouts then differ."""
        return False

    @property
    def is_compiled(self) -> bool:
        """Whether the update needs a compiler, regardless of `[compile]`."""
        return False

    def prepare(self, optimizer: torch.optim.Optimizer, compiled: "Compiled | None") -> None:
        """Compile the expensive parts of `optimizer`, built by `build`; None compiles nothing."""

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        """Describe the states, given as `<parameter>.<state>` and tensor, for the initial log."""


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters that are updated alike."""

    parameters: tuple[NamedParameter, ...]
    rule: UpdateRule
    """Rule with the settings for these parameters."""
    stages: dist.ProcessGroup | None = None
    """Ranks that hold the other parts of the model, if any."""

    def options(self) -> dict[str, Any]:
        """Return the group in torch's format."""
        tensors = [parameter.tensor for parameter in self.parameters]
        return {"params": tensors, PEAK: self.rule.lr, **self.rule.options()}


PEAK = "peak_lr"
"""Key of a torch optimizer's group for the rate at a schedule factor of 1."""


class GroupConfig(Config):
    """Settings that differ for some parameters; each parameter is in the first group it matches."""

    roles: tuple[str, ...] = ()
    """Roles of the parameters: embedding, matrix, norm, bias, head, or others that the model
    has."""
    names: tuple[str, ...] = ()
    """Names of the parameters, where * matches anything; with roles, a parameter must match
    both."""
    lr_factor: float = Field(1.0, ge=0)
    """Factor of the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay (default: the optimizer's)."""

    def matches(self, parameter: NamedParameter) -> bool:
        """Whether a parameter has one of the roles and one of the names."""
        by_role = not self.roles or parameter.role in self.roles
        return by_role and (
            not self.names or any(fnmatchcase(parameter.name, name) for name in self.names)
        )

    def changes(self) -> dict[str, Any]:
        """Return the settings that replace the rule's, except for the learning rate."""
        return self.model_dump(exclude={"roles", "names", "lr_factor"}, exclude_none=True)


class OptimizerConfig(UpdateRule):
    """Settings of an optimizer; `name` picks the subclass, `build` makes the optimizer."""

    by_role: ClassVar[bool] = False
    """Whether roles decide the rule of a parameter."""
    multiplies_matrices: ClassVar[bool] = False
    """Whether its updates are matrix products, which are slow on a host."""
    needs_all_gradients: ClassVar[str] = ""
    """Why no parameter can be updated before all gradients are complete; empty if it can."""

    name: str
    """Name of the optimizer: a key of torchtitan.optim.OPTIMIZERS."""
    no_weight_decay_on: tuple[Literal["norms", "embeddings"], ...] = ()
    """Parameters without weight decay: norms (1-D parameters), embeddings."""
    groups: tuple[GroupConfig, ...] = ()
    """Settings that differ for some parameters."""
    average: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights in float32, such as 0.999, for
    validation.average and `torchtitan checkpoint convert --average` (default: no average)."""
    early_step_in_backward: bool = False
    """Update each parameter during the backward, as soon as its gradient is complete, and free the
    gradient; without clipping, accumulation and skipped steps."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that a run with it has: keys of `torchtitan.build.FEATURES`."""
        return ()

    @property
    def title(self) -> str:
        return self.name

    @property
    def rounded_by(self) -> tuple[str, ...]:
        """Keys of the settings by which states are rounded."""
        return ("state_dtype",) if self.rounds_state else ()

    def rule_for(self, parameter: NamedParameter) -> UpdateRule:
        """Return the rule for a parameter: these settings, or those of a section within them."""
        return self

    def parameter_problems(self, parameters: Sequence[NamedParameter]) -> Iterator[Problem]:
        """Find problems in the settings, given all parameters of the model."""
        return iter(())

    def summary(self, parameters: Sequence[NamedParameter]) -> Iterator[str]:
        """Return log lines on how the rule applies to the parameters, if that is not obvious."""
        return iter(())

    def unplanned(self) -> Iterator[str]:
        """Yield what a plan leaves out, as `setting: sentence`."""
        return iter(())


class Implemented(UpdateRule):
    """Settings of an optimizer with three implementations in torch."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation: a fused kernel, a loop over lists of tensors, or a loop over tensors."""

    def how(self) -> dict[str, bool]:
        """Return the flags that select torch's implementation."""
        return {
            "fused": self.implementation == "fused",
            "foreach": self.implementation == "foreach",
        }

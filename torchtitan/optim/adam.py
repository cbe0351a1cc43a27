"""Adam (Kingma and Ba, 2015, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, 2019,
arXiv:1711.05101), as torch implements them, or with moments that are stored in another way."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Context, KeyOf, Problem, Registry
from torchtitan.device import compiles_for_cpu
from torchtitan.optim.elementwise import elementwise
from torchtitan.optim.norm import local
from torchtitan.optim.settings import GroupConfig, Implemented, OptimizerConfig, ParameterGroup

Update = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Any]], None]
"""Function that updates a weight, given its gradient, state and group, all of plain tensors."""


def compiled_update(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an update of plain tensors, once for each shape."""
    return torch.compile(function, fullgraph=True, dynamic=False)


class MomentStorage:
    """Storage of Adam's moments; of this class, as the parameters are."""

    rounds = False
    """Whether moments are stored in fewer bits than they are computed in."""
    is_compiled = False
    """Whether updates need a compiler."""

    def build(self, rule: "AdamRule", groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Build the optimizer over `groups`."""
        kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
        how: dict[str, Any] = rule.how()
        return elementwise(kind, [group.options() for group in groups], **how)

    def zeros(self, part: Tensor, *, signed: bool) -> Tensor:
        """Return a zero moment with the shape of `part`, a plain tensor."""
        return torch.zeros_like(part)

    def update(self) -> Update | None:
        """Return AdamW's update of plain tensors with such moments; None if it is torch's."""
        return None

    def values(self, part: Tensor) -> Tensor:
        """Return the values of a moment, a plain tensor."""
        return part

    def saved(self, state: Tensor) -> Tensor:
        """Return the checkpoint form of a state; see `UpdateRule`."""
        return state

    def restore(self, state: Tensor, saved: Tensor) -> None:
        """Restore a state from the tensor of `saved`."""

    def size(self, state: Tensor) -> int:
        """Return the bytes of a state on this rank."""
        return local(state).nbytes

    def state_bytes(self, parameter_bytes: int) -> float:
        """Return a lower bound on the bytes of both moments per parameter."""
        return 2.0 * parameter_bytes

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        """Describe the states, for the initial log."""


STATE_DTYPES = Registry[MomentStorage]("state_dtype", {"parameter": MomentStorage()})
"""Storage of moments by the name used in a recipe."""


class AdamRule(Implemented):
    """Settings shared by Adam and AdamW."""

    decoupled: ClassVar[bool]
    """Whether weight decay is decoupled from the gradient."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Term added to the root of the second moment."""
    state_dtype: Annotated[str, KeyOf(STATE_DTYPES)] = "parameter"
    """Format of the moments: the dtype of the parameters (training.dtype), or a format of fewer
    bits; a run may resume with another."""

    @property
    def storage(self) -> MomentStorage:
        """Storage of the moments."""
        return STATE_DTYPES[self.state_dtype]

    @property
    def state_storage(self) -> MomentStorage:
        """Storage that reads every state of the optimizer."""
        return self.storage

    def options(self) -> dict[str, Any]:
        return super().options() | {"betas": (self.beta1, self.beta2), "eps": self.eps}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return self.storage.build(self, groups)

    def state_names(self) -> frozenset[str]:
        return frozenset({"step", "exp_avg", "exp_avg_sq"})

    def saved(self, state: Tensor) -> Tensor:
        return self.state_storage.saved(state)

    def restore(self, state: Tensor, saved: Tensor) -> None:
        self.state_storage.restore(state, saved)

    def size(self, state: Tensor) -> int:
        return self.state_storage.size(state)

    def state_bytes(self, parameter_bytes: int) -> float:
        return self.storage.state_bytes(parameter_bytes)

    @property
    def rounds_state(self) -> bool:
        return self.state_storage.rounds

    @property
    def is_compiled(self) -> bool:
        return self.storage.is_compiled

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        if self.is_compiled and self.implementation != "fused":
            message = 'with self.state_dtype the update is compiled instead; use "fused"'
            yield Problem("implementation", message, ("state_dtype",))
        on_cpu = context.world.is_here and context.world.device_type == "cpu"
        if self.is_compiled and on_cpu and not compiles_for_cpu():
            message = (
                "its update is compiled, which on a CPU needs g++ or clang++; install one, or "
                'use "parameter"'
            )
            yield Problem("state_dtype", message)

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        return self.storage.describe(states)


class AdamWRule(AdamRule):
    """Adam with weight decay decoupled from the gradient."""

    decoupled = True


class AdamGroup(GroupConfig):
    """Settings of Adam and AdamW that differ for some parameters; the first match applies."""

    beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of the first moment (default: the optimizer's)."""
    beta2: float | None = Field(None, ge=0, lt=1)
    """Decay of the second moment (default: the optimizer's)."""
    eps: float | None = Field(None, gt=0)
    """Term added to the root of the second moment (default: the optimizer's)."""


class AdamW(AdamWRule, OptimizerConfig):
    """Adam with weight decay decoupled from the gradient."""

    name: Literal["AdamW"] = "AdamW"
    """Name of the optimizer."""
    groups: tuple[AdamGroup, ...] = ()
    """Settings that differ for some parameters."""


class Adam(AdamRule, OptimizerConfig):
    """Adam; weight decay is added to the gradient."""

    decoupled = False

    name: Literal["Adam"] = "Adam"
    """Name of the optimizer."""
    groups: tuple[AdamGroup, ...] = ()
    """Settings that differ for some parameters."""

"""Adam, AdamW and SGD, which update this rank's parts of parameters, gradients and states.

Their update of elements does the same to a part as to the whole, so torch's optimizers need not
know of DTensors. Given lists of them, torch first derives how each list is sharded, which takes
seconds for hundreds of parameters on two axes of a mesh.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from torchtitan.config import Context, KeyOf, Problem, Registry
from torchtitan.device import compiles_for_cpu
from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.optim.settings import GroupConfig, Implemented, OptimizerConfig, ParameterGroup
from torchtitan.torch_private.compiler import without_compiler
from torchtitan.torch_private.dtensor import detached_part, is_dtensor, laid_out_as


def elementwise(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], **settings: Any
) -> Optimizer:
    """Build an optimizer whose update of an element depends on no other element."""
    optimizer = without_compiler(kind, groups, **settings)
    if any(is_dtensor(each) for group in optimizer.param_groups for each in group["params"]):
        vars(optimizer)["step"] = partial(_update_parts, optimizer, optimizer.step)
    return optimizer


def _update_parts(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """Let an optimizer see parts alone, and keep its new states as those of the whole."""
    groups, states = optimizer.param_groups, optimizer.state
    wholes = [p for group in groups for p in group["params"] if p.grad is not None]
    parts = {whole: detached_part(whole) for whole in wholes}
    given = {whole: {name: _part(s) for name, s in states[whole].items()} for whole in wholes}
    of_parts: defaultdict[Tensor, Any] = defaultdict(dict)
    for whole, part in parts.items():
        part.grad = detached_part(whole.grad)
        of_parts[part] = given[whole].copy()
    optimizer.state = of_parts
    optimizer.param_groups = [
        group | {"params": [parts[p] for p in group["params"] if p in parts]} for group in groups
    ]
    try:
        update()
    finally:
        optimizer.state, optimizer.param_groups = states, groups
    for whole, part in parts.items():
        for name, state in of_parts[part].items():
            if state is not given[whole].get(name):
                is_part = isinstance(state, Tensor) and state.shape == part.shape
                states[whole][name] = laid_out_as(whole, state) if is_part else state


def _part(state: Any) -> Any:
    return detached_part(state) if isinstance(state, Tensor) else state


class SGDGroup(GroupConfig):
    """Settings of SGD that differ for some parameters; the first match applies."""

    momentum: float | None = Field(None, ge=0, lt=1)
    """Decay of the running gradient (default: the optimizer's)."""


class SGD(OptimizerConfig):
    """Gradient descent with optional momentum."""

    # torch's fused SGD does not accept FSDP's sharded parameters.
    implementation: Literal["foreach", "for-loop"] = "foreach"
    """Implementation: a loop over lists of tensors, or over tensors."""
    name: Literal["SGD"] = "SGD"
    """Name of the optimizer."""
    groups: tuple[SGDGroup, ...] = ()
    """Settings that differ for some parameters."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay of the running gradient."""
    nesterov: bool = False
    """Nesterov's momentum (needs momentum > 0)."""

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        if self.nesterov and not self.momentum:
            yield Problem("nesterov", "it needs self.momentum > 0", ("momentum",))

    def options(self) -> dict[str, Any]:
        return super().options() | {"momentum": self.momentum, "nesterov": self.nesterov}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        options = [group.options() for group in groups]
        foreach = self.implementation == "foreach"
        return elementwise(torch.optim.SGD, options, foreach=foreach)

    def width_factor(self, parameter: NamedParameter) -> float:
        inputs, outputs = parameter.growth
        return outputs / inputs

    def state_names(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"} if self.momentum else ())

    def state_bytes(self, parameter_bytes: int) -> float:
        return parameter_bytes if self.momentum else 0.0


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

    def width_factor(self, parameter: NamedParameter) -> float | None:
        return 1 / parameter.growth[0]


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

"""Adam (Kingma and Ba, 2015, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, 2019,
arXiv:1711.05101), as torch implements them, or with states in fewer bits, by torchao."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Context, Problem
from torchtitan.device import compiles_for_cpu
from torchtitan.optim import low_bit
from torchtitan.optim.settings import GroupConfig, Implemented, OptimizerConfig, ParameterGroup
from torchtitan.torch_private.optimizers import without_compiler


class AdamRule(Implemented):
    """Settings shared by Adam and AdamW."""

    decoupled: ClassVar[bool]
    """Whether weight decay is decoupled from the gradient."""

    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    state_dtype: low_bit.StateDtype = Field(
        "parameter",
        description="Format of the moments: that of the parameters (training.dtype), or 16, 8 "
        "or 4 bits; a run may resume with another.",
    )

    def options(self) -> dict[str, Any]:
        return super().options() | {"betas": (self.beta1, self.beta2), "eps": self.eps}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        if self.state_dtype != "parameter":
            return low_bit.LowBitAdam(groups, self.state_dtype, decoupled=self.decoupled)
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        how: dict[str, Any] = self.how()
        return without_compiler(kind, [group.options() for group in groups], **how)

    def state_names(self) -> frozenset[str]:
        return frozenset({"step", "exp_avg", "exp_avg_sq"})

    def saved(self, state: Tensor) -> Tensor:
        return low_bit.values(state)

    def restore(self, state: Tensor, saved: Tensor) -> None:
        low_bit.fill(state, saved)

    def state_bytes(self, parameter_bytes: int) -> float:
        return low_bit.BYTES.get(self.state_dtype, 2 * parameter_bytes)

    @property
    def rounds_state(self) -> bool:
        return self.state_dtype != "parameter"

    @property
    def is_compiled(self) -> bool:
        return self.state_dtype != "parameter"

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
        if self.state_dtype == "parameter":
            return None
        return low_bit.describe(self.state_dtype, states)


class AdamWRule(AdamRule):
    """Adam with weight decay decoupled from the gradient."""

    decoupled = True


class AdamGroup(GroupConfig):
    """Settings of Adam and AdamW that differ for some parameters; the first match applies."""

    beta1: float | None = Field(
        None, ge=0, lt=1, description="Decay of the first moment; absent: the optimizer's."
    )
    beta2: float | None = Field(
        None, ge=0, lt=1, description="Decay of the second moment; absent: the optimizer's."
    )
    eps: float | None = Field(
        None, gt=0, description="Added to the root of the second moment; absent: the optimizer's."
    )


class AdamW(AdamWRule, OptimizerConfig):
    """Adam with weight decay decoupled from the gradient."""

    name: Literal["AdamW"] = Field("AdamW", description="Which optimizer.")
    groups: tuple[AdamGroup, ...] = Field(
        (), description="Settings that differ for some parameters."
    )


class Adam(AdamRule, OptimizerConfig):
    """Adam; weight decay is added to the gradient."""

    decoupled = False

    name: Literal["Adam"] = Field("Adam", description="Which optimizer.")
    groups: tuple[AdamGroup, ...] = Field(
        (), description="Settings that differ for some parameters."
    )

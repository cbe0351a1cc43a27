"""Stochastic gradient descent. Unlike Adam it shows every error of scale in the gradients, so the
parity tests use it."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field

from torchtitan.config import Context, Problem
from torchtitan.optim.elementwise import elementwise
from torchtitan.optim.settings import GroupConfig, OptimizerConfig, ParameterGroup


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

    def state_names(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"} if self.momentum else ())

    def state_bytes(self, parameter_bytes: int) -> float:
        return parameter_bytes if self.momentum else 0.0

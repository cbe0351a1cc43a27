"""What every optimizer's settings have in common."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Config

ParameterGroup = dict[str, Any]
ParameterGroups = list[ParameterGroup]


class OptimizerConfig(Config):
    """Settings of an optimizer; `name` picks the subclass, `build` makes the optimizer."""

    name: str = Field(description="Which optimizer: a key of torchtitan.optim.OPTIMIZERS.")
    lr: float = Field(8e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay.")
    no_weight_decay_on: tuple[Literal["norms", "embeddings"], ...] = Field(
        (), description="Parameters that are not decayed: norms (1-D parameters), embeddings."
    )
    early_step_in_backward: bool = Field(
        False,
        description="Update each parameter as soon as its gradient is complete, and free that; "
        "nothing can then be clipped, accumulated or skipped.",
    )
    offload_states: bool = Field(
        False, description="Keep the states in host memory, and compute the updates there."
    )

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """The optimizer over `groups`.

        Each is `{"params": [...], "weight_decay": number, "is_embedding": whether they are tables
        of which a step uses some rows}`.
        """
        raise NotImplementedError

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        """What to say at the start of `<parameter>.<state>` and the tensor of each, if anything."""


class Implemented(OptimizerConfig):
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

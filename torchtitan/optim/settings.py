"""What every optimizer's settings have in common."""

from typing import Any, Literal

import torch
from pydantic import Field

from torchtitan.config import Config

ParameterGroups = list[dict[str, Any]]


class OptimizerConfig(Config):
    """Settings of an optimizer; `name` picks the subclass, `build` makes the optimizer."""

    name: str = Field(description="Which optimizer: a key of torchtitan.optim.OPTIMIZERS.")
    lr: float = Field(8e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay.")
    no_weight_decay_on: tuple[Literal["norms", "embeddings"], ...] = Field(
        (), description="Parameters that are not decayed: norms (1-D parameters), embeddings."
    )

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """The optimizer over `groups`, each `{"params": [...], "weight_decay": ...}`."""
        raise NotImplementedError


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

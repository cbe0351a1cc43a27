"""DiLoCo: replicas that train independently, and an outer optimizer for the mean of their changes
(Douillard et al., 2023, arXiv:2311.08105).

After every n updates of each replica, let d be the mean over replicas of how far their weights have
moved, from the last common weights a to their own, as a difference (a - w). With a momentum m that
starts at zero, all replicas continue from

    m = momentum m + d
    a = a - lr (d + momentum m)

This is SGD with Nesterov momentum, as in torch, whose gradient is d. The replicas' own optimizers
keep their states.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm import AgreementConfig, SumReducer, Unit


class DiLoCo(AgreementConfig):
    """Weights of replicas change by an outer optimizer after every n-th step."""

    name: Literal["diloco"] = "diloco"
    """Method of synchronizing replicas."""
    every: int = Field(500, ge=2)
    """Steps of each replica between two steps of the outer optimizer."""
    outer_lr: float = Field(0.7, gt=0)
    """Learning rate of the outer optimizer; with 1, and `outer_momentum = 0`, weights are
    averaged."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""

    def open(self, unit: Unit, group: ProcessGroup) -> "OuterNesterov":
        return OuterNesterov(self, unit, group)


class OuterNesterov(SumReducer):
    """All-reduce of the changes of weights, which it replaces by those of the outer optimizer."""

    def __init__(self, config: DiLoCo, unit: Unit, group: ProcessGroup) -> None:
        super().__init__(group)
        self.config = config
        self.momentum = {
            name: torch.zeros(shape, device=unit.device) for name, shape in unit.shapes.items()
        }

    def state(self) -> dict[str, Tensor]:
        return {f"momentum.{name}": momentum for name, momentum in self.momentum.items()}

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        super().__call__(gradients)
        lr, decay = self.config.outer_lr, self.config.outer_momentum
        for name, change in gradients.items():
            momentum = self.momentum[name].mul_(decay).add_(change)
            change.add_(momentum, alpha=decay).mul_(lr)

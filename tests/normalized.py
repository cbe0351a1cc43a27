"""An optimizer outside the tree: each matrix moves by a set length, and AdamW updates the rest."""

from typing import Literal

import torch
from pydantic import Field

from torchtitan.optim import OPTIMIZERS, OptimizerConfig
from torchtitan.optim.adam_and_sgd import AdamGroup, AdamWRule
from torchtitan.optim.parameters import global_norm


class Group(AdamGroup):
    """Parameters that Normalized updates with other numbers."""

    momentum: float | None = Field(None, ge=0, lt=1, description="Decay of the running gradient.")


class Normalized(OptimizerConfig):
    """Matrices move by `lr` in the direction of their running gradient; AdamW updates the rest."""

    name: Literal["Normalized"] = Field("Normalized", description="Which optimizer.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the running gradient.")
    adamw: AdamWRule = AdamWRule(lr=1e-3)
    groups: tuple[Group, ...] = ()

    def rule_for(self, parameter):
        return self if parameter.role == "matrix" else self.adamw

    def options(self):
        return super().options() | {"momentum": self.momentum}

    def build(self, groups):
        assert all(len(p.shape) == 2 for group in groups for p in group.parameters)
        return _Normalized([group.options() for group in groups], {})

    def allocate(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {"running": torch.ones_like(parameter)}


class _Normalized(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:  # ones, so that a state that begins otherwise is seen
                    state["running"] = torch.ones_like(weight)
                running = state["running"].lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(running * (group["lr"] / global_norm([running])))


OPTIMIZERS["Normalized"] = Normalized

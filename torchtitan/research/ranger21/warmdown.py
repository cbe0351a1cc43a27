"""Ranger21's learning rate: warm-up, flat, linear warm-down."""

from typing import Literal

from pydantic import Field

from torchtitan.optim import ScheduleConfig


class Ranger21Schedule(ScheduleConfig):
    """Warm-up, flat, linear warm-down of Ranger21 (Wright and Demeure, 2021, arXiv:2106.13731)."""

    name: Literal["ranger21"] = "ranger21"
    """Name of the schedule."""
    warmup_steps: int = Field(2000, ge=0)
    """Steps of linear warm-up, 2 / (1 - beta2) by default; at most 22 % of the schedule."""
    decay_ratio: float | None = Field(0.28, ge=0, le=1)
    """Fraction of the steps that decay, at most what the warm-up leaves; none: all of it."""
    min_lr_factor: float = Field(0.03, ge=0, le=1)
    """Fraction of the peak rate at which the decay ends."""

    def warmup(self, steps: int) -> int:
        return min(self.warmup_steps, int(0.22 * steps))

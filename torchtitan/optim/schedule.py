"""The learning rate as a pure function of the steps or tokens so far: warm-up, stable, decay.

Warmup-stable-decay (Hu et al., 2024, arXiv:2404.06395); without a decay ratio the decay starts
where the warm-up ends. Other schedules have other defaults, and their own rules for the number of
steps of each phase.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from torchtitan.config import Config, Registry

Ratio = Annotated[float | None, BeforeValidator(lambda given: 1.0 if given is None else given)]
"""A ratio of which none is 1, where that is not its default: a recipe that a run records, in TOML,
leaves out what is none."""


class ScheduleConfig(Config):
    """Settings of the learning rate schedule."""

    name: str = "warmup_stable_decay"
    """Name of the schedule."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of warmup_steps, total_steps and decay_from: optimizer steps, or the tokens of all ranks
    that metrics count, so that the rate does not depend on batch sizes."""
    warmup_steps: int = Field(200, ge=0)
    """Steps of linear warm-up to the peak rate; at most all of the schedule."""
    total_steps: int | None = Field(None, ge=1)
    """Length of the schedule in steps (default: training.steps)."""
    decay_ratio: float | None = Field(None, ge=0, le=1)
    """Fraction of the steps that decay, at most all after the warm-up (default: all of these)."""
    decay_from: int | None = Field(None, ge=0)
    """Step after which the rate decays until the end, instead of decay_ratio. To end a run with a
    constant rate, set it to the step of the checkpoint."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = Field(0.0, ge=0, le=1)
    """Fraction of the peak rate at which the decay ends."""

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps, at most all."""
        return min(self.warmup_steps, steps)

    def shares(self, steps: int) -> tuple[int, int]:
        """Return the number of warm-up and of decay steps; the rate is stable between them.

        The decay takes at most what the warm-up leaves.
        """
        warmup = self.warmup(steps)
        if self.decay_from is not None:
            decay = max(steps - self.decay_from, 0)
        else:
            decay = steps if self.decay_ratio is None else round(steps * self.decay_ratio)
        return warmup, min(decay, steps - warmup)

    def factor(self, step: int, steps: int, size: int = 1) -> float:
        """Return the multiplier of the peak learning rate for the 1-based `step` of `steps`.

        Warm-up: step / warm-up steps, so step 1 already learns. Decay: t runs from 0 at its first
        step to 1 just after its last, so no step has a rate of zero when `min_lr_factor` is 0.

        Args:
            step: the tokens up to the end of the step, if these are the unit.
            steps: all tokens, if these are the unit.
            size: tokens in the step.
        """
        warmup, decay = self.shares(steps)
        if step <= warmup:
            return step / warmup
        t = min(max((step - size - (steps - decay)) / decay, 0.0), 1.0) if decay else 0.0
        shape = {
            "linear": 1 - t,
            "sqrt": 1 - math.sqrt(t),
            "cosine": 0.5 * (1 + math.cos(math.pi * t)),
        }[self.decay_type]
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape


class WarmupStableDecay(ScheduleConfig):
    """Warm-up, stable phase and decay of any length and shape."""

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Name of the schedule."""


class PowerLaw(ScheduleConfig):
    """Warm-up, power of the step, decay (Zhai et al., 2022, arXiv:2106.04560, section 3.5).

    Without a decay the rate does not depend on the length of the run.
    """

    name: Literal["power_law"] = "power_law"
    """Name of the schedule."""
    decay_ratio: Ratio = Field(0.0, ge=0, le=1)
    """Fraction of the steps that decay, at most all after the warm-up; none or 1: all of these."""
    exponent: float = Field(0.5, gt=0)
    """Exponent p of (warm-up steps / step)^p, which multiplies the rate after the warm-up; 0.5: the
    inverse square root."""

    def factor(self, step: int, steps: int, size: int = 1) -> float:
        fallen: float = min((max(self.warmup(steps), size) / step) ** self.exponent, 1.0)
        return super().factor(step, steps, size) * fallen


SCHEDULES = Registry[type[ScheduleConfig]](
    "schedule", {"warmup_stable_decay": WarmupStableDecay, "power_law": PowerLaw}
)


def rate_in_recipe(recipe: Mapping[str, Any], step: int, tokens: int) -> float | None:
    """Return the learning rate of a step of the schedule by a recorded recipe, in dotted keys.

    None: it has no schedule, one that is not registered, or one in tokens of several stages.

    Args:
        tokens: tokens of the schedule before the step.
    """
    prefix = "lr_scheduler."
    section = {k.removeprefix(prefix): v for k, v in recipe.items() if k.startswith(prefix)}
    # Before there were several schedules, a recipe did not name its own.
    kind = SCHEDULES.get(section.get("name", "warmup_stable_decay"))
    if not section or kind is None:
        return None
    config = kind.model_validate({k: v for k, v in section.items() if k in kind.model_fields})
    size = 1
    if config.unit == "tokens":
        if any(key.startswith("training.stages") and recipe[key] for key in recipe):
            return None
        size = recipe["training.global_batch_size"] * recipe["training.seq_len"]
        step = tokens + size
    steps = config.total_steps or recipe["training.steps"] * size
    return float(recipe["optimizer.lr"]) * config.factor(step, steps, size)

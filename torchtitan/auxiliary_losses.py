"""Losses that a recipe adds to that of the task: `[[auxiliary_losses]]`, each with a weight.

The training loss is the loss of the task plus the weighted sum of these; all are means over the
units of the global batch, so they are the same on every layout. A weight may rise at the start of a
run and change later, as a pure function of the step, so a resumed run has the same.

    z_loss       the square of the log-sum-exp of the logits, which keeps that near 0 (PaLM:
                 Chowdhery et al., 2022, arXiv:2204.02311, section 5)
    multi_token  the tokens after the next, by chained blocks, one for each, that share the
                 embedding and the output of the model (DeepSeek-V3, 2024, arXiv:2412.19437,
                 section 2.2)
    load_balance, router_z_loss   of mixtures of experts (`torchtitan.models.experts.Router`)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn
from torch.distributed import ProcessGroup

from torchtitan.config import Config, Context, Problem, Registry


class AuxiliaryLossConfig(Config):
    """An auxiliary loss and its weight; `name` picks the subclass."""

    name: str
    """Name of the loss: a key of torchtitan.auxiliary_losses.AUXILIARY_LOSSES."""
    weight: float = Field(ge=0)
    """Weight in the training loss."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the weight rises linearly from 0."""
    final_weight: float | None = Field(None, ge=0)
    """Weight from `final_step` on (default: unchanged)."""
    final_step: int = Field(0, ge=0)
    """First step with the final weight."""
    decay_steps: int = Field(0, ge=0)
    """Steps before `final_step` over which the weight changes linearly; 0: at once."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if (self.final_weight is None) != (self.final_step == 0):
            key = "final_weight" if self.final_weight is None else "final_step"
            message = "self.final_weight and self.final_step must be set together"
            yield Problem(key, message, ("final_weight", "final_step"))
        elif self.final_step and self.warmup_steps + self.decay_steps > self.final_step:
            message = (
                f"the weight rises for {self.warmup_steps} steps and changes for "
                f"{self.decay_steps}, which is more than self.final_step"
            )
            yield Problem("final_step", message, ("warmup_steps", "decay_steps"))
        elif self.final_weight is None and self.decay_steps:
            message = "it has no effect without self.final_weight"
            yield Problem("decay_steps", message, ("final_weight",))

    @property
    def is_on(self) -> bool:
        """Whether any step trains on it."""
        return self.weight > 0 or bool(self.final_weight)

    @property
    def reported(self) -> bool:
        """Whether it is computed at all."""
        return True

    def weight_at(self, step: int) -> float:
        """Return the weight in a step, from 1 on."""
        if step < self.warmup_steps:
            return self.weight * step / self.warmup_steps
        if self.final_weight is None:
            return self.weight
        left = self.final_step - step
        if left <= 0:
            return self.final_weight
        part = min(left / self.decay_steps, 1.0) if self.decay_steps else 1.0
        return self.final_weight + (self.weight - self.final_weight) * part

    def described(self) -> str:
        """Describe the loss and its weight in a few words."""
        parts = [f"{self.name}: weight {self.weight:g}"]
        if self.warmup_steps:
            parts.append(f"from 0 over {self.warmup_steps:,} steps")
        if self.final_weight is not None:
            parts.append(f"{self.final_weight:g} from step {self.final_step:,} on")
        return ", ".join(parts)

    def weights(self, step: int) -> dict[str, float]:
        """Return the weights in a step of the losses it consists of, by name."""
        return {self.name: self.weight_at(step)}

    def over(self, args: Any) -> Any:
        """Return the arguments of a model with the parts needed by this loss."""
        return args

    def distribute(
        self,
        part: nn.Module,
        sequence: ProcessGroup | None,
        balancing: str,
        tensor: ProcessGroup | None,
    ) -> None:
        """Connect the loss to the other ranks' parts of the same sequences.

        Args:
            sequence: ranks with other parts of the sequence (cp), if there are any.
            balancing: load balancing of the parts of the sequence.
            tensor: ranks with other parts of this one's part (tp), if there are any.
        """


class ZLoss(AuxiliaryLossConfig):
    """The square of the log-sum-exp of the logits (arXiv:2204.02311)."""

    name: Literal["z_loss"] = "z_loss"
    """Name of the loss."""
    weight: float = Field(1e-4, ge=0)
    """Weight in the training loss; 0: it is only reported."""


class ModelLossConfig(AuxiliaryLossConfig):
    """Loss with its own parameters, which the model has only if the weight is set."""

    argument: ClassVar[str]
    """Argument of the model that enables it."""

    @property
    def reported(self) -> bool:
        return self.is_on

    def over(self, args: Any) -> Any:
        has_it = self.argument in {field.name for field in dataclasses.fields(args)}
        if not (self.is_on and has_it):
            return args
        wanted = self.wanted(getattr(args, self.argument))
        return dataclasses.replace(args, **{self.argument: wanted})

    def is_in(self, args: Any) -> bool:
        """Whether a model with these arguments has its parameters."""
        has = getattr(args, self.argument, None)
        return has is not None and has == self.wanted(has)

    def wanted(self, has: Any) -> Any:
        """Return the required value of `argument`, if the model has another for other losses."""
        raise NotImplementedError


class MultiToken(ModelLossConfig):
    """The tokens after the next one, by blocks that share the trunk (arXiv:2412.19437)."""

    argument: ClassVar[str] = "multi_token"

    name: Literal["multi_token"] = "multi_token"
    """Name of the loss."""
    weight: float = Field(0.3, ge=0)
    """Weight in the training loss of the mean over the predicted tokens; 0: it is not computed."""
    depth: int = Field(1, ge=1, le=8)
    """Number of tokens after the next to predict."""

    def weights(self, step: int) -> dict[str, float]:
        each = self.weight_at(step) / self.depth
        return {f"{self.name}_{number}": each for number in range(1, self.depth + 1)}

    def wanted(self, has: int) -> int:
        return self.depth


class RouterLoss(ModelLossConfig):
    """A loss of the routers of a mixture of experts, whose blocks compute it."""

    def wanted(self, has: bool) -> bool:
        return True


class LoadBalance(RouterLoss):
    """The balance of experts over the global batch (arXiv:2101.03961, arXiv:2501.11873)."""

    argument: ClassVar[str] = "load_balance"

    name: Literal["load_balance"] = "load_balance"
    """Name of the loss."""
    weight: float = Field(0.01, ge=0)
    """Weight in the training loss; 0: it is not computed."""


class RouterZLoss(RouterLoss):
    """The square of the log-sum-exp of the routers' logits (arXiv:2202.08906)."""

    argument: ClassVar[str] = "router_z_loss"

    name: Literal["router_z_loss"] = "router_z_loss"
    """Name of the loss."""
    weight: float = Field(1e-3, ge=0)
    """Weight in the training loss; 0: it is not computed."""


AUXILIARY_LOSSES = Registry[type[AuxiliaryLossConfig]](
    "auxiliary_loss",
    {
        "z_loss": ZLoss,
        "multi_token": MultiToken,
        "load_balance": LoadBalance,
        "router_z_loss": RouterZLoss,
    },
)

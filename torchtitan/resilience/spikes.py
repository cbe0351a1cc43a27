"""Steps that would do harm: which are skipped, and what follows too many of them in a row.

A loss or gradient norm that is not finite, or far above what it was lately, is a spike. An update
made of it may throw a run off for good, so none is made: the step is skipped. *Lately* is the last
`window` steps that were not skipped, *far above* is more than `sigma` of their standard deviations
above their mean. The judgement needs nothing but numbers that every rank has, and those of the
window are saved with the run, so all ranks decide alike, and a resumed run like one that never
stopped.

A run that spikes again and again cannot be helped by skipping. After `training.max_skipped_steps`
in a row it returns to the weights of an earlier checkpoint, but not to their data, which continues
after the spike. So did PaLM, by hand: the same data caused no spike with other weights
(arXiv:2204.02311, section 5.1).
"""

import math
from typing import NamedTuple

from pydantic import Field

from torchtitan.checkpoint import TrainState
from torchtitan.config import Config
from torchtitan.logging import logger
from torchtitan.step import StepStatus

History = dict[str, list[float]]
"""Values of the last good steps by name, oldest first."""


class SpikesConfig(Config):
    """Conditions for skipping steps, and the reaction to many of them in a row."""

    sigma: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Skip a step whose loss or gradient norm is more than this many standard deviations above its
    mean over the window; 0: only if it is not finite."""
    window: int = Field(128, ge=2)
    """Number of previous good steps that determine mean and deviation; until there are that many,
    only non-finite steps are skipped."""
    max_rollbacks: int = Field(0, ge=0)
    """Maximum number of rollbacks in a run, after which it ends. After training.max_skipped_steps
    in a row, training returns to the checkpoint before them and continues with the data after
    them."""


class LossStats(NamedTuple):
    """Recent values of a quantity: their mean and deviation."""

    mean: float
    std: float


class Skip(NamedTuple):
    """The reason for skipping a step."""

    why: str
    """Reason for the log."""
    row: dict[str, str | float]
    """Values for metrics that led to it, and recent ones if the window is full."""


class Guard:
    """Decides which updates are applied: those of steps that are finite and no spike."""

    def __init__(self, config: SpikesConfig, state: TrainState, update_is: str = "skipped") -> None:
        """`update_is` names, for the log, the treatment of an update that is not accepted."""
        self.config, self.state, self.update_is = config, state, update_is

    def accepts(self, status: StepStatus) -> bool:
        """Whether the update of this step is applied; if not, the log says why."""
        loss, grad_norm = status.highest_loss, status.highest_norm
        skip = detect_spike(self.config, self.state.history, loss=loss, grad_norm=grad_norm)
        if skip is None:
            return True
        status.is_skipped, status.notes = True, skip.row
        logger.warning(
            "step %d: loss %g, gradient norm %g: %s; the update is %s",
            self.state.step + 1,
            status.losses["loss"].item(),
            status.grad_norm.item(),
            skip.why,
            self.update_is,
        )
        return False


def detect_spike(config: SpikesConfig, history: History, **values: float) -> Skip | None:
    """Whether to skip a step with these values; if not, they enter the history."""
    reasons: dict[str, str] = {}
    row: dict[str, str | float] = {}
    for name, value in values.items():
        past = history.setdefault(name, [])[-config.window :]
        usual = usual_of(past) if len(past) == config.window else None
        if why := spike(value, usual, config.sigma):
            reasons[name] = f"the {name.replace('grad_norm', 'gradient norm')} {why}"
        if usual:
            row |= {f"{name}_mean": usual.mean, f"{name}_std": usual.std}
    if reasons:
        row["skipped_because"] = " and ".join(reasons)
        return Skip(" and ".join(reasons.values()), row)
    for name, value in values.items():
        history[name] = [*history[name], value][-config.window :]
    return None


def spike(value: float, usual: LossStats | None, sigma: float) -> str | None:
    """The reason why a value is a spike, if it is one."""
    if not math.isfinite(value):
        return "is not finite"
    if usual and sigma and value > usual.mean + sigma * usual.std:
        return (
            f"is more than {sigma:g} standard deviations ({usual.std:.4g}) above its recent mean "
            f"({usual.mean:.4g})"
        )
    return None


def usual_of(past: list[float]) -> LossStats:
    """Mean and standard deviation, added up without rounding."""
    mean = math.fsum(past) / len(past)
    return LossStats(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in past) / len(past)))

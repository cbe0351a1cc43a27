"""The counters of a run."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Where a run stands; the only counters there are."""

    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Targets trained on, over all ranks."""
    skipped: int = 0
    """Steps whose update was skipped because the loss or the gradient norm was not finite."""
    skipped_in_a_row: int = 0
    """Such steps since the last good one."""
    schedule_start: int = 0
    """The step after which the learning rate schedule began."""

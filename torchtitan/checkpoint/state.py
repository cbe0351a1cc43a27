"""The counters of a run."""

from dataclasses import dataclass, field

from torchtitan.step import StepStatus

OLD_COUNTERS = {"skipped_in_a_row": "consecutive_skips", "stepped_over": "skipped_samples"}
"""Names of counters in checkpoints of version 0.1, mapped to the current names."""


@dataclass
class TrainState:
    """Progress of a run: all of its counters."""

    step: int = 0
    """Number of steps taken, including skipped ones."""
    tokens: int = 0
    """Number of targets trained on, over all ranks."""
    skipped: int = 0
    """Number of steps whose update was skipped because of a spike in loss or gradient norm."""
    consecutive_skips: int = 0
    """Number of skipped steps since the last good one."""
    rollbacks: int = 0
    """Number of rollbacks to an earlier checkpoint because of too many skipped steps in a row."""
    skipped_samples: int = 0
    """Number of samples that were read but, because of this, are not in the weights."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Loss and gradient norm of the last good steps, used to detect spikes."""
    schedule_start: int = 0
    """Step after which the learning rate schedule started."""

    def advance(self, status: StepStatus) -> None:
        """Count a step, unless it is void."""
        if status.is_void:
            return
        self.step += 1
        self.tokens += status.count
        self.skipped += status.is_skipped
        self.consecutive_skips = self.consecutive_skips + 1 if status.is_skipped else 0

"""The counters of a run."""

from dataclasses import dataclass, field

from torchtitan.step import StepStatus

OLD_COUNTERS = {"skipped_in_a_row": "consecutive_skips", "stepped_over": "skipped_samples"}
"""Names that counters had in checkpoints of version 0.1, to what they are called now."""


@dataclass
class TrainState:
    """Where a run stands; the only counters there are."""

    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Targets trained on, over all ranks."""
    skipped: int = 0
    """Steps whose update was skipped because of a spike in the loss or the gradient norm."""
    consecutive_skips: int = 0
    """Such steps since the last good one."""
    rollbacks: int = 0
    """How often the run went back to an earlier checkpoint because of too many of them in a row."""
    skipped_samples: int = 0
    """Samples that were read and are, because of this, not in the weights."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Loss and gradient norm of the last good steps, by which spikes are detected."""
    schedule_start: int = 0
    """The step after which the learning rate schedule began."""

    def advance(self, status: StepStatus) -> None:
        """Count a step, unless it is void."""
        if status.is_void:
            return
        self.step += 1
        self.tokens += status.count
        self.skipped += status.is_skipped
        self.consecutive_skips = self.consecutive_skips + 1 if status.is_skipped else 0

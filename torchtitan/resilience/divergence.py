"""The reaction to too many skipped steps in a row: the run rolls back, or saves and ends."""

from torchtitan.checkpoint import Checkpointer, TrainState
from torchtitan.logging import logger
from torchtitan.metrics import Meter
from torchtitan.resilience.spikes import SpikesConfig
from torchtitan.timeline import Timeline


class TrainingDiverged(RuntimeError):
    """Too many steps in a row were skipped, and rolling back is no way out."""


class Divergence:
    """Watches for rows of skipped steps, after each step."""

    def __init__(
        self,
        config: SpikesConfig,
        max_skipped_steps: int,
        state: TrainState,
        checkpoint: Checkpointer,
        meter: Meter,
        timeline: Timeline,
        updates_in_backward: bool,
    ) -> None:
        """`updates_in_backward`: a step that should have been skipped has changed the weights."""
        self.config, self.max_skipped_steps, self.state = config, max_skipped_steps, state
        self.checkpoint, self.meter, self.timeline = checkpoint, meter, timeline
        self.updates_in_backward = updates_in_backward
        self.is_diverged = False
        """Whether the run cannot continue."""

    def after_step(self, state: TrainState) -> bool:
        """Roll back or give up, if it is time; True: nothing else is to follow this step."""
        if state.consecutive_skips and self.updates_in_backward:
            self.is_diverged = True
            return True
        if state.consecutive_skips < self.max_skipped_steps:
            return False
        if self.roll_back():
            return True
        self.is_diverged = True
        return False

    def raise_if_diverged(self) -> None:
        """Say why the run cannot continue, and what may help; when all saves have ended.

        Raises:
            TrainingDiverged: if it cannot.
        """
        if self.is_diverged:
            corrupted = self.updates_in_backward
            raise TrainingDiverged(self._corrupted() if corrupted else self._diverged())

    def roll_back(self) -> bool:
        """Return to the checkpoint before a row of skipped steps, but not to the data after it.

        False where there is none, or the recipe does not allow it (again).
        """
        state = self.state
        if state.rollbacks >= self.config.max_rollbacks:
            return False
        last, row, before = state.step, state.consecutive_skips, state.skipped_samples
        with self.timeline.pause("rollback"):
            if not self.checkpoint.roll_back(last - row + 1):
                return False
        self.meter.rewind_to(state.step, state.tokens)
        samples = state.skipped_samples - before
        logger.warning(
            "step %d: %d steps in a row were skipped: rolled back to step %d; the data continues, "
            "so %d samples are skipped (rollback %d of at most %d)",
            last,
            row,
            state.step,
            samples,
            state.rollbacks,
            self.config.max_rollbacks,
        )
        details = {"from_step": last, "skipped_samples": samples, "rollbacks": state.rollbacks}
        self.meter.event(state.step, "rollback", **details)
        return True

    def _corrupted(self) -> str:
        saved = self.checkpoint.saved_step
        return (
            f"step {self.state.step}: the loss or gradient norm is not finite, which with "
            "optimizer.early_step_in_backward is known only after the update. These weights were "
            f"not saved; the last checkpoint is {f'step-{saved}' if saved else 'none'}. Resume "
            "from it with optimizer.early_step_in_backward = false, or with a lower optimizer.lr"
        )

    def _diverged(self) -> str:
        state, allowed = self.state, self.config.max_rollbacks
        way_out = ""
        if allowed and state.rollbacks >= allowed:
            way_out = f", after {state.rollbacks} rollbacks (spikes.max_rollbacks)"
        elif allowed:
            way_out = ", with no checkpoint before them to roll back to"
        return (
            f"step {state.step}: {state.consecutive_skips} steps in a row "
            f"(training.max_skipped_steps) were skipped{way_out}; none of them changed a weight. "
            "Lower optimizer.lr, increase lr_scheduler.warmup_steps, or check the data of these "
            "steps"
        )

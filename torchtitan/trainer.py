"""The training loop and its step. `torchtitan.build` attaches features to the step's objects."""

from torchtitan.build import Run
from torchtitan.checkpoint import ResumePoint
from torchtitan.logging import logger


class Trainer:
    """Advances a run, one optimizer step at a time."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def train(self, start: ResumePoint) -> None:
        """Train from `start` to the recipe's last step, or to the step where all ranks stop.

        Raises:
            TrainingDiverged: after too many skipped steps in a row (`resilience.divergence`).
            SaveFailed: if the last state could not be saved.
        """
        run, state = self.run, self.run.state
        run.checkpoint.load(start)
        if run.is_finished():
            logger.info(
                "nothing to do: all %d steps are done; to continue, increase training.steps; "
                "to start over, choose another job.dump_folder",
                state.step,
            )
            return
        with run.session():
            while not run.is_finished():
                self.step()
                run.after_step()

    def step(self) -> None:
        """Run one optimizer step."""
        run, state = self.run, self.run.state
        batches, count = next(run.batches)
        lr = run.optimizers.begin(run.schedule(state.step + 1))
        losses = run.model.forward_backward(batches, count)
        grad_norm = run.optimizers.norm()
        status = run.agree(losses, grad_norm, count)
        if run.guard.accepts(status):
            run.optimizers.step(grad_norm, status.highest_norm)
        state.advance(status)
        run.meter.end_step(status, lr)

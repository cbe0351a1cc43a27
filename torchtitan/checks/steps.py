"""Checks that steps can be skipped, and a run rolled back."""

from collections.abc import Iterator

from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig

ROLLBACKS = "spikes.max_rollbacks"


def rollbacks(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that there can be a checkpoint from before the first skipped step to return to."""
    if not job.spikes.max_rollbacks:
        return
    c, row = job.checkpoint, job.training.max_skipped_steps
    needed = 1 + -(-row // c.interval)
    if not c.enable or c.load_only:
        message = "rolling back needs checkpoints: checkpoint.enable = true, load_only = false"
        yield Problem(ROLLBACKS, message, ("checkpoint",))
    elif 0 < c.keep_latest_k < needed:
        message = (
            f"the checkpoint before {row} skipped steps in a row (training.max_skipped_steps) "
            f"would be deleted before the rollback; use checkpoint.keep_latest_k >= {needed}, "
            "or 0"
        )
        yield Problem(ROLLBACKS, message, ("checkpoint", "training"))
    if job.fault_tolerance.enable:
        message = "replica groups have separate checkpoints, and cannot roll back; use 0"
        yield Problem(ROLLBACKS, message, ("fault_tolerance.enable",))


def spikes(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the window of spike detection fills within the run."""
    window, steps = job.spikes.window, job.training.steps
    if job.spikes.sigma and window >= steps:
        message = (
            f"it is full only after {window} good steps, and there are {steps}; only "
            "non-finite steps are skipped"
        )
        yield Problem("spikes.window", message, ("training.steps",), "note")

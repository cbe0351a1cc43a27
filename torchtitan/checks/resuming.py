"""Checks that a run can be saved, and restarted."""

from collections.abc import Iterator

from torchtitan.config import PlannedWorld, Problem, show
from torchtitan.job import JobConfig
from torchtitan.models import MODELS


def formats(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the model supports the export formats."""
    spec = MODELS[job.model.name]
    if job.checkpoint.last_save_in_hf and "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not define this format of its weights; use false"
        yield Problem("checkpoint.last_save_in_hf", message, ("model.name",))


def skipped(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the number of samples to skip is known."""
    if job.data.skip_samples == -1 and job.checkpoint.initial_load_path is None:
        message = (
            "it takes the number from checkpoint.initial_load_path, which is absent; wanted a "
            "number of samples"
        )
        yield Problem("data.skip_samples", message, ("checkpoint.initial_load_path",))


def restarts(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Find settings that keep a restarted run from resuming."""
    c = job.checkpoint
    wrong = {
        # The other groups still have the state of a lost replica group.
        "enable": (not c.enable and not job.fault_tolerance.enable, True),
        "load_only": (c.load_only, False),
        "load_step": (c.load_step >= 0, -1),
        "resume": (c.resume == "never", "auto"),
    }
    for key, (is_wrong, right) in wrong.items():
        if world.may_restart and is_wrong:
            message = f"a restart continues from the newest checkpoint; use {show(right)}"
            yield Problem(f"checkpoint.{key}", message)

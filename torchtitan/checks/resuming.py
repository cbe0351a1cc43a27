"""Whether a run can be saved, and started again, as the recipe says."""

from collections.abc import Iterator

from torchtitan.config import PlannedWorld, Problem, show
from torchtitan.job import JobConfig
from torchtitan.models import MODELS


def formats(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """The model says how its weights are written for others."""
    spec = MODELS[job.model.name]
    if job.checkpoint.last_save_in_hf and "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not say how its weights are written so"
        yield Problem("checkpoint.last_save_in_hf", message, ("model.name",))


def skipped(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """How much data there is to step over."""
    if job.data.skip_samples == -1 and job.checkpoint.initial_load_path is None:
        message = (
            "it asks checkpoint.initial_load_path, which is absent; wanted a number of samples"
        )
        yield Problem("data.skip_samples", message, ("checkpoint.initial_load_path",))


def restarts(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """What keeps a run that is started again from continuing where it was."""
    c = job.checkpoint
    wrong = {
        # What a replica group has lost the other groups still have.
        "enable": (not c.enable and not job.fault_tolerance.enable, True),
        "load_only": (c.load_only, False),
        "load_step": (c.load_step >= 0, -1),
        "resume": (c.resume == "never", "auto"),
    }
    for key, (is_wrong, right) in wrong.items():
        if world.may_restart and is_wrong:
            message = f"a restart continues from the newest checkpoint; write {show(right)}"
            yield Problem(f"checkpoint.{key}", message)

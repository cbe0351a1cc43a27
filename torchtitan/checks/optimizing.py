"""Checks that the optimizer's updates and states work with the rest of the recipe."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torchtitan.checks.divisibility import DEGREES
from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem, show
from torchtitan.job import JobConfig
from torchtitan.optim import group_problems, name_parameters

EARLY = "optimizer.early_step_in_backward"
NOT_IN_BACKWARD: Mapping[str, tuple[Any, str]] = {
    "training.max_norm": (
        0,
        "a gradient is freed before the global norm is known, so it cannot be clipped",
    ),
    "training.enable_cpu_offload": (False, "the host would wait for each gradient separately"),
    "parallelism.pipeline_parallel_degree": (
        1,
        "the backward of a microbatch would change weights that the next one uses",
    ),
    "fault_tolerance.enable": (False, "gradients are freed before replica groups can sum them"),
    "spikes.sigma": (0, "an update is made before its spike is detected, so it cannot be skipped"),
    "spikes.max_rollbacks": (0, "no step is skipped, so there is nothing to roll back"),
    "metrics.statistics_freq": (0, "a gradient is freed before it can be measured"),
}
"""Keys ruled out by updates in the backward: the one allowed value, and why."""


def updates_in_backward(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that nothing needs a gradient after its update in the backward."""
    if not job.optimizer.early_step_in_backward:
        return
    if why := job.optimizer.needs_all_gradients:
        yield Problem(EARLY, f"{why}; use false", ("optimizer.name",))
    values = job.flat()
    for key, (allowed, why) in NOT_IN_BACKWARD.items():
        if values[key] != allowed:
            yield Problem(key, f"with {EARLY}, {why}; use {str(allowed).lower()}", (EARLY,))
    accumulation = job.accumulation(job.degrees(world.ranks))
    if accumulation > 1:
        message = (
            f"with {EARLY}, a step has one microbatch, and this makes {accumulation}; use "
            f"{job.training.global_batch_size // accumulation}, or a larger "
            "training.local_batch_size"
        )
        rests_on = (EARLY, "training.local_batch_size", *DEGREES)
        yield Problem("training.global_batch_size", message, rests_on)


def copies_after_backward(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that gradients still exist when replicas agree on them."""
    replicas = job.communication.replicas
    copies = job.degrees(world.ranks).dp_replicate
    after_backward = copies > 1 and not (replicas.in_backward or replicas.runs_apart)
    if job.optimizer.early_step_in_backward and after_backward:
        message = (
            "replicas agree on gradients after the backward (communication.replicas.name = "
            f'{show(replicas.name)}), when these have been freed; use false, or "all_reduce" '
            "with overlap = true there"
        )
        yield Problem(EARLY, message, ("communication.replicas", *DEGREES))


def states_in_host_memory(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the host can compute the updates of the states it keeps, which are not rounded."""
    o, t = job.optimizer, job.training
    if not t.enable_cpu_offload:
        return
    for key in o.rounded_by:
        message = 'states in host memory take none of the device\'s; use "parameter"'
        yield Problem(f"optimizer.{key}", message, ("training.enable_cpu_offload", "optimizer"))
    if o.multiplies_matrices:
        message = f"{o.name} multiplies matrices, for which the host is too slow; use false"
        yield Problem("training.enable_cpu_offload", message, ("optimizer.name",))


def clipped_twice(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Note gradients that are clipped both by unit and as a whole."""
    if job.training.max_norm and getattr(job.optimizer, "adaptive_clip", 0):
        message = (
            "gradients are clipped to it before optimizer.adaptive_clip, which is meant to "
            "replace it; use 0 to disable it"
        )
        yield Problem("training.max_norm", message, ("optimizer.adaptive_clip",), "note")


def groups(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the optimizer can update all parameters, and that each group has some."""
    o = job.optimizer
    model = model_of(job) if o.groups or o.by_role else None
    if model is None:
        return
    heads = partial(model.spec.heads, model.args)
    parameters = name_parameters([model.empty()], model.spec.role, heads)
    for problem in (*o.parameter_problems(parameters), *group_problems(o, parameters)):
        yield problem.within("optimizer")._replace(also=("optimizer", "model"))


def schedule(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that warm-up and decay fit into the number of steps."""
    s, steps, also = job.lr_scheduler, job.schedule_steps(), ("training.steps", "lr_scheduler")
    warmup, decay = s.shares(steps)
    if s.warmup_steps > warmup == steps:
        all_steps = f"{steps} steps, all of which are" if steps > 1 else "1 step, which is"
        message = f"the schedule has only {all_steps} warm-up"
        yield Problem("lr_scheduler.warmup_steps", message, also, "note")
    elif s.decay_ratio is not None and round(steps * s.decay_ratio) > decay:
        message = f"after {warmup} steps of warm-up, {decay} of {steps} are left for the decay"
        yield Problem("lr_scheduler.decay_ratio", message, also, "note")
    if steps < job.training.steps and decay and not s.min_lr_factor:
        message = (
            f"after {steps} steps the learning rate is 0, but there are {job.training.steps} steps"
        )
        yield Problem("lr_scheduler.total_steps", message, also, "note")

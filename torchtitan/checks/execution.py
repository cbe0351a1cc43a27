"""Checks of a step: parameters gathered and sent, blocks recomputed, compiled; updates, states."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torchtitan.checks.divisibility import DEGREES
from torchtitan.checks.model import model_of
from torchtitan.comm import PlainGradients, PlainWeights
from torchtitan.config import PlannedWorld, Problem, show
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.optim import OPTIMIZERS, OptimizerConfig, group_problems, name_parameters
from torchtitan.parallel import SHARDING
from torchtitan.tasks import TASKS
from torchtitan.torch_private.compiler import compiles_recomputed_attention

SECTIONS = ("compile", "training", "parallelism", "sharding.name")


def in_hooks(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that no full graph is required where hooks gather parameters."""
    c, degrees = job.compile, job.degrees(world.ranks)
    has_work = degrees.data * degrees.cp > 1 or job.training.enable_cpu_offload
    in_one = c.compiles("model") and c.granularity == "model"
    if in_one and has_work and not job.sharding.in_graph:
        names = [f'"{name}"' for name, config in SHARDING.items() if config.in_graph]
        other = f"sharding.name = {' or '.join(names)}, or " if names else ""
        message = (
            f'sharding.name = "{job.sharding.name}" gathers in hooks around the blocks, which '
            f'cannot be part of a graph; use {other}"block"'
        )
        yield Problem("compile.granularity", message, SECTIONS)


def communication(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the sharding supports `[communication]`, and that it has an effect."""
    for what, plain in {"weights": PlainWeights(), "gradients": PlainGradients()}.items():
        way = getattr(job.communication, what)
        if way == plain:
            continue
        changed, usual = ("name", "plain") if way.name != "plain" else ("dtype", "float32")
        key = f"communication.{what}.{changed}"
        if what not in job.sharding.follows:
            name = f'sharding.name = "{job.sharding.name}"'
            message = f'{name} has its own communication of {what}; use "{usual}", or "fsdp2" there'
            yield Problem(key, message, ("sharding.name",))
        elif job.degrees(world.ranks).fsdp == 1:
            # On more ranks the same recipe may have some to send.
            message = f"no two ranks share {what}, so this has no effect"
            yield Problem(key, message, ("parallelism",), "note")
        elif changed == "dtype" and job.training.mixed_precision_reduce != "float32":
            message = "sums have training.mixed_precision_reduce; use float32 there or here"
            yield Problem(key, message, ("training.mixed_precision_reduce",))
    yield from _replicas(job, world)
    ways = job.communication
    packing = [each.packs_weights for each in job.convert if each.packs_weights]
    if ways.weights.reads_numbers and packing:
        message = f'{packing[0]} gathers weights in another format; use "plain", or false there'
        yield Problem("communication.weights.name", message, ("convert",))


def _replicas(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that there are replicas, and that the run supports them."""
    way, copies = job.communication.replicas, job.degrees(world.ranks).dp_replicate
    if copies == 1 and (way.name != "all_reduce" or way.runs_apart):
        key = "every" if way.name == "all_reduce" else "name"
        message = "there is one replica; use parallelism.data_parallel_replicate_degree above 1"
        yield Problem(f"communication.replicas.{key}", message, ("parallelism",))
    gradients = job.communication.gradients
    if copies > 1 and gradients.remembers and way.name == "all_reduce":
        message = (
            f'between replicas gradients are sent in full; name = "{gradients.name}" sends them in '
            "few bits there too"
        )
        rests_on = ("communication.gradients", "parallelism")
        yield Problem("communication.replicas.name", message, rests_on, "note")
    if way.runs_apart and job.fault_tolerance.enable:
        message = (
            "a group that joins receives the weights of one replica, but those of replicas "
            'differ; use "all_reduce" with every = 1, or false there'
        )
        yield Problem("communication.replicas.name", message, ("fault_tolerance.enable",))


def regathering(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that freed parameters can stay sharded over a subset of neighboring ranks."""
    size, p, degrees = job.sharding.neighbors, job.parallelism, job.degrees(world.ranks)
    if not size:
        return
    key = "sharding.regather_size"
    is_known = degrees.fsdp > 0  # else it depends on the number of ranks
    if is_known and (not 1 < size < degrees.fsdp or degrees.fsdp % size):
        fits = [n for n in range(2, degrees.fsdp) if degrees.fsdp % n == 0]
        wanted = f"use {' or '.join(map(str, fits))}, or 0" if fits else "use 0"
        message = (
            f"it must divide the {degrees.fsdp} ranks that share parameters, and be smaller; "
            f"{wanted}"
        )
        yield Problem(key, message, ("parallelism",))
    if p.fsdp_reshard_after_forward == "never":
        message = 'nothing is freed with parallelism.fsdp_reshard_after_forward = "never"; use 0'
        yield Problem(key, message, ("parallelism.fsdp_reshard_after_forward",))
    for axis in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(p, axis) > 1:
            message = f"torch forms groups of all ranks, which parallelism.{axis} divides; use 0"
            yield Problem(key, message, (f"parallelism.{axis}",))
    if job.communication.weights.name != "plain":
        message = f'communication.weights.name = "{job.communication.weights.name}" sends parts of '
        message += 'weights over all ranks; use 0, or "plain" there'
        yield Problem(key, message, ("communication.weights.name",))
    if packing := [each.packs_weights for each in job.convert if each.packs_weights]:
        yield Problem(key, f"{packing[0]} gathers weights in another format; use 0", ("convert",))


def accumulating(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that there is communication to defer to a step's last microbatch."""
    key, degrees = "sharding.accumulate_whole", job.degrees(world.ranks)
    if not job.sharding.accumulates_whole:
        return
    if degrees.pp > 1:
        message = "a pipeline reduces gradients once for its microbatches already; use false"
        yield Problem(key, message, ("parallelism.pipeline_parallel_degree",))
    elif min(degrees) > 0 and job.accumulation(degrees) == 1:
        message = (
            "a step has one microbatch, so there is nothing to accumulate, and this has no effect"
        )
        yield Problem(key, message, ("training",), "note")


def async_tensor_parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the compiler can overlap communication with matrix products."""
    key, c = "parallelism.enable_async_tensor_parallel", job.compile
    if not job.parallelism.enable_async_tensor_parallel:
        return
    if not c.compiles("model"):
        message = (
            'it is done by the compiler, so it needs compile.enable = true with "model" in '
            "compile.components"
        )
        yield Problem(key, message, ("compile",))
    elif c.backend != "inductor":
        message = f'it needs compile.backend = "inductor", not "{c.backend}"'
        yield Problem(key, message, ("compile",))


def recomputation(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the compiler supports the requested recomputation."""
    key, c, p = "activation_checkpoint.mode", job.compile, job.parallelism
    config, also = job.activation_checkpoint, ("activation_checkpoint", "compile")
    if config.mode == "memory_budget" and not c.compiles("model"):
        message = (
            "the compiler chooses what to keep, so it needs compile.enable = true with "
            '"model" in compile.components'
        )
        yield Problem(key, message, also)
    elif config.mode == "memory_budget" and c.backend == "eager":
        message = 'compile.backend = "eager" does not change the backward; use "inductor"'
        yield Problem(key, message, also)
    # Context parallelism has its own attention operator, which is not affected.
    on_a_mesh = p.tensor_parallel_degree * p.expert_parallel_degree > 1 or job.sharding.in_graph
    on_a_mesh = on_a_mesh and p.context_parallel_degree == 1
    recomputes_attention = config.every > 0 and not config.by_operator
    device_type = world.device_type if world.is_here else "cuda"
    if (
        recomputes_attention
        and on_a_mesh
        and c.compiles("model")
        and not compiles_recomputed_attention(device_type)
    ):
        message = (
            "on a CPU this version of torch cannot compile a block that is split over tensor- or "
            "expert-parallel ranks, or gathered in the graph, and recomputes its attention; "
            'use mode = "selective" with selective_ac_option = "op", or leave "model" out of '
            "compile.components"
        )
        yield Problem(key, message, also)


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
    base = getattr(job.model, "base_width", None)
    model = model_of(job) if o.groups or o.by_role or base else None
    if model is None:
        return
    heads, growth = partial(model.spec.heads, model.args), partial(model.spec.growth, model.args)
    parameters = name_parameters([model.empty()], model.spec.role, heads, growth)

    def has_rule(config: OptimizerConfig) -> bool:
        return all(config.rule_for(p).width_factor(p) is not None for p in parameters)

    if base and not has_rule(o):
        able = ", ".join(n for n, kind in OPTIMIZERS.items() if has_rule(kind.model_validate({})))
        message = f"no rule of rates by width is published for {o.name}; those with one: {able}"
        yield Problem("model.base_width", message, ("optimizer.name",))
    for problem in (*o.parameter_problems(parameters), *group_problems(o, parameters)):
        yield problem.within("optimizer")._replace(also=("optimizer", "model"))


def schedule(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that warm-up and decay fit into the number of steps."""
    if job.lr_scheduler.unit == "tokens":
        degrees = job.degrees(world.ranks or job.parallelism.least_ranks)
        if min(degrees) < 1:
            return
        job = job.with_batch(degrees, None)
    s, steps, also = job.lr_scheduler, job.schedule_steps(), ("training.steps", "lr_scheduler")
    unit, counted = TASKS[MODELS[job.model.name].task].unit, job.length()
    if s.unit == "tokens" != unit:
        message = f'{job.model.name} counts {unit}; use "steps"'
        yield Problem("lr_scheduler.unit", message, ("model.name",))
    warmup, decay = s.shares(steps)
    if s.warmup_steps > warmup == steps:
        all_steps = f"{steps} {s.unit}, all of which are" if steps > 1 else "1 step, which is"
        message = f"the schedule has only {all_steps} warm-up"
        yield Problem("lr_scheduler.warmup_steps", message, also, "note")
    elif s.decay_from is not None:
        if s.decay_ratio and s.decay_ratio != type(s).model_fields["decay_ratio"].default:
            message = f"decay_ratio = {s.decay_ratio:g} starts the decay elsewhere: set one of them"
            yield Problem("lr_scheduler.decay_from", message, also)
        if s.decay_from < warmup:
            message = f"the warm-up ends later; use {warmup} or more"
            yield Problem("lr_scheduler.decay_from", message, also)
        if s.decay_from >= steps:
            message = f"nothing decays: the schedule has {steps} {s.unit}; set training.steps too"
            yield Problem("lr_scheduler.decay_from", message, also, "note")
    elif s.decay_ratio is not None and round(steps * s.decay_ratio) > decay:
        message = f"after {warmup} {s.unit} of warm-up, {decay} of {steps} are left for the decay"
        yield Problem("lr_scheduler.decay_ratio", message, also, "note")
    if steps < counted and decay and not s.min_lr_factor:
        message = f"after {steps} {s.unit} the learning rate is 0, but there are {counted} {s.unit}"
        yield Problem("lr_scheduler.total_steps", message, also, "note")

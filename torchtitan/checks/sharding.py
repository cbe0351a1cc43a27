"""Whether parameters can be sharded as the recipe says, with what it computes by."""

from collections.abc import Iterator

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig

SECTIONS = ("compile", "training", "parallelism", "sharding.name")


def in_hooks(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """What gathers outside of the computation leaves no graph whole."""
    c, degrees = job.compile, job.degrees(world.ranks)
    has_work = degrees.data * degrees.cp > 1 or job.training.enable_cpu_offload
    in_one = c.compiles("model") and c.granularity == "model"
    if in_one and has_work and not job.sharding.in_graph:
        message = (
            f'sharding.name = "{job.sharding.name}" gathers in hooks around the blocks, '
            'which no graph can hold; use sharding.name = "simple_fsdp", or "block"'
        )
        yield Problem("compile.granularity", message, SECTIONS)


def communication(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """A way to shard sends as `[communication]` says, and there is something to send."""
    for what in ("weights", "gradients"):
        key = f"communication.{what}.name"
        if getattr(job.communication, what).name == "plain":
            continue
        if what not in job.sharding.follows:
            name = f'sharding.name = "{job.sharding.name}"'
            message = f'{name} sends {what} in its own way; use "plain", or "fsdp2" there'
            yield Problem(key, message, ("sharding.name",))
        elif job.degrees(world.ranks).fsdp == 1:
            # On more ranks the same recipe may have some to send.
            message = f"no two ranks share {what}, so none are sent, and this does nothing"
            yield Problem(key, message, ("parallelism",), "note")
    yield from _replicas(job, world)
    ways = job.communication
    packing = [each.packs_weights for each in job.convert if each.packs_weights]
    if ways.weights.reads_numbers and packing:
        message = f'{packing[0]} gathers weights in another form; use "plain", or false there'
        yield Problem("communication.weights.name", message, ("convert",))
    if ways.gradients.remembers and job.metrics.precision_freq:
        message = (
            "errors of gradients that metrics.precision_freq drops would be sent later; use 0 there"
        )
        yield Problem("communication.gradients.name", message, ("metrics.precision_freq",))


def _replicas(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """There are replicas, and what they agree on can be clipped."""
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
            "a group that joins is given the weights of one replica, and they would differ; use "
            "every = 1, or false there"
        )
        yield Problem("communication.replicas.name", message, ("fault_tolerance.enable",))
    if way.gives_signs and job.training.max_norm:
        message = (
            "the norm of signs is that of their number, and clipping it would change the learning "
            "rate; use training.max_norm = 0, or false here"
        )
        yield Problem("communication.replicas.sign", message, ("training.max_norm",))


def regathering(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """What is freed can stay split over neighbors alone."""
    size, p, degrees = job.sharding.neighbors, job.parallelism, job.degrees(world.ranks)
    if not size:
        return
    key = "sharding.regather_size"
    is_known = degrees.fsdp > 0  # else it follows from the number of ranks
    if is_known and (not 1 < size < degrees.fsdp or degrees.fsdp % size):
        fits = [n for n in range(2, degrees.fsdp) if degrees.fsdp % n == 0]
        wanted = f"use {' or '.join(map(str, fits))}, or 0" if fits else "use 0"
        message = f"{degrees.fsdp} ranks share parameters, of which it has to be a part; {wanted}"
        yield Problem(key, message, ("parallelism",))
    if p.fsdp_reshard_after_forward == "never":
        message = 'nothing is freed with parallelism.fsdp_reshard_after_forward = "never"; use 0'
        yield Problem(key, message, ("parallelism.fsdp_reshard_after_forward",))
    for axis in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(p, axis) > 1:
            message = (
                f"torch makes its groups of all ranks, which parallelism.{axis} divides; use 0"
            )
            yield Problem(key, message, (f"parallelism.{axis}",))
    if job.communication.weights.name != "plain":
        message = f'communication.weights.name = "{job.communication.weights.name}" sends parts of '
        message += 'what all ranks share; use 0, or "plain" there'
        yield Problem(key, message, ("communication.weights.name",))
    if packing := [each.packs_weights for each in job.convert if each.packs_weights]:
        yield Problem(key, f"{packing[0]} gathers weights in another form; use 0", ("convert",))


def accumulating(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """There is something to put off to a step's last microbatch."""
    key, degrees = "sharding.accumulate_whole", job.degrees(world.ranks)
    if not job.sharding.accumulates_whole:
        return
    if degrees.pp > 1:
        message = "a pipeline reduces gradients once for its microbatches already; use false"
        yield Problem(key, message, ("parallelism.pipeline_parallel_degree",))
    elif min(degrees) > 0 and job.accumulation(degrees) == 1:
        message = (
            "a step has one microbatch, so there is nothing to accumulate, and this does nothing"
        )
        yield Problem(key, message, ("training",), "note")


def never_whole(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Nothing else wants matrices that no rank has."""
    if not job.sharding.never_whole:
        return
    p, name = job.parallelism, f'sharding.name = "{job.sharding.name}"'
    others = {
        "parallelism.tensor_parallel_degree": (
            p.tensor_parallel_degree > 1,
            "has ranks share matrices whose parts travel already",
        ),
        "parallelism.pipeline_parallel_degree": (
            p.pipeline_parallel_degree > 1,
            "has stages that each compute when the others do not, and a ring waits for all",
        ),
        "compile.enable": (
            job.compile.compiles("model"),
            "would compile blocks whose parts arrive from outside of a graph",
        ),
        "convert": (bool(job.convert), "needs whole matrices"),
        "training.enable_cpu_offload": (
            job.training.enable_cpu_offload,
            "has parameters elsewhere than where they are computed with",
        ),
    }
    for key, (is_on, why) in others.items():
        if is_on:
            message = f'{key} {why}; use "fsdp2", or leave that out'
            yield Problem("sharding.name", message, (key,))
    model = model_of(job)
    if model and model.spec.tied(model.args) and not job.loss.vocabulary_chunk:
        message = (
            f"with {name} no rank has the whole table of a tied model, so its loss is made of "
            "parts of it; use a number above 0, as 8192"
        )
        yield Problem("loss.vocabulary_chunk", message, ("sharding.name", "model"))


def in_graph(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """What gathers within the computation is the compiler's to free, to merge and to move."""
    c, p, name = job.compile, job.parallelism, f'sharding.name = "{job.sharding.name}"'
    if not job.sharding.in_graph:
        return
    model, degrees = model_of(job), job.degrees(world.ranks)
    if p.tensor_parallel_degree > 1 and degrees.fsdp > 1 and model is not None:
        first = {len(weight): each for each, weight in model.empty().named_parameters()}
        if min(first) < degrees.fsdp:
            message = (
                f"{name} cannot share {first[min(first)]} of {model.title}, which has {min(first)} "
                f'in its first dim, among {degrees.fsdp} ranks; use "fsdp2" there'
            )
            yield Problem("parallelism.tensor_parallel_degree", message, SECTIONS)
    if job.training.enable_cpu_offload:
        message = f'{name} gathers where parameters are; use "fsdp2" there'
        yield Problem("training.enable_cpu_offload", message, SECTIONS)
    if p.enable_async_tensor_parallel:
        message = f'{name} changes the same graphs; use "fsdp2" there'
        yield Problem("parallelism.enable_async_tensor_parallel", message, SECTIONS)
    if not c.compiles("model"):
        yield from _without_compiler(job)
        return
    if c.granularity != "model":
        message = (
            f"with {name} blocks that share a graph could not be freed or merged each by itself, "
            'nor what is in none; use "model"'
        )
        yield Problem("compile.granularity", message, SECTIONS)
    if c.backend != "inductor":
        message = f"with {name} it is inductor that frees and merges; use it"
        yield Problem("compile.backend", message, SECTIONS)


def _without_compiler(job: JobConfig) -> Iterator[Problem]:
    reshard, name = job.parallelism.fsdp_reshard_after_forward, job.sharding.name
    needs = (
        'so it needs compile.enable = true with "model" in compile.components and '
        'compile.granularity = "model"'
    )
    if reshard == "always":
        message = f'with sharding.name = "{name}" the compiler frees them, {needs}'
        yield Problem("parallelism.fsdp_reshard_after_forward", message, SECTIONS)
    for key, why in job.sharding.needs_graph().items():
        yield Problem(f"sharding.{key}", f"{why}, {needs}", SECTIONS)
    if reshard == "default":
        message = (
            "without compile.enable it keeps what it gathers in the forward until the backward: "
            "the whole model, but for blocks that are recomputed; and gathers each parameter by "
            "itself"
        )
        yield Problem("sharding.name", message, SECTIONS, "note")

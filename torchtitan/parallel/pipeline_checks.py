"""What a recipe can get wrong about its pipeline, and what would work instead."""

from collections.abc import Iterator, Sequence

from torchtitan.config import ConfigError, allowed_names, show
from torchtitan.models.spec import Args, ModelSpec, build_empty
from torchtitan.parallel import schedule_csv
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.schedules import SCHEDULES, Schedule
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.stages import Unit, number_of_stages, units
from torchtitan.torch_private.compiler import keeps_nodes_of_functions

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
CSV = "parallelism.pipeline_parallel_schedule_csv"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
PARTS = "parallelism.module_fqns_per_model_part"

Fault = tuple[str, str]
"""A dotted key, and what is wrong with its value."""


def problems(
    config: ParallelismConfig,
    spec: ModelSpec[Args],
    args: Args,
    *,
    microbatches: int,
    recompute: ActivationCheckpointConfig,
    compile: CompileConfig,
    functions: Sequence[str],
) -> Iterator[Fault]:
    """Everything about a pipeline that cannot work.

    Args:
        microbatches: of one batch of a rank.
        functions: keys that have the model compute by autograd functions written in Python.
    """
    if config.pipeline_parallel_degree == 1:
        return
    if args.tied:
        message = (
            "the output multiplies with the embedding's weights, which would stand on another "
            "stage; use 1, or a flavor with an output of its own"
        )
        yield DEGREE, message
    if config.pipeline_parallel_schedule not in SCHEDULES:
        yield SCHEDULE, allowed_names(config.pipeline_parallel_schedule, SCHEDULES)
        return
    if config.pipeline_parallel_schedule_csv:
        yield from _problems_of_file(
            config, spec, args, microbatches, recompute, compile, functions
        )
        return
    name = config.pipeline_parallel_schedule
    yield from _problems_of_stages(config, SCHEDULES[name], args.n_layers)
    stages = number_of_stages(config, args.n_layers)
    yield from _problems_of_cut(config, spec, args, stages)
    yield from _problems_of_microbatches(config, SCHEDULES[name], stages, microbatches)
    if SCHEDULES[name].splits_backward:
        yield from _problems_of_split_backward(config, SCHEDULE, recompute, compile, functions)


def _problems_of_file(
    config: ParallelismConfig,
    spec: ModelSpec[Args],
    args: Args,
    microbatches: int,
    recompute: ActivationCheckpointConfig,
    compile: CompileConfig,
    functions: Sequence[str],
) -> Iterator[Fault]:
    try:
        orders = schedule_csv.read(config.pipeline_parallel_schedule_csv)
    except ConfigError as error:
        yield CSV, str(error)
        return
    found = list(schedule_csv.faults(orders, config.pipeline_parallel_degree, microbatches))
    yield from ((CSV, fault) for fault in found)
    if found:
        return
    stages = len(schedule_csv.ranks(orders))
    if config.pipeline_parallel_layers_per_stage is not None:
        yield LAYERS, f"the file {CSV} has {stages} stages already; leave one of the two out"
    parts = config.module_fqns_per_model_part
    if parts and len(parts) != stages:
        yield PARTS, f"these are {len(parts)} parts, but the file {CSV} has {stages} stages"
    yield from _problems_of_cut(config, spec, args, stages)
    if any(action.kind == "I" for actions in orders.values() for action in actions):
        yield from _problems_of_split_backward(config, CSV, recompute, compile, functions)


def _problems_of_stages(
    config: ParallelismConfig, schedule: Schedule, layers: int
) -> Iterator[Fault]:
    pp, name = config.pipeline_parallel_degree, config.pipeline_parallel_schedule
    stages = number_of_stages(config, layers)
    if config.module_fqns_per_model_part and config.pipeline_parallel_layers_per_stage is not None:
        yield LAYERS, f"{PARTS} gives the stages by hand already; leave one of the two out"
        return
    if schedule.fits(stages, pp):
        return
    wanted = {
        "one": f"{pp}, one a rank",
        "two": f"{2 * pp}, two a rank",
        "several": f"{2 * pp}, {3 * pp} or any other multiple of {pp}, two or more a rank",
    }[schedule.stages]
    message = f"{name} on {pp} ranks wants stages: {wanted}"
    if config.module_fqns_per_model_part:
        yield PARTS, f"these are {stages} stages; {message}"
        return
    fitting = {-(-layers // each): each for each in range(layers, 0, -1)}
    use = [each for count, each in fitting.items() if schedule.fits(count, pp)]
    hint = f"use {' or '.join(map(str, sorted(use)))}" if use else "leave it out"
    yield LAYERS, f"it cuts {layers} layers into {stages} stages; {message}; {hint}"


def _problems_of_cut(
    config: ParallelismConfig, spec: ModelSpec[Args], args: Args, stages: int
) -> Iterator[Fault]:
    if config.module_fqns_per_model_part:
        known = units(spec, build_empty(spec.build, args, 1))
        yield from (
            (PARTS, fault) for fault in part_faults(config.module_fqns_per_model_part, known)
        )
        return
    most = args.n_layers + bool(spec.before_blocks) + bool(spec.after_blocks)
    if stages > most:
        key = CSV if config.pipeline_parallel_schedule_csv else DEGREE
        message = (
            f"it makes {stages} stages, but {args.n_layers} layers, with what stands before and "
            f"after them, can be cut into {most} at most; use fewer"
        )
        yield key, message


def part_faults(parts: Sequence[Unit], known: Sequence[Unit]) -> Iterator[str]:
    """Why parts by hand are no cut of a model with the `known` units; the first kind of fault."""
    names = [name for unit in known for name in unit]
    given = [name for part in parts for name in part]
    if unknown := [name for name in given if name not in names]:
        yield f"{show(unknown[0])} is no module to be placed; {allowed_names(unknown[0], names)}"
    elif missing := [name for name in names if name not in given]:
        yield f"{', '.join(missing)} stand{'s' * (len(missing) == 1)} in no part"
    elif twice := [name for name in names if given.count(name) > 1]:
        yield f"{', '.join(twice)} stand{'s' * (len(twice) == 1)} in several parts"
    elif given != names:
        at = next(index for index, name in enumerate(names) if given[index] != name)
        yield f"{given[at]} stands where {names[at]} should; wanted the order of the model"
    elif () in parts:
        yield f"part {parts.index(()) + 1} is empty; wanted at least one module in each"
    else:
        for unit in known:
            if not any(set(unit) <= set(part) for part in parts):
                yield f"{' and '.join(unit)} stand in different parts; wanted one for them all"


def _problems_of_microbatches(
    config: ParallelismConfig, schedule: Schedule, stages: int, microbatches: int
) -> Iterator[Fault]:
    pp, name = config.pipeline_parallel_degree, config.pipeline_parallel_schedule
    if schedule.runs(microbatches, stages, pp):
        return
    fewer, more = (
        next((count for count in counts if schedule.runs(count, stages, pp)), None)
        for counts in (range(microbatches, 0, -1), range(microbatches, microbatches + stages + 1))
    )
    rule = (
        f"at least as many microbatches as stages, {stages}"
        if schedule.needs_full
        else f"microbatches that come out even in rounds of {pp} or a few more"
    )
    message = (
        f"it wants {rule}, but there are {microbatches}, training.local_batch_size in parts of "
        f"parallelism.pipeline_parallel_microbatch_size; {name} could run "
        f"{' or '.join(str(count) for count in (fewer, more) if count)}"
    )
    yield SCHEDULE, message


def _problems_of_split_backward(
    config: ParallelismConfig,
    key: str,
    recompute: ActivationCheckpointConfig,
    compile: CompileConfig,
    functions: Sequence[str],
) -> Iterator[Fault]:
    """What torch cannot do where a backward comes in two parts (seen with torch 2.11 to 2.13)."""
    why = "it runs each backward in two parts, "
    if compile.enable and "model" in compile.components:
        message = (
            "and a compiled block can be run backward once only: one rank would fail and the "
            'others wait; use Interleaved1F1B, or compile.components = ["loss"]'
        )
        yield key, why + message
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        message = (
            "and what selective recomputation kept is gone after the first; use Interleaved1F1B, "
            'or activation_checkpoint.mode = "full" or another selective_ac_option'
        )
        yield key, why + message
    if functions and not keeps_nodes_of_functions():
        message = (
            f"and this version of torch does not keep what {' and '.join(functions)} left for the "
            "second; use Interleaved1F1B, torch 2.13, or do without"
        )
        yield key, why + message
    if config.fsdp_reshard_after_forward == "always":
        message = (
            "and would lose the gradients of weights that are not gathered when the first begins; "
            'use Interleaved1F1B, or parallelism.fsdp_reshard_after_forward = "default" or "never"'
        )
        yield key, why + message

"""Validate a recipe without starting anything; print its mistakes, or its size and batch."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, cast

import typer

from torchtitan import config
from torchtitan.checkpoint import saved_steps
from torchtitan.checks import ELSEWHERE, is_error_of, load_job, section_problems
from torchtitan.config import (
    ConfigError,
    PlannedWorld,
    Problem,
    RecipeError,
    amount,
    counted,
    json_schema,
    print_error,
    print_message,
)
from torchtitan.device import Device, DeviceType, pick
from torchtitan.estimate.fitting import in_words, misfits, peak_of, remedy, room
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.plan import Plan, plan
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.experts import parameters_in_words
from torchtitan.models.spec import build_empty
from torchtitan.optim import describe_rules, name_parameters
from torchtitan.parallel import stages
from torchtitan.parts import open_task, resume_policy
from torchtitan.provenance import to_toml
from torchtitan.tasks import TASKS
from torchtitan.tools.options import Choice, Count, DeviceMemory, Recipe, RecipeVerb, progress, verb
from torchtitan.train import (
    NOTHING_SAVED,
    problems_of_files,
    problems_of_stream,
    problems_of_task,
    require_recipe,
)

app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def check(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum of the layout).")
    ] = None,
    device: Annotated[
        str | None, Choice(("cpu", "cuda"), "Device of the run (default: this machine's).")
    ] = None,
    device_memory: Annotated[
        float | None,
        DeviceMemory("Refuse a recipe whose planned memory per rank exceeds that of a device."),
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Also check this machine: its memory, files and packages."),
    ] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the recipe with every key instead, as TOML.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
) -> int:
    if schema:
        print(json.dumps(json_schema(JobConfig), indent=1))
        return 0
    path, flags = config.split_recipe([*([recipe] if recipe else []), *context.args])
    require_recipe(path, flags, "check")
    chosen, device = device, device or pick().type

    def elsewhere(ranks: int, more: Sequence[str]) -> JobConfig:
        return load_job(path, [*flags, *more], ranks, device, exempt=ELSEWHERE).config

    def load(ranks: int | None, exempt: Sequence[str] = ELSEWHERE) -> config.Recipe[JobConfig]:
        local = (ranks or sys.maxsize) if here else None
        words = (path, flags, ranks, device)
        return load_job(*words, is_here=here, local_ranks=local, exempt=exempt)

    try:
        found = load(world_size)
    except RecipeError:
        load(world_size, exempt=())  # reports missing files too
        raise
    job, ranks = found.config, world_size or found.config.parallelism.least_ranks
    if here:
        found.refuse(misfits(job, ranks, ranks, device, elsewhere))
    sections = section_problems(job, job, PlannedWorld(world_size, device))
    missing = [problem for problem in sections if is_error_of(problem, ELSEWHERE)]
    # The facts are printed even so, since downloading a tokenizer may need a permission.
    wrong = [found.line(problem) for problem in (*missing, *problems_of_files(job))]
    wrong += map(found.line, [] if wrong else problems_of_task(job))
    untokenized = [] if wrong else open_task(job).unprepared(job.data)
    wrong += map(
        found.line, [] if wrong or untokenized else problems_of_stream(job, ranks, is_new=True)
    )
    planned: Plan | str = ""
    if device_memory or not resolved:
        with progress(f"planning {ranks:,} ranks") as count:
            on = device if here else chosen
            planned = plan_or_reason(job, ranks, on, device_memory, count)
    if device_memory and isinstance(planned, str):
        wrong += [f"--device-memory: got {device_memory:g}; {planned}"]
    elif device_memory and isinstance(planned, Plan) and not planned.fits:
        with progress("looking for changes after which it fits"):
            fix = remedy(planned, elsewhere)
        needs = f"{peak_of(planned).device:.1f} GiB"
        wrong += [
            f"--device-memory: got {device_memory:g}; a rank takes {needs} by its plan; {fix}"
        ]
    notices = found.notices
    if untokenized:
        named = ", ".join(untokenized)
        notices += (
            f"data.sources: the run tokenizes {named} first; until then the amounts of "
            "tokens are not checked",
        )
    if here and device == pick().type == "cpu":  # of CUDA devices none is this process's own
        peak = peak_of(planned) if isinstance(planned, Plan) else None
        notices += map(found.line, room(job, ranks, ranks, Device("cpu"), peak))
    start = [] if missing else beginning(found, here)
    if wrong:
        print_error(RecipeError(wrong))
    facts = [*summary(job, world_size, planned, not wrong), *start]
    # In one piece, so that `| head` does not close the pipe in between.
    print(to_toml(job) if resolved else "".join(f"{line}\n" for line in facts), end="")
    for notice in notices:
        print_message("note", notice)
    return 2 if wrong else 0


def plan_or_reason(
    job: JobConfig,
    ranks: int,
    device_type: str | None,
    capacity_gib: float | None,
    count: Callable[[int], None],
) -> Plan | str:
    """Plan a recipe for the hardware that it states, or for another type of device.

    Returns the reason if it cannot be planned.
    """
    try:
        stated = job.job.hardware
        hardware = find_hardware(stated, "job.hardware") if stated else None
        if hardware and device_type not in (None, hardware.device_type):
            hardware = None
        return plan(
            job,
            ranks,
            hardware,
            device_type=cast(DeviceType, device_type or pick().type),
            capacity_gib=capacity_gib,
            count=count,
        )
    except RecipeError as error:
        return error.lines[0]


def memory(planned: Plan | str) -> str:
    """Describe the memory of the fullest rank."""
    if isinstance(planned, str):
        return f"planned memory: unknown, as {planned}"
    of, device = "of the fullest rank" if len(planned.kinds) > 1 else "of a rank", planned.hardware
    room, capacity, fits = planned.room_gib, planned.capacity_gib, ""
    if room is not None:
        fits = f"; {room:.1f} of {capacity:.1f} remain"
        if room < 0:
            fits = f"; it does not fit: {-room:.1f} too much for {capacity:.1f}"
    kinds = f" ({large})" if (large := in_words(planned.by_kind_gib)) else ""
    outside = f", {planned.outside_gib:.1f} outside the allocator" if planned.outside_gib else ""
    return (
        f"planned memory {of} on {device.name if device else planned.device_type}: "
        f"{planned.allocated_gib.value:.1f} GiB allocated, {planned.reserved_gib.value:.1f} "
        f"reserved{outside}{kinds}{fits}"
    )


def beginning(found: config.Recipe[JobConfig], here: bool) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit.

    Checkpoints of the run itself count if it is to run `here`.
    """
    policy, checkpoint = resume_policy(found.config), found.config.checkpoint
    path, has_frequent = checkpoint.initial_load_path, here and checkpoint.frequent.interval
    not_looked_for = "frequent checkpoint, which is not looked for here"
    if (
        has_frequent
        and checkpoint.resume == "must"
        and not saved_steps(checkpoint.path_in(policy.dump_folder))
    ):
        return [f"is refused unless nodes hold a {not_looked_for}"]
    if here:
        start = policy.start()
    elif path is None:
        return []
    else:
        try:
            start = policy.initial()
        except ConfigError as error:
            found.refuse([Problem("checkpoint.initial_load_path", str(error))])
            raise
    also = [f"unless nodes hold a newer {not_looked_for}"] * bool(has_frequent)
    if start.path is None:
        return ["starts from scratch", *also]
    what = "starts from the weights in" if start.model_only else "resumes from"
    return [f"{what} {start.path}", *start.changes, *filter(None, [start.rate]), *also]


def summary(
    job: JobConfig, world_size: int | None, planned: Plan | str, is_valid: bool = True
) -> Iterator[str]:
    """Summarize a recipe: ranks, model, memory, batch."""
    ranks = world_size or job.parallelism.least_ranks
    degrees, t = job.degrees(ranks), job.training
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    hint = "" if world_size else "; --world-size N checks another number"
    valid = "valid " * is_valid
    yield f"{valid}on {ranks} rank{'s' * (ranks > 1)}: {layout}{hint}"
    spec, args = MODELS[job.model.name], job.model_args()
    task, samples = TASKS[spec.task], job.global_batch(degrees)
    network = build_empty(spec.build, args, t.seq_len)
    yield (
        f"{job.model.name} {job.model.flavor}: {parameters_in_words(network)}, "
        f"{amount(spec.flops_per_unit(args, t.seq_len), 'FLOP')} per {task.unit[:-1]}"
    )
    yield memory(planned)
    sample = "sequence" if task.units(2) > 1 else task.unit[:-1]
    yield (
        f"{counted(samples, sample)} per optimizer step: "
        f"{job.local_batch(degrees)} at a time x {job.accumulation(degrees)} accumulated x "
        f"{job.data_ranks(degrees)} data-parallel"
    )
    count = samples * task.units(t.seq_len)
    yield f"{count:,} {task.unit} per step, {count * t.steps:,} in {counted(t.steps, 'step')}"
    if note := job.batch_note(degrees):
        yield note
    if not job.checkpoint.saves:
        yield NOTHING_SAVED
    if degrees.pp > 1:
        microbatches = job.parallelism.microbatches(job.local_batch(degrees))
        yield stages.describe(job.parallelism, len(spec.blocks(network)), microbatches)
        if extra := spec.shapes(args, t.seq_len).extra_hidden:
            yield f"each stage hands on {1 + extra} times as much in training: later tokens too"
    for auxiliary in job.auxiliary_losses:
        yield f"auxiliary loss {auxiliary.described()}"
    yield from describe_rules(job.optimizer, name_parameters([network], spec.role))

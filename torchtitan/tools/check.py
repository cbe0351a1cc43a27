"""Validate a recipe without starting anything; print its mistakes, or its size and batch."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Protocol

import typer

from torchtitan import config
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.settings import NOTHING_SAVED
from torchtitan.checks import ELSEWHERE, is_error_of, load_job, section_problems
from torchtitan.checks.limits import problems_of_memory
from torchtitan.config import (
    ConfigError,
    PlannedWorld,
    Problem,
    RecipeError,
    Registry,
    amount,
    counted,
    json_schema,
    needs_wing,
    print_error,
    print_message,
)
from torchtitan.data.sizes import tokens_before
from torchtitan.device import pick
from torchtitan.inputs import (
    open_task,
    problems_of_files,
    problems_of_stream,
    problems_of_task,
    require_recipe,
)
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.experts import parameters_in_words
from torchtitan.models.spec import build_empty
from torchtitan.optim import describe_rules, name_parameters
from torchtitan.parallel import Degrees, stages
from torchtitan.provenance import to_toml
from torchtitan.tasks import TASKS
from torchtitan.tools.options import (
    Choice,
    Count,
    DeviceMemory,
    Flag,
    Recipe,
    RecipeVerb,
    progress,
    verb,
)

app = verb()


class MemoryPlan(Protocol):
    """Planned memory of a rank."""

    def summary(self) -> str:
        """Describe it in a line."""

    def refusal(self, load: Callable[[int, Sequence[str]], JobConfig], /) -> str:
        """Return why a rank does not fit into its device; empty if it does."""

    def notes(self) -> Iterator[Problem]:
        """Note when the ranks may not fit in the free memory of this host."""


FACTS = Registry[
    Callable[[JobConfig, int, str | None, float | None, Callable[[int], None]], MemoryPlan]
]("check")
"""Functions behind options of `check`: `plan` takes the recipe, its ranks, the device, its memory
in GiB, and a function that is called with the number of ranks planned so far."""


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
    with_plan: Annotated[bool, Flag("--plan", "Also print the planned memory of a rank.")] = False,
    device_memory: Annotated[
        float | None, DeviceMemory("Reject a recipe whose planned memory per rank exceeds this.")
    ] = None,
    here: Annotated[
        bool, Flag("--here", "Also check this machine: its memory, files and packages.")
    ] = False,
    resolved: Annotated[
        bool, Flag("--resolved", "Print the recipe with every key instead, as TOML.")
    ] = False,
    schema: Annotated[
        bool, Flag("--json-schema", "Print the JSON Schema of recipes, for editors.")
    ] = False,
) -> int:
    if schema:
        print(json.dumps(schema_of_recipes(), indent=1))
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
    is_planned = bool(device_memory or ((with_plan or here) and not resolved))
    has_start = here or job.checkpoint.initial_load_path is not None
    if here:
        found.refuse(problems_of_memory(job, ranks, ranks, device))
    sections = section_problems(job, job, PlannedWorld(world_size, device))
    missing = [problem for problem in sections if is_error_of(problem, ELSEWHERE)]
    # The facts are printed even so, since downloading a tokenizer may need a permission.
    wrong = [found.line(problem) for problem in (*missing, *problems_of_files(job))]
    wrong += map(found.line, [] if wrong else problems_of_task(job))
    task = None if wrong else open_task(job)
    untokenized = task.unprepared(job.data) if task else []
    if not wrong:
        short = problems_of_stream(job, ranks, is_new=True, tokenizes=not untokenized)
        wrong += map(found.line, short)
    planned, held = None, f"planned memory: unknown, as {needs_wing('plan')}" * is_planned
    if is_planned and "plan" in FACTS:
        with progress(f"planning {ranks:,} ranks") as count:
            on = device if here else chosen
            planned = FACTS["plan"](job, ranks, on, device_memory, count)
        held = planned.summary()
    if device_memory:
        reason = planned.refusal(elsewhere) if planned else needs_wing("plan")
        wrong += [f"--device-memory: got {device_memory:g}; {reason}"] * bool(reason)
    notices = [*found.notices, *dict.fromkeys(task.notes(job.data) if task else ())]
    if untokenized:
        named = ", ".join(f'"{name}"' for name in untokenized)
        notices.append(
            f"data.sources: the run tokenizes {named} first; until then the amounts of "
            "their tokens are not checked"
        )
    is_on_cpu = here and device == pick().type == "cpu"  # no CUDA device is this process's own
    if planned and is_on_cpu:
        notices += map(found.line, planned.notes())
    start = starting_point(found, here) if has_start and not missing else []
    if wrong:
        print_error(RecipeError(wrong))
    facts = [*summary(job, world_size, held, not wrong), *start]
    # In one piece, so that `| head` does not close the pipe in between.
    print(to_toml(job) if resolved else "".join(f"{line}\n" for line in facts), end="")
    for notice in notices:
        print_message("note", notice)
    return 2 if wrong else 0


def schema_of_recipes() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, with the sizes of each model's flavors in words."""
    schema = json_schema(JobConfig)
    for choice in schema["properties"]["model"]["oneOf"]:
        keys = choice["properties"]
        spec = MODELS[keys["name"]["const"]]
        for key in spec.settings.sizes():
            description = spec.with_sizes(key, keys[key]["description"])
            keys[key] = keys[key] | {"description": description}
    return schema


def summary(
    job: JobConfig, world_size: int | None, memory: str = "", is_valid: bool = True
) -> Iterator[str]:
    """Summarize a recipe: ranks, model, its planned memory if any, batch."""
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
    if memory:
        yield memory
    sample = "sequence" if task.units(2) > 1 else task.unit[:-1]
    yield (
        f"{counted(samples, sample)} per optimizer step: "
        f"{job.local_batch(degrees)} at a time x {job.accumulation(degrees)} accumulated x "
        f"{job.data_ranks(degrees)} data-parallel"
    )
    count = samples * task.units(t.seq_len)
    total = tokens_before(t.steps, job.step_sizes(degrees)) if t.stages else count * t.steps
    yield f"{count:,} {task.unit} per step, {total:,} in {counted(t.steps, 'step')}"
    yield from stages_in_words(job, degrees)
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


def stages_in_words(job: JobConfig, degrees: Degrees) -> Iterator[str]:
    """Describe each later stage of training, and what changes with it."""
    for before, after in pairwise(job.stages(degrees)):
        held, holds = (each.job.held_tokens(degrees) for each in (before, after))
        activations = f"; a rank has activations of {holds:,} tokens, not of {held:,}"
        again = "; the model is compiled again" * job.compile.compiles("model")
        yield (
            f"{after.job.described(degrees, after.start)}, {after.tokens:,} tokens before"
            f"{(activations + again) * (held != holds)}"
        )


def starting_point(found: config.Recipe[JobConfig], here: bool) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit.

    Checkpoints of the run itself count if it is to run `here`.
    """
    # It imports the whole of a run, so only if asked.
    resume_policy = config.load_entry("torchtitan.build:resume_policy")
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

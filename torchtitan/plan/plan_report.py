"""A plan as one JSON object, and that as text for a terminal: see docs/plan.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchtitan.config import amount
from torchtitan.data.sizes import tokens_before
from torchtitan.device import GIB
from torchtitan.job import sizes_of
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.parallel import stages
from torchtitan.plan.fitting import FittingChange, described, no_change
from torchtitan.plan.plan import TIME_LIMITS, Plan, Range
from torchtitan.tasks import TASKS

UNKNOWN = {"value": None, "low": None, "high": None}
DAY = 24 * 60 * 60
ORDER = (
    *("parameters", "gradients", "optimizer states", "gathered", "activations", "logits"),
    *("communication", "buffers", "data", "temporary", "workspaces"),
)
"""Order of the kinds of memory; others follow."""
EXPOSED = "exposed communication"
SHORTEST = 5e-4
"""Share of a step below which a part of it is not shown."""
SMALLEST = 0.005
"""GiB of a kind of memory that no rank has more of, which is not shown."""
Json = dict[str, Any]


def plan_json(
    plan: Plan, *, tokens: float | None = None, changes: Sequence[FittingChange] = ()
) -> Json:
    """Return the whole plan.

    Args:
        tokens: budget of the run; None: all steps of the recipe.
        changes: changes after which the recipe fits.
    """
    job, hardware = plan.job, plan.hardware
    degrees, spec, args = job.degrees(plan.ranks), MODELS[job.model.name], job.model_args()
    task, samples = TASKS[spec.task], job.global_batch(degrees)
    units = samples * task.units(job.training.seq_len)
    per_unit = spec.flops_per_unit(args, job.training.seq_len)
    steps, has_stages = job.training.steps, len(plan.stages) > 1
    of_run = tokens_before(steps, sizes_of(plan.stages, degrees)) if has_stages else units * steps
    budget = tokens or of_run
    network = build_empty(spec.build, args, job.training.seq_len)
    return {
        "world_size": plan.ranks,
        "device_type": plan.device_type,
        "hardware": hardware and hardware.model_dump(include={"name", "description", "source"}),
        "model": {
            "name": job.model.name,
            "flavor": job.model.flavor,
            "parameters": count_parameters(network).total,
        },
        "layout": degrees._asdict(),
        "batch": {
            "samples": samples,
            "local": job.local_batch(degrees),
            "accumulated": job.accumulation(degrees),
            "data_ranks": job.data_ranks(degrees),
            "unit": task.unit,
            "tokens": units,
        },
        "stages": [*_stages(plan)] if has_stages else [],
        "memory": _memory_json(plan),
        "flops": {
            "per_token": per_unit,
            "per_step": per_unit * units,
            "per_step_per_device": per_unit * units / (plan.ranks * job.fault_tolerance.groups),
            "executed_per_step_per_device": max(kind.executed.total() for kind in plan.kinds),
        },
        "traffic": [asdict(each) for each in plan.traffic],
        "pipeline": _pipeline(plan, len(spec.blocks(network))),
        "speed": _speed_json(plan, units),
        "budget": _budget(plan, budget, units),
        "changes": [_change_json(change, plan, budget) for change in changes],
        "notes": [*plan.notes],
    }


def _stages(plan: Plan) -> Iterator[Json]:
    """Describe each stage of training."""
    degrees = plan.job.degrees(plan.ranks)
    for start, tokens, job in plan.stages:
        yield {
            "start": start,
            "tokens": tokens,
            "samples": job.global_batch(degrees),
            "seq_len": job.training.seq_len,
            "local": job.local_batch(degrees),
            "accumulated": job.accumulation(degrees),
            "is_planned": job.training == plan.job.training,
        }


def _memory_json(plan: Plan) -> Json:
    reserved, fullest, free = plan.reserved_gib, plan.fullest, None
    if plan.capacity_gib is not None:
        free = plan.capacity_gib - plan.outside_gib
    return {
        "peak_allocated_gib": plan.allocated_gib._asdict(),
        "peak_reserved_gib": reserved._asdict(),
        "fits": {
            name: None if free is None else size <= free
            for name, size in reserved._asdict().items()
        },
        "capacity_gib": plan.capacity_gib,
        "outside_allocator_gib": plan.outside_gib,
        "room_gib": plan.room_gib,
        "least_devices": plan.least_devices,
        "moment": fullest.memory.moment,
        "rank": fullest.stage_ranks[0] * plan.ranks // plan.job.degrees(plan.ranks).pp,
        "largest_request_gib": max(kind.memory.largest_request for kind in plan.kinds) / GIB,
        "ranks": _kinds(plan),
    }


def _kinds(plan: Plan) -> list[Json]:
    """Describe each kind of rank."""
    each = plan.ranks // plan.job.degrees(plan.ranks).pp
    return [
        {
            "pipeline_ranks": [*kind.stage_ranks],
            "count": kind.ranks,
            "first_rank": kind.stage_ranks[0] * each,
            "by_kind_gib": {n: size / GIB for n, size in sorted(kind.by_kind.items()) if size},
            "activations_gib": {
                name: size / GIB for name, size in sorted(kind.step.activations().items())
            },
            "allocator_gib": (kind.memory.peak_reserved - kind.allocated) / GIB,
            "outside_gib": dict(kind.outside),
            "outside_allocator_gib": sum(kind.outside.values()),
            "host_gib": kind.step.host_bytes() / GIB,
            "peak_allocated_gib": kind.allocated / GIB,
            "peak_reserved_gib": kind.memory.peak_reserved / GIB,
            "largest_request_gib": kind.memory.largest_request / GIB,
            "moment": kind.memory.moment,
        }
        for kind in plan.kinds
    ]


def _pipeline(plan: Plan, blocks: int) -> Json | None:
    job, degrees = plan.job, plan.job.degrees(plan.ranks)
    if degrees.pp == 1:
        return None
    config = job.parallelism
    microbatches = config.microbatches(job.local_batch(degrees))
    return {
        "schedule": config.pipeline_parallel_schedule_csv or config.pipeline_parallel_schedule,
        "stages": len(stages.ranks(config, blocks)),
        "microbatches": microbatches,
        "bubble": plan.time.bubble / plan.time.seconds if plan.time else None,
        "bubble_if_stages_are_equal": stages.predicted_bubble(config, blocks, microbatches),
    }


def _speed_json(plan: Plan, units: int) -> Json:
    time = plan.time
    if time is None:
        names = ("seconds_per_step", "tokens_per_second_per_device", "mfu", "tokens_per_day")
        return dict.fromkeys(names, UNKNOWN) | {"seconds": None}
    rate = time.tokens_per_second_per_device
    return {
        "seconds_per_step": Range.within(time.seconds, TIME_LIMITS)._asdict(),
        "tokens_per_second_per_device": _rate(rate),
        "mfu": UNKNOWN if time.mfu is None else _rate(time.mfu),
        "tokens_per_day": _rate(units / time.seconds * DAY),
        "seconds": {
            "compute": time.compute,
            "update": time.update,
            "exposed": dict(time.exposed),
            "bubble": time.bubble,
            "host_bound": time.host_bound,
        },
    }


def _rate(value: float) -> dict[str, float]:
    """Return a rate with the limits that follow from those of the time of a step."""
    fast, slow = TIME_LIMITS
    return Range(value, value / slow, value / fast)._asdict()


def _budget(plan: Plan, tokens: float, units: int) -> Json:
    steps, devices = tokens / units, plan.ranks * plan.job.fault_tolerance.groups
    seconds = None if plan.time is None else steps * plan.time.seconds
    return {
        "tokens": tokens,
        "steps": steps,
        "days": None if seconds is None else seconds / DAY,
        "device_hours": None if seconds is None else seconds * devices / 3600,
    }


def _change_json(change: FittingChange, before: Plan, tokens: float) -> Json:
    after, task = change.plan, TASKS[MODELS[change.plan.job.model.name].task]
    samples = after.job.global_batch(after.job.degrees(after.ranks))
    units = samples * task.units(after.job.training.seq_len)
    return {
        "flags": [*change.flags],
        "peak_reserved_gib": change.plan.reserved_gib._asdict(),
        "room_gib": change.plan.room_gib,
        "device_time": change.slowdown(before),
        "world_size": after.ranks,
        "speed": _speed_json(after, units),
        "budget": _budget(after, tokens, units),
    }


def plan_text(found: Json) -> Iterator[str]:
    """Yield the lines of a plan, given its JSON object: its answer first."""
    yield from _head(found)
    if found["stages"]:
        yield from ("", "stages of training; the plan is of the one with a star")
        yield from _indented(_table_of_stages(found["stages"]))
    yield from ("", "memory of a rank at its peak, GiB")
    yield from _indented(_memory(found["memory"]))
    yield from ("", "computation and communication per step")
    yield from _indented(_work(found))
    if _does_fit(found) and found["speed"]["seconds"] is not None:
        yield from ("", "time of a step")
        yield from _indented(_parts_of_time(found["speed"]))
    if found["changes"]:
        yield from ("", "changes after which it fits, the cheapest first")
        yield from _indented(map(_change, found["changes"]))


def _table_of_stages(stages: Sequence[Json]) -> Iterator[str]:
    """Yield a table of the stages of training."""
    rows = [["after step", "tokens before", "sequences", "length", "at a time", "accumulated"]]
    for each in stages:
        first = f"{each['start']:,}{' *' * each['is_planned']}"
        names = ("tokens", "samples", "seq_len", "local", "accumulated")
        rows.append([first, *(f"{each[name]:,}" for name in names)])
    yield from table(rows)


def kinds_of_memory(ranks: Sequence[Json]) -> list[str]:
    """Return the kinds of memory that any rank has a notable amount of, in a fixed order."""
    names = {n for rank in ranks for n, size in rank["by_kind_gib"].items() if size > SMALLEST}
    return [*(name for name in ORDER if name in names), *sorted(names.difference(ORDER))]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def spread(found: Mapping[str, float | None], spec: str = ".1f") -> str:
    """Format a value with its limits."""
    if found["value"] is None:
        return "unknown"
    value, low, high = (format(found[name], spec) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def count(value: float) -> str:
    """Format a number of tokens as `--tokens` takes it."""
    for suffix in ("", "K", "M", "B"):
        if value < 1000:
            return f"{value:.4g}{suffix}"
        value /= 1000
    return f"{value:,.4g}T"


def layout(found: Json) -> str:
    """Return the axes that have several ranks."""
    axes = [f"{axis} {size}" for axis, size in found["layout"].items() if size > 1]
    return ", ".join(axes) or "a single rank"


def _does_fit(found: Json) -> bool:
    return found["memory"]["fits"]["value"] is not False


def _head(found: Json) -> Iterator[str]:
    """Yield the recipe, the answer, and the batch."""
    model, batch, ranks = found["model"], found["batch"], found["world_size"]
    place = found["hardware"]["name"] if found["hardware"] else f"unknown ({found['device_type']})"
    yield (
        f"{model['name']} {model['flavor']} on {ranks:,} rank{'s' * (ranks > 1)}: {layout(found)}; "
        f"hardware: {place}"
    )
    yield from answer(found)
    yield (
        f"{model['parameters']:,} parameters; {batch['tokens']:,} {batch['unit']} per step: "
        f"{batch['local']} at a time x {batch['accumulated']} accumulated x "
        f"{batch['data_ranks']} data-parallel"
    )


def answer(found: Json) -> Iterator[str]:
    """Yield whether a plan fits, and its speed, or that of the first change that fits."""
    unit = found["batch"]["unit"]
    yield _fits(found["memory"])
    if _does_fit(found):
        yield from _speed(found, unit, found["world_size"])
    elif found["changes"]:
        first = found["changes"][0]
        yield f"it fits with {' '.join(first['flags'])}:"
        yield from _speed(first, unit, first["world_size"])
    else:
        yield no_change(found["memory"]["least_devices"])


def _memory(memory: Json) -> Iterator[str]:
    ranks = memory["ranks"]
    names = kinds_of_memory(ranks)
    # A column for each kind of rank is easier to read, while they fit side by side.
    rows: list[list[str]] = [["", *(_where(rank) for rank in ranks)]]
    for name in names:
        rows.append([name, *(f"{rank['by_kind_gib'].get(name, 0):.2f}" for rank in ranks)])
        rows += _parts(ranks, "activations_gib") if name == "activations" else []
    for label, key in {
        "peak allocated": "peak_allocated_gib",
        "allocator adds": "allocator_gib",
        "peak reserved": "peak_reserved_gib",
        "outside the allocator": "outside_allocator_gib",
    }.items():
        rows.append([label, *(f"{rank[key]:.2f}" for rank in ranks)])
    rows += _parts(ranks, "outside_gib")
    if any(rank["host_gib"] for rank in ranks):
        rows.append(["host memory", *(f"{rank['host_gib']:.2f}" for rank in ranks)])
    is_wide = len(ranks) > 6
    yield from table([*map(list, zip(*rows, strict=True))] if is_wide else rows)
    yield (
        f"fullest: rank {memory['rank']}, {memory['moment'] or 'before the step'}; "
        f"largest request {memory['largest_request_gib']:.2f}"
    )


def _parts(ranks: Sequence[Json], key: str) -> Iterator[list[str]]:
    """Yield a row for each part of an amount, if it has several."""
    names = list(dict.fromkeys(name for rank in ranks for name in rank[key]))
    for name in names if len(names) > 1 else ():
        yield [f"  {name}", *(f"{rank[key].get(name, 0):.2f}" for rank in ranks)]


def _fits(memory: Json) -> str:
    room, capacity = memory["room_gib"], memory["capacity_gib"]
    peak = f"peak reserved {spread(memory['peak_reserved_gib'], '.2f')}"
    if room is None:
        why = "as the hardware is; name it with --hardware or --device-memory"
        return f"fits: unknown, {why}; {peak} GiB"
    if room < 0:
        return f"fits: no, {-room:.1f} GiB over the {capacity:.1f} of a device; {peak}"
    doubt = "" if memory["fits"]["high"] else ", less than the error of the estimate"
    return f"fits: yes, {room:.1f} of {capacity:.1f} GiB remain{doubt}; {peak}"


def _where(rank: Json) -> str:
    first, *rest = rank["pipeline_ranks"]
    if rank["count"] == 1:
        return f"rank {rank['first_rank']}"
    many = f"{rank['count']:,} ranks"
    if rest or rank["first_rank"] or first:
        return f"pp {','.join(map(str, [first, *rest]))}: {many}"
    return many


def _work(found: Json) -> Iterator[str]:
    flops = found["flops"]
    yield (
        f"{amount(flops['per_step'], 'FLOP')} of the model, {amount(flops['per_token'], 'FLOP')} "
        f"per {found['batch']['unit'][:-1]}; a device executes "
        f"{amount(flops['executed_per_step_per_device'], 'FLOP')}"
    )
    if found["traffic"]:
        rows = [["axis", "operation", "link", "count", "sent"]]
        for each in found["traffic"]:
            sent = amount(each["bytes"], "B")
            rows.append([each["axis"], each["operation"], each["link"], f"{each['count']:,}", sent])
        yield from table(rows)
    if pipeline := found["pipeline"]:
        yield (
            f"pipeline {pipeline['schedule']}: {pipeline['stages']} stages, "
            f"{pipeline['microbatches']} microbatches; bubble "
            f"{pipeline['bubble_if_stages_are_equal']:.1%} if all stages take the same time"
        )


def _speed(found: Json, unit: str, ranks: int) -> Iterator[str]:
    """Yield the speed of a plan, or of a change, and the time of its budget."""
    speed, budget = found["speed"], found["budget"]
    if speed["seconds"] is None:
        yield "speed: unknown, as the hardware is; name it with --hardware"
        return
    rate = speed["tokens_per_second_per_device"]
    mfu = "" if speed["mfu"]["value"] is None else f"; MFU {spread(speed['mfu'], '.1%')}"
    yield f"{unit}/s: {spread(rate, ',.0f')} per device, {rate['value'] * ranks:,.0f} in total{mfu}"
    yield (
        f"{count(budget['tokens'])} {unit} in {budget['steps']:,.0f} steps of "
        f"{spread(speed['seconds_per_step'], '.4g')} s: {duration(budget)}"
    )


def duration(budget: Json) -> str:
    """Format the time of a run: days and device-hours, or seconds if it is short."""
    days = budget["days"]
    if days < 0.1:
        return f"{DAY * days:.3g} s"
    return f"{days:,.1f} days, {budget['device_hours']:,.0f} device-hours"


def _parts_of_time(speed: Json) -> Iterator[str]:
    """Yield a table of the parts of a step, without those too short to be seen."""
    total, exposed = speed["seconds_per_step"]["value"], speed["seconds"]["exposed"]
    rows: list[tuple[str, float]] = [*parts_of_step(speed)]
    if len(exposed) > 1:
        inside = [(f"  {name.rpartition(', ')[2]}", part) for name, part in rows if EXPOSED in name]
        others = [row for row in rows if EXPOSED not in row[0]]
        rows = [others[0], (f"{EXPOSED}, total", sum(exposed.values())), *inside, *others[1:]]
    shown = [(name, part) for name, part in rows if part >= SHORTEST * total]
    yield from table([[name, f"{part:.3g} s", f"{part / total:.1%}"] for name, part in shown])


def parts_of_step(speed: Json) -> Iterator[tuple[str, float]]:
    """Yield the parts of the seconds of a step."""
    seconds: dict[str, Any] = speed["seconds"]
    yield "compute", seconds["compute"]
    for axis, exposed in seconds["exposed"].items():
        yield f"{EXPOSED}, {'agreement of all ranks' if axis == 'all' else axis}", exposed
    yield "pipeline bubble", seconds["bubble"]
    yield "waiting for the host", seconds["host_bound"]
    yield "gradient norm and update", seconds["update"]


def _change(change: Json) -> str:
    reserved: float = change["peak_reserved_gib"]["value"]
    return described(change["flags"], reserved, change["device_time"])


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)

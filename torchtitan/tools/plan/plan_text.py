"""A plan as text for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.config import amount
from torchtitan.estimate.changes import described, no_change
from torchtitan.tools.plan.plan_json import Json

ORDER = (
    *("parameters", "gradients", "optimizer states", "gathered", "activations", "logits"),
    *("communication", "buffers", "data", "temporary", "workspaces"),
)
"""Order of the kinds of memory; others follow."""
SMALLEST = 0.005
"""GiB of a kind of memory that no rank has more of, which is not shown."""


def plan_text(found: Json) -> Iterator[str]:
    """Yield the lines of a plan, given its JSON object."""
    yield from _recipe(found)
    yield from ("", "memory of a rank at its peak, GiB")
    yield from _indented(_memory(found["memory"]))
    yield from ("", "computation and communication per step")
    yield from _indented(_work(found))
    yield from ("", "speed")
    yield from _indented(_speed(found))
    if found["changes"]:
        yield from ("", "changes after which it fits, the cheapest first")
        yield from _indented(map(_change, found["changes"]))
    elif found["memory"]["fits"]["value"] is False:
        yield f"  {no_change(found['memory']['least_devices'])}"


def kinds_of_memory(ranks: Sequence[Json]) -> list[str]:
    """Return the kinds of memory that any rank has a notable amount of, in a fixed order."""
    names = {
        name for rank in ranks for name, size in rank["by_kind_gib"].items() if size > SMALLEST
    }
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


def _recipe(found: Json) -> Iterator[str]:
    model, batch, ranks = found["model"], found["batch"], found["world_size"]
    place = found["hardware"]["name"] if found["hardware"] else f"unknown ({found['device_type']})"
    yield (
        f"{model['name']} {model['flavor']} on {ranks:,} rank{'s' * (ranks > 1)}: {layout(found)}; "
        f"hardware: {place}"
    )
    yield (
        f"{model['parameters']:,} parameters; {batch['tokens']:,} {batch['unit']} per step: "
        f"{batch['local']} at a time x {batch['accumulated']} accumulated x "
        f"{batch['data_ranks']} data-parallel"
    )


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
    yield f"peak allocated {spread(memory['peak_allocated_gib'], '.2f')}"
    yield f"peak reserved {spread(memory['peak_reserved_gib'], '.2f')}"
    yield (
        f"fullest: rank {memory['rank']}, {memory['moment'] or 'before the step'}; "
        f"largest request {memory['largest_request_gib']:.2f}"
    )
    yield _fits(memory)


def _parts(ranks: Sequence[Json], key: str) -> Iterator[list[str]]:
    """Yield a row for each part of an amount, if it has several."""
    names = list(dict.fromkeys(name for rank in ranks for name in rank[key]))
    for name in names if len(names) > 1 else ():
        yield [f"  {name}", *(f"{rank[key].get(name, 0):.2f}" for rank in ranks)]


def _fits(memory: Json) -> str:
    room, capacity = memory["room_gib"], memory["capacity_gib"]
    if room is None:
        return "fits: unknown, as the hardware is; name it with --hardware or --device-memory"
    if room < 0:
        return f"fits: no, {-room:.1f} too much for {capacity:.1f}"
    doubt = "" if memory["fits"]["high"] else ", less than the error of the estimate"
    return f"fits: yes, {room:.1f} of {capacity:.1f} remain{doubt}"


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


def _speed(found: Json) -> Iterator[str]:
    speed, budget, unit = found["speed"], found["budget"], found["batch"]["unit"]
    if speed["seconds"] is None:
        yield "unknown, as the hardware is; name it with --hardware"
        return
    yield f"seconds per step {spread(speed['seconds_per_step'], '.4g')}"
    yield f"{unit}/s per device {spread(speed['tokens_per_second_per_device'], ',.0f')}"
    yield f"MFU {spread(speed['mfu'], '.1%')}"
    yield f"{unit} per day {count(speed['tokens_per_day']['value'])}"
    yield (
        f"{count(budget['tokens'])} {unit} in {budget['steps']:,.0f} steps: "
        f"{budget['days']:,.1f} days, {budget['device_hours']:,.0f} device-hours"
    )
    seconds = [(name, part) for name, part in parts_of_step(speed) if part]
    total = speed["seconds_per_step"]["value"]
    yield from table([[name, f"{part:.4g} s", f"{part / total:.1%}"] for name, part in seconds])


def parts_of_step(speed: Json) -> Iterator[tuple[str, float]]:
    """Yield the parts of the seconds of a step."""
    seconds: dict[str, Any] = speed["seconds"]
    yield "compute", seconds["compute"]
    for axis, exposed in seconds["exposed"].items():
        yield f"exposed communication, {axis}", exposed
    yield "pipeline bubble", seconds["bubble"]
    yield "waiting for the host", seconds["host_bound"]
    yield "gradient norm and update", seconds["update"]


def _change(change: Json) -> str:
    reserved: float = change["peak_reserved_gib"]["value"]
    return described(change["flags"], reserved, change["device_time"])


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)

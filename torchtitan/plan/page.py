"""A plan as a page: whether it fits and how fast it is, memory over a step, and where time goes."""

from collections.abc import Iterator, Sequence

from torchtitan.device import GIB
from torchtitan.plan.plan import Plan, RankPlan
from torchtitan.plan.plan_report import (
    Json,
    duration,
    kinds_of_memory,
    layout,
    parts_of_step,
    plan_text,
)
from torchtitan.tools.page import (
    BarPart,
    Chart,
    ChartRow,
    Code,
    Page,
    draw_areas,
    draw_rows,
    stacked_bar,
)

POINTS = 400
"""Points of a curve of memory; each is the fullest of the moments around it."""
ACTIONS = 5000
"""Number of actions of a pipeline that are drawn, the first ones."""
ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}


def plan_page(plan: Plan, found: Json) -> Page:
    """Return the page of a plan, given its JSON object too."""
    model = found["model"]
    fullest, *others = memory_charts(plan, found)
    return Page(
        title=f"{model['name']} {model['flavor']} on {plan.ranks:,} ranks: {layout(found)}",
        answer=sentence(found),
        chart=fullest,
        sections={
            "Memory of other ranks": others,
            "Time of a step": time_charts(plan, found),
            "Not modeled": [plan.notes],
            "The plan": [Code("\n".join(plan_text(found)))],
        },
        name="plan",
        data=found,
    )


def sentence(found: Json) -> str:
    """Say how much memory a plan needs, how fast it is, and how long the run takes."""
    memory, unit = found["memory"], found["batch"]["unit"]
    said = f"A rank reserves at most {memory['peak_reserved_gib']['value']:.2f} GiB"
    if (room := memory["room_gib"]) is not None:
        over = "leaves {:.1f} of" if room >= 0 else "is {:.1f} more than fits into"
        said += f", which {over.format(abs(room))} the {memory['capacity_gib']:.1f} GiB of a device"
    if memory["fits"]["value"] is False:
        said += "".join(f"; it fits with {' '.join(it['flags'])}" for it in found["changes"][:1])
    elif rate := found["speed"]["tokens_per_second_per_device"]["value"]:
        said += f"; it trains {rate:,.0f} {unit}/s per device, and the run takes "
        said += duration(found["budget"])
    return f"{said}."


def memory_charts(plan: Plan, found: Json) -> list[Chart]:
    """Draw memory over a step of each kind of rank, the fullest first."""
    by_rank = {kind.stage_ranks[0]: kind for kind in plan.kinds}
    passes = found["batch"]["accumulated"]
    caption = "Tensors on the device by kind."
    if passes > 2:
        caption += f" Of {passes} accumulated batches, the first and the last."
    names = kinds_of_memory(found["memory"]["ranks"])
    ranks = sorted(found["memory"]["ranks"], key=lambda rank: -rank["peak_reserved_gib"])
    charts = []
    for rank in ranks:
        title = "Memory over a step"
        if plan.job.degrees(plan.ranks).pp > 1:
            title += f", pipeline rank {', '.join(map(str, rank['pipeline_ranks']))}"
        charts.append(memory_chart(title, caption, by_rank[rank["pipeline_ranks"][0]], names, plan))
    return charts


def memory_chart(
    title: str, caption: str, kind: RankPlan, names: Sequence[str], plan: Plan
) -> Chart:
    """Draw the memory of a rank by kind over a step, stacked, with the limit."""
    points = [*moments(kind)]
    last = max(points[-1][0], 1)
    limit = None
    if plan.capacity_gib is not None:
        free = plan.capacity_gib - plan.outside_gib
        limit = free, f"limit of a device: {free:.1f} GiB for tensors"
    _, moment, _ = max(points, key=lambda each: sum(each[2].values()))
    return draw_areas(
        title,
        [100 * at / last for at, _, _ in points],
        {name: [level.get(name, 0) / GIB for _, _, level in points] for name in names},
        "progress through the step (%)",
        "GiB",
        limit=limit,
        caption=f"{caption} Fullest: {moment or 'before the step'}.",
    )


def moments(kind: RankPlan) -> Iterator[tuple[int, str, dict[str, int]]]:
    """Yield the kernels until a moment, its name, and the bytes by kind, of `POINTS` moments."""
    step = kind.step
    start = "pipeline" if any(each.name == "pipeline" for each in step.segments) else "forward"
    starts = [i for i, each in enumerate(step.segments) if each.name == start]
    left_out = range(starts[1], starts[-1]) if len(starts) > 2 else range(0)
    found, kernels = [(0, "", dict[str, int]())], 0
    for i, (segment, level) in enumerate(step.levels(), -1):
        if i not in left_out:
            found.append((kernels, segment.name, {**level, "workspaces": kind.workspaces}))
            kernels += len(segment.kernels)
    size = -(-len(found) // POINTS)
    for first in range(1, len(found), size):
        yield max(found[first : first + size], key=lambda each: sum(each[2].values()))


def time_charts(plan: Plan, found: Json) -> list[Chart]:
    """Draw the parts of a step, the pipeline schedule, and the work of a rank."""
    if plan.time is None:
        return []
    parts = {name: part for name, part in parts_of_step(found["speed"]) if part}
    total = f"{sum(parts.values()):.3g} s"
    bar = stacked_bar("the rank with most to do", parts, total)
    charts = [draw_rows("Parts of a step", [bar])]
    if slots := plan.time.schedule[:ACTIONS]:
        lanes: dict[int, list[BarPart]] = {slot.rank: [] for slot in slots}
        for slot in slots:
            action = slot.action
            label = f"stage {action.stage}, microbatch {action.microbatch}"
            segment = BarPart(ACTION_NAMES[action.kind], slot.start, slot.end, label)
            lanes[slot.rank].append(segment)
        count = len(plan.time.schedule)
        caption = f"The first {ACTIONS:,} of {count:,} actions." if count > ACTIONS else ""
        rows = [ChartRow(f"rank {rank}", lanes[rank]) for rank in sorted(lanes)]
        charts.append(draw_rows("Pipeline schedule", rows, caption, "s"))
    rows = [
        ChartRow(name, [BarPart(name, each.start, each.end, each.name) for each in lane])
        for name, lane in plan.time.lanes.items()
    ]
    caption = "The rank with most to do: its kernels, and its communication by axis."
    return [*charts, draw_rows("Work of a rank", rows, caption, "s")]

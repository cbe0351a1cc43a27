"""A plan as a page: its text, memory over a step, the schedule, and where the time is spent.

The page is one file, which embeds the plan's JSON and Plotly, and loads nothing.
"""

import html
from collections.abc import Iterable, Iterator, Sequence
from string import Template
from typing import Any

from torchtitan.device import GIB
from torchtitan.estimate.plan import Plan, RankPlan
from torchtitan.tools.compare.html_page import page_file, page_with_plots
from torchtitan.tools.compare.plots import GRID, PAPER, Figure, bar, escaped, figure, series
from torchtitan.tools.plan.plan_json import Json
from torchtitan.tools.plan.plan_text import kinds_of_memory, layout, parts_of_step, plan_text

POINTS = 400
"""Points of a curve of memory; each is the fullest of the moments around it."""
BARS = 5000
"""Number of actions of a pipeline that are drawn, the first ones."""
ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
DRAW = """
function draw() {
  for (const [name, figure] of Object.entries(FIGURES)) plot(name, figure, () => true);
}
"""
LEGEND = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"}


def plan_page(plan: Plan, answer: Json) -> str:
    """Render the page of a plan, given its JSON object too."""
    figures, sections = dict[str, Figure](), []
    for name, title, caption, drawn in _plots(plan, answer):
        figures[name] = drawn
        sections.append(
            f'<h2 id="{name}">{html.escape(title)}</h2>\n<figure><div class="plot" '
            f'id="plot-{name}" role="img" aria-label="{html.escape(title)}"></div>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    model = answer["model"]
    title = f"{model['name']} {model['flavor']} on {plan.ranks:,} ranks: {layout(answer)}"
    warnings = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    body = Template(page_file("plan.html", "torchtitan.tools.plan")).substitute(
        title=html.escape(title),
        text=html.escape("\n".join(plan_text(answer))),
        warnings=f"<h2>Not modeled</h2><ul>{warnings}</ul>" if warnings else "",
        sections="\n".join(sections),
    )
    return page_with_plots(
        html.escape(title),
        body,
        figures,
        DRAW,
        data=("plan", answer),
        source="The whole plan is inside this page as JSON.",
    )


def _plots(plan: Plan, answer: Json) -> Iterator[tuple[str, str, str, Figure]]:
    """Yield the name, title, caption and figure of each plot."""
    by_rank = {kind.stage_ranks[0]: kind for kind in plan.kinds}
    passes = answer["batch"]["accumulated"]
    shown = f" Of {passes} accumulated batches, the first and the last." if passes > 2 else ""
    names = kinds_of_memory(answer["memory"]["ranks"])
    for rank in answer["memory"]["ranks"]:
        stage = rank["pipeline_ranks"][0]
        title = "Memory over a step"
        if plan.job.degrees(plan.ranks).pp > 1:
            title += f", pipeline rank {', '.join(map(str, rank['pipeline_ranks']))}"
        caption = "Tensors on the device by kind; the dashed line is the memory of a device."
        drawn = _memory(by_rank[stage], names, plan)
        yield f"memory-{stage}", title, caption + shown, drawn
    if plan.time is None:
        return
    if plan.time.schedule:
        count = len(plan.time.schedule)
        caption = f"The first {BARS:,} of {count:,} actions." if count > BARS else ""
        yield "schedule", "Pipeline schedule", caption, _schedule(plan)
    caption = "The rank with most to do: its kernels, and its communication by axis."
    yield "lanes", "Work of a rank", caption, _lanes(plan)
    yield "time", "Time of a step", "The parts add up to the time of a step.", _time(answer)


def _memory(kind: RankPlan, names: Sequence[str], plan: Plan) -> Figure:
    """Draw the memory of a rank by kind over a step, stacked."""
    points = [*_moments(kind)]
    percent = [100 * at / max(points[-1][0], 1) for at, _, _ in points]
    where = [escaped(name or "before the step") for _, name, _ in points]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escaped(name),
            "meta": {"part": name},
            "x": percent,
            "y": [level.get(name, 0) / GIB for _, _, level in points],
            "text": where,
            "stackgroup": "memory",
            "line": {"color": series(i), "width": 1, "shape": "hv"},
            "hovertemplate": "%{y:.2f} GiB %{text}",
        }
        for i, name in enumerate(names, 1)
    ]
    shapes = []
    if plan.capacity_gib is not None:
        free = plan.capacity_gib - plan.outside_gib
        line = {"color": series(2), "dash": "dash", "width": 2}
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": free, "y1": free}]
        shapes[0]["line"] = line
    return figure(
        data,
        {"title": {"text": "percent of the kernels of a step"}},
        {"title": {"text": "GiB"}, "rangemode": "tozero"},
        height=360,
        showlegend=True,
        legend=LEGEND,
        hovermode="x unified",
        shapes=shapes,
    )


def _moments(kind: RankPlan) -> Iterator[tuple[int, str, dict[str, int]]]:
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


def _schedule(plan: Plan) -> Figure:
    """Draw the actions of all pipeline ranks, a row for each rank."""
    assert plan.time is not None
    slots = plan.time.schedule[:BARS]
    data = []
    for i, (kind, name) in enumerate(ACTIONS.items(), 1):
        of_kind = [slot for slot in slots if slot.action.kind == kind]
        if of_kind:
            intervals = ((slot.start, slot.end, slot.rank) for slot in of_kind)
            words = [f"stage {s.action.stage}, microbatch {s.action.microbatch}" for s in of_kind]
            data.append(_intervals(name, i, intervals, words))
    ranks = sorted({slot.rank for slot in slots})
    return _rows(data, [f"rank {rank}" for rank in ranks])


def _lanes(plan: Plan) -> Figure:
    """Draw the work of a rank, a row for its kernels and for each axis."""
    assert plan.time is not None
    data, lanes = [], plan.time.lanes
    for row, (name, lane) in enumerate(lanes.items()):
        intervals = ((each.start, each.end, row) for each in lane)
        data.append(_intervals(name, row + 1, intervals, [each.name for each in lane]))
    return _rows(data, [*lanes])


def _intervals(
    name: str, color: int, intervals: Iterable[tuple[float, float, int]], words: Sequence[str]
) -> dict[str, Any]:
    """Return bars from starts to ends, in rows."""
    found = [*intervals]
    return bar(name, [end - start for start, end, _ in found], color) | {
        "base": [start for start, _, _ in found],
        "y": [row for _, _, row in found],
        "hovertext": [escaped(each) for each in words],
        "hoverinfo": "text+name",
        "marker": {"color": series(color), "line": {"color": PAPER, "width": 0.5}},
    }


def _rows(data: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    ticks = {"tickvals": [*range(len(names))], "ticktext": [escaped(name) for name in names]}
    return figure(
        data,
        {"title": {"text": "seconds"}, "rangemode": "tozero", "gridcolor": GRID},
        ticks | {"autorange": "reversed"},
        height=110 + 34 * len(names),
        barmode="overlay",
        bargap=0.2,
        hovermode="closest",
        showlegend=True,
        legend=LEGEND,
    )


def _time(answer: Json) -> Figure:
    """Draw the parts of a step as one bar."""
    parts = [(name, part) for name, part in parts_of_step(answer["speed"]) if part]
    return figure(
        [bar(name, [part], i) for i, (name, part) in enumerate(parts, 1)],
        {"title": {"text": "seconds"}, "rangemode": "tozero"},
        {"visible": False},
        height=190,
        barmode="stack",
        hovermode="closest",
        showlegend=True,
        legend=LEGEND,
    )

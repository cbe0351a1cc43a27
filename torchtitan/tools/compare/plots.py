"""The plots of a report, as figures of Plotly.

Every number that is plotted is a number of the report, or a difference of two. Colors are names of
the page's style sheet, which has them for light and for dark; `page/plots.js` looks them up.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.tools.compare.parity import ALONG, relative_differences
from torchtitan.tools.compare.results import Report, Variant

Figure = dict[str, Any]
Marks = dict[str, Any]

# Neither color alone nor form alone tells variants or parts apart.
DASHES = ("solid", "5,3", "2,2", "9,3,2,3", "12,4", "9,3,2,3,2,3")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "cross")
MARKERS = dict(zip(SYMBOLS, "●■◆▲✖▼★✚", strict=True))
"""Markers of Plotly, and letters that look like them."""
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
COLORS = 8
LABEL = 24
"""Maximum number of letters of a name in the label of a row."""
ROW = 62
"""Pixels of a row of bars with its label."""
INK, PAPER, GRID, LINE = (f"var(--{name})" for name in ("ink", "paper", "grid", "line"))


@dataclass(frozen=True)
class Plot:
    """A plot, which curves have for each horizontal axis."""

    caption: str
    """Explanation of the marks."""
    figures: Mapping[str, Figure]


class LineStyle(NamedTuple):
    """Look of the line of a variant; the line of the baseline has the color of text."""

    color: str
    dash: str
    symbol: str
    width: int


def plots(report: Report) -> dict[str, Plot]:
    """The plots that have something to show, by name."""
    found = {}
    for field in ("loss", "grad_norm"):
        shown = [each for each in report.ran if getattr(each, field)]
        if shown:
            found[field] = Plot("", {along: curves(report, shown, field, along) for along in ALONG})
        if len(shown) > 1 and report.baseline in [each.name for each in shown]:
            found[f"{field}-difference"] = Plot(
                "The scale is logarithmic. A level bar is what is allowed, at the step where its "
                "variant is farthest by that measure. Where both are equal to the last bit there "
                "is no point.",
                {along: differences(report, shown, field, along) for along in ALONG},
            )
    is_traced = any(each.exposed_communication is not None for each in report.ran)
    bars = {
        "tps": (
            speed(report),
            "Bar: median of all rounds, with the middle half of the steps; dots: the median of "
            "each run.",
        ),
        "time": (time(report), "The line below a bar is exposed communication." * is_traced),
        "experts": (
            experts(report),
            "Load of each expert relative to the mean of its block, when last measured.",
        ),
        "memory": (memory(report), ""),
        "sent": (sent(report), ""),
    }
    for name, (bar_figure, caption) in bars.items():
        if any(each["x"] for each in bar_figure["data"]):
            found[name] = Plot(caption, {"steps": bar_figure})
    return found


def series(i: int) -> str:
    return f"var(--series-{i % COLORS})"


def styles(report: Report) -> dict[str, LineStyle]:
    """Styles of the variants that ran, by name."""
    others = [each.name for each in report.ran if each.name != report.baseline]
    markers = list(MARKERS)
    found = {
        name: LineStyle(
            series(1 + (i - 1) % (COLORS - 1) if i else 0),
            DASHES[i % len(DASHES)],
            markers[i % len(markers)],
            2 if i else 4,
        )
        for i, name in enumerate([report.baseline, *others])
    }
    return {each.name: found[each.name] for each in report.ran}


def curves(report: Report, shown: Sequence[Variant], field: str, along: str) -> Figure:
    """One value of every variant over steps or units."""
    data = []
    for each in shown:
        curve = getattr(each, field)
        data.append(line(report, each.name, getattr(curve, along), curve.values))
    return over(report, along, data, {"nticks": 6})


def differences(report: Report, shown: Sequence[Variant], field: str, along: str) -> Figure:
    """Curves relative to the baseline's, where both have a value at the same place."""
    base = next(getattr(each, field) for each in shown if each.name == report.baseline)
    data: list[Marks] = []
    for each in shown:
        if each.name == report.baseline:
            continue
        curve = getattr(each, field)
        apart = relative_differences(curve, base, along)
        # A logarithmic axis has no place for 0.
        data.append(line(report, each.name, list(apart), [y or None for y in apart.values()]))
        found = getattr(each.parity, field)
        if found and found.tolerance:
            bar = {"color": styles(report)[each.name].color, "width": 3}
            data.append(
                marks(
                    f"allowed: {escaped(each.name)}",
                    {"tolerance": each.name},
                    [getattr(curve, along)[curve.steps.index(found.step)]],
                    [found.tolerance],
                    {"symbol": "line-ew", "size": 26, "line": bar},
                )
            )
    powers = [math.log10(y) for each in data for y in each["y"] if y]
    axis: dict[str, Any] = {"type": "log", "tickformat": "~e"}
    if powers:
        low, high = math.floor(min(powers)), math.ceil(max(powers) + 0.05)
        axis |= {"range": [low, high], "dtick": math.ceil((high - low) / 7)}
    return over(report, along, data, axis)


def marks(
    name: str,
    meta: Mapping[str, str],
    x: Sequence[Any],
    y: Sequence[Any],
    marker: Mapping[str, Any],
) -> Marks:
    """Marks at some places."""
    where = {"meta": dict(meta), "x": list(x), "y": list(y), "marker": dict(marker)}
    return {"type": "scatter", "mode": "markers", "name": name, **where}


def line(report: Report, name: str, x: Sequence[int], y: Sequence[float | None]) -> Marks:
    color, dash, symbol, width = styles(report)[name]
    marker = {"color": color, "symbol": symbol, "size": 5 + width, "maxdisplayed": 9}
    return marks(escaped(name), {"variant": name}, x, y, marker) | {
        "mode": "lines+markers",
        "connectgaps": False,
        "opacity": 0.6 if width > 2 else 1,
        "line": {"color": color, "width": width, "dash": dash},
        "hoverlabel": {"namelength": 28},
    }


def escaped(text: str) -> str:
    """Escape a name, so that Plotly finds no tags and no templates in it."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def over(report: Report, along: str, data: Sequence[Marks], yaxis: Mapping[str, Any]) -> Figure:
    """A figure with steps or units on the horizontal axis."""
    xaxis = {"title": {"text": "step"}}
    if along == "units":
        xaxis = {"title": {"text": report.unit}, "tickformat": "~s"}  # type: ignore[dict-item]
    return figure(data, xaxis, yaxis, height=320, uirevision=along, showlegend=False)


def figure(
    data: Sequence[Marks], xaxis: Mapping[str, Any], yaxis: Mapping[str, Any], **layout: Any
) -> Figure:
    """A figure in the style of the page."""
    axis = {"gridcolor": GRID, "linecolor": LINE, "zerolinecolor": LINE, "automargin": True}
    layout |= {
        "xaxis": axis | dict(xaxis),
        "yaxis": axis | dict(yaxis),
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": "inherit", "size": 13, "color": INK},
        "margin": {"l": 12, "r": 16, "t": 12, "b": 44},
        "autosize": True,
    }
    return {"data": list(data), "layout": layout}


def rows(variants: Sequence[Variant], data: Sequence[Marks], title: str, **xaxis: Any) -> Figure:
    """Bars in rows, one for each variant, whose name is above the row."""
    place = {"showarrow": False, "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return figure(
        data,
        {"rangemode": "tozero", "nticks": 6, "title": {"text": title}, **xaxis},
        {"range": [len(variants) - 0.5, -0.6], "visible": False, "fixedrange": True},
        height=len(variants) * ROW + (56 if len(data) == 1 else 110),
        barmode="stack",
        bargap=0.58,
        hovermode="closest",
        showlegend=len(data) > 1,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        annotations=[
            {"text": escaped(each.name), "y": i - 0.2, **place} for i, each in enumerate(variants)
        ],
    )


def bar(name: str, x: Sequence[float | None], i: int) -> Marks:
    """Bars in the i-th color and pattern."""
    shape = {"fillmode": "overlay", "fgcolor": PAPER, "size": 7, "solidity": 0.25}
    shape["shape"] = PATTERNS[(i - 1) % len(PATTERNS)]
    return {
        "type": "bar",
        "orientation": "h",
        "name": escaped(name),
        "meta": {"part": name},
        "x": list(x),
        "y": list(range(len(x))),
        "hoverinfo": "x+name",
        "marker": {"color": series(i), "line": {"color": PAPER, "width": 1}, "pattern": shape},
    }


def dots(name: str, places: Sequence[tuple[int, float | None]], color: str, symbol: str) -> Marks:
    """Marks below bars: each the number of its row, and its value."""
    marker = {"color": color, "size": 8, "symbol": symbol, "line": {"color": PAPER, "width": 1}}
    x, y = [value for _, value in places], [row + 0.32 for row, _ in places]
    return marks(name, {"part": name}, x, y, marker) | {"hoverinfo": "x+name"}


def errors(more: Sequence[float], less: Sequence[float | None], **style: Any) -> dict[str, Any]:
    sizes = {"array": list(more), "arrayminus": list(less)}
    return {"type": "data", "symmetric": False, "color": INK, **sizes, **style}


def stacked(values: Sequence[Mapping[str, float]]) -> list[Marks]:
    """A bar for each part, stacked on the others in the row of its variant."""
    parts = dict.fromkeys(part for each in values for part in each)
    return [bar(part, [v.get(part) for v in values], i) for i, part in enumerate(parts, 1)]


def speed(report: Report) -> Figure:
    """Medians of variants, with their quartiles, and of runs."""
    shown = [each for each in report.ran if each.tps]
    spreads = [each.tps for each in report.ran if each.tps]
    whole = bar("median", [tps.median for tps in spreads], 1)
    more = [tps.quartile_3 - tps.median for tps in spreads]
    less = [tps.median - tps.quartile_1 for tps in spreads]
    whole |= {"opacity": 0.75, "error_x": errors(more, less, thickness=2, width=7)}
    runs = [(i, run.tps.median) for i, each in enumerate(shown) for run in each.runs if run.tps]
    data = [whole, dots("median of a run", runs, series(2), "circle")]
    return rows(shown, data, f"{report.unit}/s per device", tickformat="~s", hoverformat=",.5~r")


def time(report: Report) -> Figure:
    """Shares of phases; the line below a bar is exposed communication."""
    shown = [each for each in report.ran if each.time_shares]
    data = stacked([each.time_shares for each in shown])
    exposed = [each.exposed_communication for each in shown]
    if any(value is not None for value in exposed):
        below = dots("exposed communication", list(enumerate(exposed)), INK, "diamond")
        data.append(below | {"error_x": errors([0.0] * len(shown), exposed, thickness=3, width=0)})
    axis = {"tickformat": ".0%", "hoverformat": ".1%", "range": [0, 1.002]}
    return rows(shown, data, "share of time", **axis)


def experts(report: Report) -> Figure:
    """A row for each block of each variant, with the load of each expert in color."""
    found = [
        (each.name, block, shares)
        for each in report.ran
        for block, shares in each.expert_loads.items()
    ]
    data: list[Marks] = [
        {
            "type": "heatmap",
            "name": escaped(name),
            "meta": {"variant": name},
            "x": list(range(len(shares))),
            "y": [row],  # categories would have to be those of all traces
            "z": [[share * len(shares) for share in shares]],
            "coloraxis": "coloraxis",
            "hovertemplate": "expert %{x}: %{z:.2f}",
        }
        for row, (name, _, shares) in enumerate(found)
    ]
    labels = [f"{escaped(name[:LABEL])}: {block}" for name, block, _ in found]
    yaxis = {"tickvals": list(range(len(found))), "ticktext": labels, "autorange": "reversed"}
    scale = {"colorscale": [[0, PAPER], [1, series(1)]], "cmin": 0, "cmax": 2}
    return figure(
        data,
        {"title": {"text": "expert"}, "tickformat": "d"},
        yaxis,
        height=len(data) * 18 + 80,
        coloraxis=scale,
    )


def memory(report: Report) -> Figure:
    """Peak memory."""
    shown = [each for each in report.ran if each.memory_gib is not None]
    peak = bar("peak", [each.memory_gib for each in shown], 1)
    return rows(shown, [peak], "GiB", hoverformat=".4~r")


def sent(report: Report) -> Figure:
    """Bytes sent, by axis."""
    shown = [each for each in report.ran if each.sent_bytes]
    data = stacked([each.sent_bytes for each in shown])
    return rows(shown, data, "bytes a step", tickformat="~s", hoverformat=".4~s", ticksuffix="B")

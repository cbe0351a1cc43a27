"""The plots of a report, as figures of Plotly.

Every number that is plotted is a number of the report; only the difference from the baseline is
computed here. Colours are names of the page's style sheet, which has them for light and for dark;
`page/plots.js` looks them up.
"""

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.tools.compare.report import Curve, Report, Variant
from torchtitan.tools.compare.words import MISSING, digits, median, share

Field = Literal["loss", "grad_norm"]
Trace = dict[str, Any]
ALONG = ("steps", "units")
EXPOSED = "exposed communication"

# Neither colour alone nor form alone tells variants or parts apart.
DASHES = ("solid", "5,3", "2,2", "9,3,2,3", "12,4", "9,3,2,3,2,3")
MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "pentagon"]
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
COLORS = 8
ROW = 62
"""Pixels of a row of bars with its label."""

INK, PAPER, GRID, LINE = (f"var(--{name})" for name in ("ink", "paper", "grid", "line"))


@dataclass(frozen=True)
class Style:
    """Look of the line of a variant; the line of the baseline has the colour of text."""

    color: str
    dash: str
    symbol: str
    is_baseline: bool


def series(i: int) -> str:
    return f"var(--series-{i % COLORS})"


def styles(report: Report) -> dict[str, Style]:
    """Styles of the variants that ran, by name."""
    others = [each.name for each in report.ran if each.name != report.baseline]
    found = {}
    for i, name in enumerate([report.baseline, *others]):
        color = series(0 if i == 0 else 1 + (i - 1) % (COLORS - 1))
        found[name] = Style(color, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)], i == 0)
    return {each.name: found[each.name] for each in report.ran}


def curves(report: Report, field: Field, along: str) -> Any:
    """One value of every variant over steps or units."""
    data = [
        line(report, each.name, getattr(curve, along), curve.values)
        for each in report.ran
        if (curve := getattr(each, field))
    ]
    return over(report, along, data, {"nticks": 6})


def differences(report: Report, field: Field, along: str) -> Any:
    """Curves relative to the baseline's, where both have a value at the same place."""
    by_name: dict[str, Curve] = {
        each.name: curve for each in report.ran if (curve := getattr(each, field))
    }
    base = by_name[report.baseline]
    at = dict(zip(getattr(base, along), base.values, strict=True))
    data, equal, apart = [], [], []
    for each in report.ran:
        if each.name not in by_name or each.name == report.baseline:
            continue
        curve = by_name[each.name]
        places = getattr(curve, along)
        shared = [
            (x, abs(value - other) / abs(other))
            for x, value in zip(places, curve.values, strict=True)
            if value is not None and (other := at.get(x))
        ]
        if not shared:
            apart.append(each.name)
        elif not any(value for _, value in shared):
            equal.append(each.name)
        # A logarithmic axis has no place for 0.
        y = [value or None for _, value in shared]
        data.append(line(report, each.name, [x for x, _ in shared], y))
        found = getattr(each.parity, field)
        if found and found.tolerance:
            place = places[curve.steps.index(found.step)]
            data.append(tolerance(report, each.name, place, found.tolerance))
    unit = report.unit if along == "units" else along
    note = (
        listed("Equal to the last bit throughout", equal),
        listed(f"Never at the same number of {unit} as the baseline", apart),
    )
    axis = {"type": "log", "tickformat": "~e"} | decades([y for each in data for y in each["y"]])
    return over(report, along, data, axis, note=" ".join(filter(None, note)))


def listed(words: str, names: Sequence[str]) -> str:
    return f"{words}: {', '.join(names)}." if names else ""


def decades(values: Sequence[float | None]) -> dict[str, Any]:
    """Range and ticks of a logarithmic axis: whole powers of ten."""
    powers = [math.log10(value) for value in values if value]
    if not powers:
        return {}
    low, high = math.floor(min(powers)), math.ceil(max(powers) + 0.05)
    return {"range": [low, high], "dtick": math.ceil((high - low) / 7)}


def points(
    name: str,
    meta: Mapping[str, str],
    x: Sequence[float | None],
    y: Sequence[float | None],
    marker: Mapping[str, Any],
    **more: Any,
) -> Trace:
    """Marks at some places."""
    where = {"meta": dict(meta), "x": list(x), "y": list(y), "marker": marker}
    return {"type": "scatter", "mode": "markers", "name": name, **where, **more}


def line(report: Report, name: str, x: Sequence[int], y: Sequence[float | None]) -> Trace:
    style = styles(report)[name]
    wide = style.is_baseline
    marker = {"color": style.color, "symbol": style.symbol, "size": 9 if wide else 7}
    return points(
        *(escaped(name), {"variant": name}, x, y, marker | {"maxdisplayed": 9}),
        mode="lines+markers",
        connectgaps=False,
        opacity=0.6 if wide else 1,
        line={"color": style.color, "width": 4 if wide else 2, "dash": style.dash},
        hoverlabel={"namelength": 28},
    )


def tolerance(report: Report, name: str, x: int, y: float) -> Trace:
    bar = {"color": styles(report)[name].color, "width": 3}
    marker = {"symbol": "line-ew", "size": 26, "line": bar}
    return points(f"allowed: {escaped(name)}", {"tolerance": name}, [x], [y], marker)


def escaped(text: str) -> str:
    """Escape a name, so that Plotly finds no tags and no templates in it."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def over(
    report: Report, along: str, data: Sequence[Trace], yaxis: Mapping[str, Any], note: str = ""
) -> Any:
    """A figure with steps or units on the horizontal axis."""
    is_step = along == "steps"
    xaxis: dict[str, Any] = {"title": {"text": "step" if is_step else report.unit}}
    xaxis |= {} if is_step else {"tickformat": "~s"}
    more = {"height": 320, "uirevision": along, "meta": {"note": note}}
    return figure(data, more, xaxis, yaxis)


def figure(
    data: Sequence[Trace],
    layout: Mapping[str, Any],
    xaxis: Mapping[str, Any],
    yaxis: Mapping[str, Any],
) -> Any:
    """A figure in the style of the page; Plotly checks every key of it."""
    from plotly.graph_objects import Figure

    axis = {"gridcolor": GRID, "linecolor": LINE, "zerolinecolor": LINE, "automargin": True}
    return Figure(
        data,
        {
            **layout,
            "xaxis": axis | dict(xaxis),
            "yaxis": axis | dict(yaxis),
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "showlegend": False,
            "font": {"family": "inherit", "size": 13, "color": INK},
            "margin": {"l": 12, "r": 16, "t": 12, "b": 44},
            "autosize": True,
            "template": "none",
        },
    )


def bars(
    variants: Sequence[Variant],
    data: Sequence[Trace],
    xaxis: Mapping[str, Any],
    value: Callable[[Variant], str] = lambda variant: "",
) -> Any:
    """Bars in rows, one for each variant; its name and a value are above the row."""
    place = {"showarrow": False, "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom"}
    # The name is set apart, so that one written from right to left does not turn the number round;
    # the page cuts it where there is no room for it.
    labels = [
        {"text": f"\u2068{each.name}\u2069{value(each)}", "y": i - 0.2, **place}
        for i, each in enumerate(variants)
    ]
    layout = {
        "height": len(variants) * ROW + 56,
        "barmode": "stack",
        "bargap": 0.58,
        "hovermode": "closest",
        "annotations": labels,
    }
    rows = {"range": [len(variants) - 0.5, -0.6], "visible": False, "fixedrange": True}
    return figure(data, layout, {"rangemode": "tozero", "nticks": 6} | dict(xaxis), rows)


def bar(name: str, x: Sequence[float | None], color: str, pattern: str = "") -> Trace:
    shape = {"shape": pattern, "fillmode": "overlay", "fgcolor": PAPER, "size": 7, "solidity": 0.25}
    return {
        "type": "bar",
        "orientation": "h",
        "name": escaped(name),
        "meta": {"part": name},
        "x": list(x),
        "y": list(range(len(x))),
        "hoverinfo": "x+name",
        "marker": {"color": color, "line": {"color": PAPER, "width": 1}, "pattern": shape},
    }


def dots(name: str, x: Sequence[float | None], y: Sequence[float], color: str, form: str) -> Trace:
    """Marks below bars."""
    marker = {"color": color, "size": 8, "symbol": form, "line": {"color": PAPER, "width": 1}}
    return points(name, {"part": name}, x, y, marker, hoverinfo="x+name")


def errors(more: Sequence[float], less: Sequence[float | None], **style: Any) -> dict[str, Any]:
    sizes = {"array": list(more), "arrayminus": list(less)}
    return {"type": "data", "symmetric": False, "color": INK, **sizes, **style}


def speed(report: Report) -> Any:
    """Medians of variants, with their quartiles, and of runs."""
    shown = [(each, each.tps) for each in report.ran if each.tps]
    more = [tps.quartile_3 - tps.median for _, tps in shown]
    less = [tps.median - tps.quartile_1 for _, tps in shown]
    whole = bar("median", [tps.median for _, tps in shown], series(1))
    whole |= {"opacity": 0.75, "error_x": errors(more, less, thickness=2, width=7)}
    runs = [
        (run.tps.median, i + 0.32)
        for i, (each, _) in enumerate(shown)
        for run in each.runs
        if run.tps
    ]
    marks = dots("median of a run", [x for x, _ in runs], [y for _, y in runs], series(2), "circle")
    title = {"title": {"text": f"{report.unit}/s per device"}}
    axis = {"tickformat": "~s", "hoverformat": ",.5~r"} | title
    variants = [each for each, _ in shown]
    return bars(variants, [whole, marks], axis, lambda v: f" · {median(v.tps)} {v.unit}/s")


def stacked(values: Sequence[Mapping[str, float]]) -> list[Trace]:
    """A bar for each part, stacked on the others in the row of its variant."""
    parts = dict.fromkeys(part for each in values for part in each)
    forms = zip(parts, itertools.count(1), itertools.cycle(PATTERNS), strict=False)
    return [bar(p, [v.get(p) for v in values], series(i), pattern) for p, i, pattern in forms]


def time(report: Report) -> Any:
    """Shares of phases; the line below a bar is exposed communication."""
    shown = [each for each in report.ran if each.time_shares]
    data = stacked([each.time_shares for each in shown])
    exposed = [each.exposed_communication for each in shown]
    if any(value is not None for value in exposed):
        rows = [i + 0.32 for i in range(len(shown))]
        marks = dots(EXPOSED, exposed, rows, INK, "diamond")
        marks["error_x"] = errors([0.0] * len(shown), exposed, thickness=3, width=0)
        data.append(marks)

    def value(each: Variant) -> str:
        text = share(each.exposed_communication)
        return "" if text == MISSING else f" · {text} exposed"

    axis = {"tickformat": ".0%", "hoverformat": ".1%", "range": [0, 1.002]}
    return bars(shown, data, axis | {"title": {"text": "share of time"}}, value)


def memory(report: Report) -> Any:
    """Peak memory."""
    shown = [each for each in report.ran if each.memory_gib is not None]
    peak = bar("peak", [each.memory_gib for each in shown], series(1))
    axis = {"hoverformat": ".4~r", "title": {"text": "GiB"}}
    return bars(shown, [peak], axis, lambda each: f" · {digits(each.memory_gib, 'GiB')}")


def sent(report: Report) -> Any:
    """Bytes sent, by axis."""
    shown = [each for each in report.ran if each.sent_bytes]
    axis = {"tickformat": "~s", "hoverformat": ".4~s", "ticksuffix": "B"}
    title = {"title": {"text": "bytes a step"}}
    return bars(shown, stacked([each.sent_bytes for each in shown]), axis | title)

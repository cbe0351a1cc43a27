"""The plots of a report, as figures of Plotly.

Every number that is plotted is a number of the report; only the difference from the baseline is
computed here. Colours are names of the page's style sheet, which has them for light and for dark;
`page/plots.js` looks them up.
"""

import html
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
MARKERS = (
    *("circle", "square", "diamond", "triangle-up"),
    *("x", "triangle-down", "star", "pentagon"),
)
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
COLORS = 8
ROW = 62
"""Pixels of a row of bars with its label."""

INK, PAPER, GRID, LINE = (f"var(--{name})" for name in ("ink", "paper", "grid", "line"))


@dataclass(frozen=True)
class Style:
    """How the line of a variant looks: that of the baseline has the colour of text."""

    color: str
    dash: str
    symbol: str
    is_baseline: bool


def series(i: int) -> str:
    return f"var(--series-{i % COLORS})"


def styles(report: Report) -> dict[str, Style]:
    """By name, of the variants that ran."""
    others = [each.name for each in report.ran if each.name != report.baseline]
    found = {}
    for i, name in enumerate([report.baseline, *others]):
        color = series(0 if i == 0 else 1 + (i - 1) % (COLORS - 1))
        style = Style(color, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)], i == 0)
        found[name] = style
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
    note = (
        listed("Equal to the last bit throughout", equal),
        listed(f"Never at the same number of {called(report, along)} as the baseline", apart),
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


def line(report: Report, name: str, x: Sequence[int], y: Sequence[float | None]) -> Trace:
    style = styles(report)[name]
    wide = style.is_baseline
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escaped(name),
        "meta": {"variant": name},
        "x": list(x),
        "y": list(y),
        "connectgaps": False,
        "opacity": 0.6 if wide else 1,
        "line": {"color": style.color, "width": 4 if wide else 2, "dash": style.dash},
        "marker": {
            "color": style.color,
            "symbol": style.symbol,
            "size": 9 if wide else 7,
            "maxdisplayed": 9,
        },
        "hoverlabel": {"namelength": 28},
    }


def tolerance(report: Report, name: str, x: int, y: float) -> Trace:
    color = styles(report)[name].color
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"allowed: {escaped(name)}",
        "meta": {"tolerance": name},
        "x": [x],
        "y": [y],
        "marker": {"symbol": "line-ew", "size": 26, "line": {"color": color, "width": 3}},
    }


def escaped(text: str) -> str:
    """A name in which Plotly finds no tags and no templates."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def called(report: Report, along: str) -> str:
    """What a person calls it: units are tokens, say."""
    return report.unit if along == "units" else along


def over(
    report: Report, along: str, data: Sequence[Trace], yaxis: Mapping[str, Any], note: str = ""
) -> Any:
    """A figure over the run."""
    xaxis = {"title": {"text": "step" if along == "steps" else called(report, along)}}
    if along == "units":
        xaxis["tickformat"] = "~s"  # type: ignore[assignment]
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
    """Bars in rows, a variant each; its name and a value stand above it."""
    labels = [
        {
            # Set apart, so that a name written from right to left does not turn the number round;
            # the page cuts the name where there is no room for it.
            "text": f"\u2068{each.name}\u2069{value(each)}",
            "showarrow": False,
        }
        | {"x": 0, "xref": "paper", "xanchor": "left", "y": i - 0.2, "yanchor": "bottom"}
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
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": {"part": name},
        "hoverinfo": "x+name",
        "x": list(x),
        "y": list(y),
        "marker": {"color": color, "size": 8, "symbol": form, "line": {"color": PAPER, "width": 1}},
    }


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
    axis = {
        "tickformat": "~s",
        "hoverformat": ",.5~r",
        "title": {"text": f"{report.unit}/s per device"},
    }
    variants = [each for each, _ in shown]
    return bars(
        variants,
        [whole, marks],
        axis,
        lambda each: f" · {median(each.tps)} {each.unit}/s",
    )


def stacked(variants: Sequence[Variant], field: str) -> list[Trace]:
    parts = dict.fromkeys(part for each in variants for part in getattr(each, field))
    return [
        bar(
            part,
            [getattr(each, field).get(part) for each in variants],
            series(i + 1),
            PATTERNS[i % len(PATTERNS)],
        )
        for i, part in enumerate(parts)
    ]


def time(report: Report) -> Any:
    """Shares of phases; the line below a bar is exposed communication."""
    shown = [each for each in report.ran if each.time_shares]
    data = stacked(shown, "time_shares")
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
    """Peaks."""
    shown = [each for each in report.ran if each.memory_gib is not None]
    peak = bar("peak", [each.memory_gib for each in shown], series(1))
    axis = {"hoverformat": ".4~r", "title": {"text": "GiB"}}
    return bars(shown, [peak], axis, lambda each: f" · {digits(each.memory_gib, 'GiB')}")


def sent(report: Report) -> Any:
    """Bytes by axis."""
    shown = [each for each in report.ran if each.sent_bytes]
    axis = {"tickformat": "~s", "hoverformat": ".4~s", "ticksuffix": "B"}
    title = {"title": {"text": "bytes a step"}}
    return bars(shown, stacked(shown, "sent_bytes"), axis | title)

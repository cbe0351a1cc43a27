"""Pages of one file, and the same as Markdown: a sentence, a chart, then tables and charts.

A page needs no network: its content security policy forbids the browser to load anything, and
nothing on it is a script. It is light or dark as the reader's system is.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

COLORS = 12
"""Number of colors of the style sheet, besides that of text, which is color 0."""
DASHES = 4
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 704, 26, 252
"""Edges of the area of curves, in which the pixels of `WIDTH` and `HEIGHT` are counted."""
FAR = 8
"""A limit this many times the highest level would leave no room for the levels."""
TICKS = 5
"""Approximate number of ticks of an axis."""


@dataclass(frozen=True)
class Chart:
    """A chart as HTML, with a title and an explanation."""

    title: str
    drawing: str
    caption: str = ""

    def html(self) -> str:
        """Return the chart as a figure of a page."""
        words = f"<strong>{escape(self.title)}</strong> {escape(self.caption)}"
        return f"<figure><figcaption>{words.strip()}</figcaption>{self.drawing}</figure>\n"


class BarPart(NamedTuple):
    """A part of a row, from `start` to `end`; its label is shown under the pointer."""

    part: str
    start: float
    end: float
    label: str


class ChartRow(NamedTuple):
    """A row of segments: a bar, or what happens over time; `value` is written at its end."""

    name: str
    segments: Sequence[BarPart]
    value: str = ""


class Line(NamedTuple):
    """Values by place; None is a gap. `color` 0 is that of text."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int


class Axis(NamedTuple):
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def stacked_bar(name: str, parts: Mapping[str, float], value: str) -> ChartRow:
    """Return a bar of parts, one after the other."""
    segments, end = [], 0.0
    for part, size in parts.items():
        segments.append(BarPart(part, end, end + size, f"{part}: {size:.4g}"))
        end += size
    return ChartRow(name, segments, value)


def draw_rows(title: str, rows: Sequence[ChartRow], caption: str = "", unit: str = "") -> Chart:
    """Draw rows below each other, from 0 to the largest end, which is written with its unit."""
    parts = list(dict.fromkeys(each.part for row in rows for each in row.segments))
    colors = {part: 1 + i % COLORS for i, part in enumerate(parts)}
    end = max((each.end for row in rows for each in row.segments), default=0.0) or 1.0
    drawn = "".join(_row(row, colors, end) for row in rows)
    scale = f'<p class="scale"><span>0</span><span>{end:.4g} {escape(unit)}</span></p>'
    legend = _legend((f"c{color}", part) for part, color in colors.items())
    rows_html = f'<ul class="rows">{drawn}</ul>{scale if unit else ""}'
    return Chart(title, (legend if len(parts) > 1 else "") + rows_html, caption)


def _row(row: ChartRow, colors: Mapping[str, int], end: float) -> str:
    boxes = "".join(
        f'<rect class="c{colors[each.part]}" x="{1000 * each.start / end:.2f}" '
        f'width="{1000 * (each.end - each.start) / end:.2f}" height="10">'
        f"<title>{escape(each.label)}</title></rect>"
        for each in row.segments
    )
    box = '<svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
    words = f"<span>{escape(row.name)}</span> <span>{escape(row.value)}</span>"
    return f"<li>{words}{box}{boxes}</svg></li>"


def side_by_side(title: str, charts: Iterable[Chart], caption: str = "") -> Chart:
    """Return charts as one, next to each other where there is room."""
    panels = "".join(f"<div>{chart.html()}</div>" for chart in charts)
    return Chart(title, f'<div class="panels">{panels}</div>', caption)


def draw_curves(title: str, curves: Sequence[Line], x_title: str, caption: str = "") -> Chart:
    """Draw curves over whole numbers, such as steps."""
    places = [x for curve in curves for x in curve.x]
    x = Axis(min(places), max(max(places), min(places) + 1), LEFT, RIGHT)
    y = vertical_axis([y for curve in curves for y in curve.y if y is not None] or [0.0])
    drawn = _frame(x, y, x_title, "", is_whole=True)
    for curve in curves:
        path, is_down = "", False
        for at, value in zip(curve.x, curve.y, strict=True):
            if value is not None:
                # A point alone is a dot.
                path += f"{'L' if is_down else 'M'}{x.place(at):.1f} {y.place(value):.1f}h0"
            is_down = value is not None
        style = f'class="line {_style(curve.color)}"'
        drawn += f'<path d="{path}" {style}><title>{escape(curve.name)}</title></path>'
    legend = _legend((_style(curve.color), curve.name) for curve in curves)
    return Chart(title, legend + _picture(title, drawn), caption)


def draw_areas(
    title: str,
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    x_title: str,
    y_title: str,
    *,
    limit: tuple[float, str] | None = None,
    caption: str = "",
) -> Chart:
    """Draw layers on top of each other, each level from its place to the next.

    Args:
        limit: value and label of a level line; of one that would dwarf the layers, only the label.
    """
    totals = [*accumulate(layers.values(), lambda below, level: [*map(add, below, level)])]
    highest = max((max(total) for total in totals), default=1.0)
    across = Axis(x[0], max(x[-1], x[0] + 1), LEFT, RIGHT)
    is_near = limit is not None and limit[0] < FAR * highest
    up = vertical_axis([0.0, highest, limit[0] if limit and is_near else 0.0])
    drawn = _frame(across, up, x_title, y_title)
    # Each covers all below it, so the highest is drawn first.
    for i, (name, total) in reversed([*enumerate(zip(layers, totals, strict=True), 1)]):
        path = f"M{across.start:.1f} {up.start:.1f}"
        for at, value in zip(x, total, strict=True):
            path += f"H{across.place(at):.1f}V{up.place(value):.1f}"
        label = f"{name}: at most {max(layers[name]):.3g} {y_title}"
        path += f"H{across.end:.1f}V{up.start:.1f}Z"
        style = f'class="area c{1 + (i - 1) % COLORS}"'
        drawn += f'<path d="{path}" {style}><title>{escape(label)}</title></path>'
    if limit:
        at_limit = up.place(limit[0]) if is_near else TOP
        drawn += f'<path d="M{LEFT} {at_limit:.1f}H{RIGHT}" class="limit"/>' * is_near
        drawn += _text(RIGHT, at_limit - 6, limit[1] + ", above this scale" * (not is_near), "end")
    legend = _legend((f"c{1 + i % COLORS}", name) for i, name in enumerate(layers))
    return Chart(title, legend + _picture(title, drawn), caption)


def ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Return round places from `low` to `high`: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    apart = max(apart, 1.0) if is_whole else apart
    first = math.ceil(low / apart - 1e-9)
    return [round(i * apart, 12) for i in range(first, math.floor(high / apart + 1e-9) + 1)]


def vertical_axis(values: Sequence[float], start: float = BOTTOM, end: float = TOP) -> Axis:
    """Return an axis that contains all values and ends on ticks."""
    low, high = min(values), max(values)
    high = max(high, low + 1e-3 * abs(high), low + 1e-9)
    for _ in range(3):  # the ticks of a longer axis may be further apart
        first, second, *_ = ticks(low, high)
        apart = round(second - first, 12)
        low = apart * math.floor(round(low / apart, 6))
        high = apart * math.ceil(round(high / apart, 6))
    return Axis(low, high, start, end)


def _frame(x: Axis, y: Axis, x_title: str, y_title: str, *, is_whole: bool = False) -> str:
    """Return grid, ticks and titles of two axes."""
    drawn = _text((LEFT + RIGHT) / 2, BOTTOM + 38, x_title, "middle")
    drawn += _text(LEFT - 8, 12, y_title, "end")
    for level in ticks(y.low, y.high):
        at = y.place(level)
        drawn += f'<path d="M{LEFT} {at:.1f}H{RIGHT}" class="grid"/>'
        drawn += _text(LEFT - 8, at + 4, f"{level:,.6g}", "end")
    for place in ticks(x.low, x.high, is_whole=is_whole):
        drawn += _text(x.place(place), BOTTOM + 18, f"{place:,.10g}", "middle")
    return drawn


def _picture(title: str, content: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return f'<svg class="plot" {box}>{content}</svg>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _style(color: int) -> str:
    """Return the classes of a curve: neither color alone nor dashes alone tell curves apart."""
    return f"c{color and 1 + (color - 1) % COLORS} d{color % DASHES}"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the names of parts or curves, each with a sample of its style."""
    sample = (
        '<svg viewBox="0 0 28 12" aria-hidden="true"><path d="M0 6h28" class="sample {}"/></svg>'
    )
    items = "".join(f"<li>{sample.format(style)}{escape(name)}</li>" for style, name in entries)
    return f'<ul class="legend">{items}</ul>'


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="answer">{answer}</p>
{content}</main>
<footer><p>The numbers of the tables are in the JSON inside this page.</p></footer>
<script type="application/json" id="{name}">{data}</script>
</body>
</html>
"""


class Code(str):
    """Text that is code: of a cell, or a block of lines."""


@dataclass(frozen=True)
class Table:
    """A table, of which a cell may have several texts; it is left out if it has no rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Sequence[str]]]
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def html(self) -> str:
        """Return the table; on a narrow screen each cell has the name of its column."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        body = ""
        for first, *rest in self.rows:
            cells = "".join(
                f'<td data-column="{escape(column)}">{_html_cell(cell)}</td>'
                for column, cell in zip(self.columns[1:], rest, strict=True)
            )
            body += f'<tr><th scope="row">{_html_cell(first)}</th>{cells}</tr>\n'
        text = f"<p>{escape(self.text)}</p>\n" if self.text else ""
        table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"
        return f"<h3>{escape(self.title)}</h3>\n{text}{table}"

    def markdown(self) -> str:
        """Return heading, text and table."""
        lines = [[_markdown_cell(cell) for cell in row] for row in (self.columns, *self.rows)]
        lines.insert(1, ["---"] * len(self.columns))
        written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(filter(None, (f"### {plain(self.title)}", plain(self.text), written)))


Block = str | Sequence[str] | Table | Chart | None
"""A part of a section: a paragraph, a block of code, a list of sentences, a table or a chart."""


@dataclass(frozen=True)
class Page:
    """The contents of a page."""

    title: str
    answer: str
    """Sentence that says what came out."""
    chart: Chart | None
    """Picture of the answer."""
    sections: Mapping[str, Sequence[Block]]
    """Parts by heading; a section that has nothing to show is left out."""
    name: str
    data: Any
    """Name and values of the JSON inside the page."""

    def html(self) -> str:
        """Render the page."""
        content = self.chart.html() if self.chart else ""
        for title, parts in self.sections.items():
            if any(parts):
                written = "".join(_html_part(part) for part in parts if part)
                content += f"<h2>{escape(title)}</h2>\n{written}"
        data = json.dumps(self.data, allow_nan=False, separators=(",", ":"))
        return DOCUMENT.format(
            policy=POLICY,
            title=escape(self.title),
            style=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
            answer=escape(self.answer),
            content=content,
            name=self.name,
            data=data.replace("<", "\\u003c"),
        )

    def markdown(self) -> str:
        """Write the same without charts, whose numbers are in the tables."""
        blocks = [f"# {plain(self.title)}", plain(self.answer)]
        for title, parts in self.sections.items():
            written = [_markdown_part(part) for part in parts if part]
            blocks += [f"## {title}", *written] if any(written) else []
        return "\n\n".join(filter(None, blocks)) + "\n"


def _html_part(part: str | Sequence[str] | Table | Chart) -> str:
    if isinstance(part, Table | Chart):
        return part.html()
    if isinstance(part, Code):
        return f'<pre tabindex="0">{escape(part)}</pre>\n'
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in part)}</ul>\n"


def _markdown_part(part: str | Sequence[str] | Table | Chart) -> str:
    if isinstance(part, Chart):
        return ""
    if isinstance(part, Table):
        return part.markdown()
    if isinstance(part, Code):
        return f"```text\n{part}\n```"
    return plain(part) if isinstance(part, str) else "\n".join(f"- {plain(line)}" for line in part)


def plain(text: str) -> str:
    """Write text so that Markdown shows it as it is, on one line."""
    marks = r"[\\`*\[\]<|~]|\b_|_\b|&(?=#?\w+;)|^[#>]|#$"
    return re.sub(marks, r"\\\g<0>", " ".join(text.split()))


def _markdown_cell(cell: str | Sequence[str]) -> str:
    if isinstance(cell, Code):
        return "`" + " ".join(cell.split()).replace("`", "'").replace("|", "\\|") + "`"
    return plain(cell) if isinstance(cell, str) else "; ".join(map(_markdown_cell, cell))


def _html_cell(cell: str | Sequence[str]) -> str:
    if isinstance(cell, Code):
        return f"<code>{escape(cell)}</code>"
    return escape(cell) if isinstance(cell, str) else "<br>".join(map(_html_cell, cell))

"""Pages of one file, and the same as Markdown: a sentence, a chart, then tables and charts.

A page needs no network: its content security policy forbids the browser to load anything, and
nothing on it is a script. It is light or dark as the reader's system is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from torchtitan.tools.charts import Chart

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
<footer><p>Every number is in the JSON inside this page.</p></footer>
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

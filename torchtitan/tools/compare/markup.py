"""Pieces of HTML. What these functions are given is HTML already; `text` makes it of anything."""

import html
import json
import re
from collections.abc import Iterable, Sequence

BREAK = r"<wbr>\1"


def text(value: object) -> str:
    """A value as it is to be read, whatever characters it has."""
    return html.escape(value if isinstance(value, str) else json.dumps(value, default=str))


def dotted(key: str) -> str:
    """A dotted key that may be broken between its words."""
    return f"<code>{re.sub('([._])', BREAK, text(key))}</code>"


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, cards: bool = False
) -> str:
    """Rows that begin with their heading.

    A wide table scrolls in its own frame, which the keyboard can reach; as cards, on a narrow
    screen, each row is a block of its own, with its columns named (the roles are spelled out,
    because a table that is displayed as blocks loses them).
    """
    heads = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in columns)
    lines = []
    for first, *cells in rows:
        line = f'<th scope="row" role="rowheader">{first}</th>'
        for name, cell in zip(columns[1:], cells, strict=True):
            line += f'<td role="cell" data-column="{name}">{cell}</td>'
        lines.append(f'<tr role="row">{line}</tr>')
    kind = "cards" if cards else "plain"
    return (
        f'<div class="frame {kind}" role="region" aria-label="{caption}" tabindex="0">'
        f'<table role="table"><caption>{caption}</caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(lines)}</tbody></table></div>'
    )


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    return "".join(
        f'<p class="{style}">{line}</p>' if style else f"<p>{line}</p>" for line in lines
    )


def bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def section(name: str, title: str, body: str) -> str:
    """A part of the page, or nothing if it has no content."""
    if not body:
        return ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{body}</section>\n'


def figure(name: str, title: str, says: str, caption: str, numbers: str) -> str:
    """A place where plots.js draws, with what it shows in words and in numbers."""
    return (
        f'<figure id="figure-{name}"><figcaption><h3>{title}</h3><p>{caption}</p></figcaption>'
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{says}"></div>'
        f"{folded('Numbers of this plot', numbers)}</figure>"
    )

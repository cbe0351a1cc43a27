"""Renders a report as a page: its Markdown, with the plots at their places.

The page is one file, which embeds `report.json` and Plotly. Its content security policy forbids the
browser to load anything.
"""

import dataclasses
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from torchtitan.tools.compare.markdown import markdown
from torchtitan.tools.compare.plots import MARKERS, LineStyle, plots, styles
from torchtitan.tools.compare.results import Report
from torchtitan.tools.compare.study import slug


def html_page(report: Report) -> str:
    """Render the page."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    for rule in (heading_open, html_block, html_inline, table_open, table_close, tr_open):
        parser.add_render_rule(rule.__name__, rule)
    text, found = markdown(report, for_page=True), plots(report)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    body = Template(page_file("report.html")).substitute(
        sections="".join(f'<li><a href="#{slug(title)}">{title}</a></li>' for title in headings),
        text=parser.render(text, {"plots": found}),
        unit=html.escape(report.unit),
        variants="".join(choice(name, style) for name, style in styles(report).items()),
    )
    return page_with_plots(
        html.escape(report.title),
        body,
        {name: plot.figures for name, plot in found.items()},
        page_file("plots.js"),
        data=("report", dataclasses.asdict(report)),
        source="Every number on this page is from <code>report.json</code>, which is inside it.",
    )


def page_with_plots(
    title: str,
    body: str,
    figures: Mapping[str, Any],
    draw: str,
    *,
    data: tuple[str, Any],
    source: str,
) -> str:
    """Return a page of one file that draws figures.

    Args:
        draw: script with a function `draw`, which calls `plot` for each of `FIGURES`.
        data: name and content of the JSON inside the page.
        source: sentence about it.
    """
    from plotly.offline import get_plotlyjs

    name, content = data
    return Template(page_file("page.html")).substitute(
        title=title,
        style=page_file("page.css"),
        body=body,
        source=source,
        name=name,
        data=script(content),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        figures=script(figures),
        script=page_file("figures.js") + draw,
    )


def page_file(name: str, package: str = "torchtitan.tools.compare") -> str:
    """Return a file of the pages of a package."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def script(value: Any) -> str:
    """Write JSON that can be inside a script."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c")


def choice(name: str, style: LineStyle) -> str:
    """A box to hide a variant, with its line."""
    dash = "" if style.dash == "solid" else f' stroke-dasharray="{style.dash}"'
    line = f'<path d="M0 8H36" stroke="{style.color}" stroke-width="{style.width}"{dash}/>'
    marker = f'<text x="18" y="12.5" fill="{style.color}">{MARKERS[style.symbol]}</text>'
    swatch = f'<svg viewBox="0 0 36 16" aria-hidden="true">{line}{marker}</svg>'
    value = html.escape(name)
    return (
        f'<label><input type="checkbox" name="shown" value="{value}" checked>{swatch}'
        f"<span>{value}</span></label>\n"
    )


# Rules of the renderer: tables are in frames that scroll, and their rows have headings.


def heading_open(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    env["title"] = tokens[i + 1].children[0].content
    return f'<{tokens[i].tag} id="{slug(env["title"])}">'


def html_block(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    """Place a plot; all other markup was escaped."""
    name = tokens[i].content.split()[2]
    if name not in env["plots"]:
        return ""
    label = html.escape(env["title"])
    return (
        f'<figure id="figure-{name}"><div class="plot" id="plot-{name}" role="img" '
        f'aria-label="{label}: the plot of the table below"></div>'
        f"<figcaption>{env['plots'][name].caption}</figcaption></figure>\n"
    )


def html_inline(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    return html.escape(tokens[i].content)


def table_open(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    label = html.escape(env["title"])
    return f'<div class="frame" role="region" aria-label="{label}" tabindex="0"><table>\n'


def table_close(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    return "</table></div>\n"


def tr_open(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
    first, end = tokens[i + 1], tokens[i + 3]
    first.attrSet("scope", "col" if first.tag == "th" else "row")
    first.tag = end.tag = "th"
    return "<tr>"

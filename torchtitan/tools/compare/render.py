"""Renders a report as a self-contained HTML file and as Markdown.

Both are templates over the same contents. The page embeds `report.json` and Plotly, and its content
security policy forbids the browser to load anything.
"""

import dataclasses
import re

from torchtitan.tools.compare.contents import sections
from torchtitan.tools.compare.plots import styles
from torchtitan.tools.compare.report import Report


def html(report: Report) -> str:
    """Render the page."""
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs().replace("</script", "<\\/script")
    return _render("report.html", report, plotly=plotly).lstrip()


def markdown(report: Report) -> str:
    """Render the same contents as text."""
    return re.sub(r"\n{3,}", "\n\n", _render("report.md", report)).strip() + "\n"


def _render(template: str, report: Report, **more: str) -> str:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("torchtitan.tools.compare", "page"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    contents = sections(report)
    plots = [plot for section in contents for plot in section.plots]
    figures = {
        plot.name: {along: figure.to_plotly_json() for along, figure in plot.figures.items()}
        for plot in plots
    }
    return templates.get_template(template).render(
        report=report,
        values=dataclasses.asdict(report),
        sections=contents,
        styles=styles(report),
        figures=figures,
        **more,
    )

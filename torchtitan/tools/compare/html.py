"""The page of a comparison: one HTML file that needs nothing else, neither a network nor a server.

The page shows `report.json`, which it has inside. Its words and tables are written here, so they
are there without scripts; its plots are drawn by `page/plots.js`, with Plotly, from that JSON.
A rule in the page's head forbids the browser to load anything.
"""

import re
from importlib import resources
from string import Template
from typing import Any

from torchtitan.tools.compare import figures
from torchtitan.tools.compare.markup import bullets, dotted, paragraphs, section, table, text
from torchtitan.tools.compare.report import Report, Variant
from torchtitan.tools.compare.words import (
    MISSING,
    count,
    digits,
    quartiles,
    share,
    span,
    verdict,
)


def page(report: Report) -> str:
    """The whole document."""
    from plotly.offline import get_plotlyjs

    sections = [
        ("verdict", "Verdict", conclusion(report)),
        ("variants", "Variants", variants(report)),
        *figures.figures(report),
        ("differs", "What differs", settings(report)),
        ("conditions", "Conditions and machine", conditions(report)),
        ("notes", "Notes", bullets(map(text, report.notes)) if report.notes else ""),
        ("reasons", "What could not run", reasons(report)),
    ]
    return Template(file("page.html")).substitute(
        title=text(report.title),
        description=text(report.description),
        created=text(report.created),
        links="".join(
            f'<li><a href="#{name}">{title}</a></li>' for name, title, body in sections if body
        ),
        sections="".join(section(*given) for given in sections),
        css=file("page.css"),
        report=in_script(report.to_json()),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        plots=file("plots.js"),
    )


def file(name: str) -> str:
    return (
        resources.files("torchtitan.tools.compare")
        .joinpath("page", name)
        .read_text(encoding="utf-8")
    )


def in_script(json: str) -> str:
    """JSON that no text in it can end the script of; it reads as the same values."""
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json)


def conclusion(report: Report) -> str:
    first, *rest = map(text, verdict(report))
    return paragraphs([first], "lead") + bullets(rest)


def variants(report: Report) -> str:
    """Every variant with its numbers, a row each."""
    planned = any(variant.planned for variant in report.variants)
    columns = [
        *("variant", "status", "differs in", "tokens/s per device", "ratio to baseline", "MFU"),
        *("peak memory", "startup", "compile", "same run as baseline"),
        *(["planned"] if planned else []),
    ]
    rows = [row(report, variant, planned) for variant in report.variants]
    return table("Variants and what was measured of them", columns, rows, cards=True)


def row(report: Report, variant: Variant, planned: bool) -> list[str]:
    differs = [f"{dotted(key)} = {text(value)}" for key, value in variant.differs.items()]
    measured = [
        (count(variant.tps.median) if variant.tps else MISSING) + small(quartiles(variant.tps)),
        (f"{variant.ratio.median:.3f}" if variant.ratio else MISSING) + small(span(variant.ratio)),
        share(variant.mfu),
        digits(variant.memory_gib, "GiB"),
        digits(variant.startup_s, "s"),
        digits(variant.compile_s, "s"),
    ]
    cells = [
        heading(report, variant),
        variant.status,
        "<br>".join(differs) or MISSING,
        # A number and its unit are not torn apart.
        *(cell.replace(" ", "&nbsp;") for cell in measured),
        variant.parity.verdict if variant.status == "ran" else MISSING,
    ]
    return [*cells, plan(variant)] if planned else cells


def heading(report: Report, variant: Variant) -> str:
    """The name with the line that it has in plots, and what it runs on."""
    about = f"{variant.ranks} rank{'s' * (variant.ranks > 1)}"
    if layout := ", ".join(f"{axis} {size}" for axis, size in variant.layout.items() if size > 1):
        about += f": {layout}"
    if variant.tokens_per_step:
        about += f"; {variant.tokens_per_step:,} tokens a step"
    base = " (baseline)" if variant.name == report.baseline else ""
    key = f'<span class="key" data-variant="{text(variant.name)}"></span>'
    return f"{key}{text(variant.name)}{base}{small(text(about))}"


def small(words: str) -> str:
    return f"<small>{words}</small>" if words else ""


def plan(variant: Variant) -> str:
    """What was foreseen, in the units of what was measured."""
    shown = {
        "tps": ("tokens/s", count),
        "memory_gib": ("peak memory", lambda value: digits(value, "GiB")),
        "step_s": ("a step", lambda value: digits(value, "s")),
        "mfu": ("MFU", share),
    }
    lines = []
    for name, value in (variant.planned or {}).items():
        title, show = shown.get(name, (name, digits))
        lines.append(f"{text(title)} {show(value)}")
    return "<br>".join(lines) or MISSING


def settings(report: Report) -> str:
    """The settings that are not the same in all variants."""
    keys = list(dict.fromkeys(key for variant in report.variants for key in variant.differs))
    if not keys:
        return paragraphs(["All variants have the same settings."])
    columns = ["setting", *(text(variant.name) for variant in report.variants)]
    rows = ([dotted(key), *(setting(variant, key) for variant in report.variants)] for key in keys)
    return table("Settings that are not the same in all variants", columns, rows)


def setting(variant: Variant, key: str) -> str:
    return text(variant.differs[key]) if key in variant.differs else MISSING


def conditions(report: Report) -> str:
    rows = [["command", f"<code>{text(report.command)}</code>"], ["made", text(report.created)]]
    rows += facts(report.conditions)
    machine = facts(report.machine)
    return table("Conditions", ["what", "value"], rows) + (
        table("Machine of the runs", ["what", "value"], machine) if machine else ""
    )


def facts(named: dict[str, Any]) -> list[list[str]]:
    return [[text(name.replace("_", " ")), text(value)] for name, value in named.items()]


def reasons(report: Report) -> str:
    """Why a variant has no numbers, in full."""
    return "".join(
        f"<h3>{text(variant.name)}: {variant.status}</h3>"
        + (bullets(map(text, variant.reasons)) if variant.reasons else "<p>No reason is known.</p>")
        for variant in report.variants
        if variant.status != "ran"
    )

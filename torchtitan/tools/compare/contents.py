"""The content of a report, section by section, from which its page and its Markdown are made.

Everything here is plain text and plain numbers; the templates in `page/` decide how they look.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.tools.compare import plots
from torchtitan.tools.compare.report import Curve, CurveDifference, Report, Variant
from torchtitan.tools.compare.words import (
    MISSING,
    byte_size,
    count,
    digits,
    median,
    quartiles,
    share,
    span,
    verdict,
)

MOST_ROWS = 40
"""Rows of a curve in a table; `report.json` has them all."""

MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "states": "optimizer states",
    "gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
}
"""The keys of `Variant.memory_formula`, and their names in the table."""

EXPOSED = "exposed communication, of a traced step"


@dataclass(frozen=True)
class Cell:
    """Lines of a table's cell, and a note below them in small letters."""

    lines: tuple[str, ...]
    small: str = ""
    variant: str = ""
    """Name of the variant whose line style is drawn before the text."""
    code: bool = False


Words = str | Cell


@dataclass(frozen=True)
class Table:
    """Rows, each of which starts with its heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Words]]
    cards: bool = False
    """Whether each row becomes a separate block on a narrow screen."""


@dataclass(frozen=True)
class Plot:
    """A plot, and its numbers as a table for readers who cannot see it."""

    name: str
    title: str
    table: Table
    figures: Mapping[str, Any]
    """Figures of `plots` by their horizontal axis: `steps`, and for curves `units` too."""
    caption: str
    drawn: str = ""
    """Explanation of the marks, for the page only."""
    is_curve: bool = False
    """Whether it shows every step, too much for a page of text."""


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading."""

    name: str
    title: str
    text: str = ""
    bullets: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()


def sections(report: Report) -> list[Section]:
    """The parts that have content, in order; plots and tables without numbers are left out."""
    first, *rest = verdict(report)
    curves = [*curve(report, "loss", "Loss"), *curve(report, "grad_norm", "Gradient norm")]
    whole = [
        Section("verdict", "Verdict", first, rest),
        Section("variants", "Variants", tables=[variants(report)]),
        Section("curves", "Loss and gradient norm", plots=curves, tables=[parity(report)]),
        Section("speed", "Speed", plots=[speed(report), time(report)]),
        Section("memory", "Memory", plots=[memory(report)], tables=[held(report)]),
        Section("traffic", "Communication", plots=[sent(report)], tables=[collectives(report)]),
        settings(report),
        Section("conditions", "Conditions and machine", tables=conditions(report)),
        Section("notes", "Notes", bullets=report.notes),
        Section("reasons", "What could not run", tables=[reasons(report)]),
    ]
    if not curves:
        del whole[2]
    found = [
        replace(
            each,
            plots=[plot for plot in each.plots if plot.table.rows],
            tables=[table for table in each.tables if table.rows],
        )
        for each in whole
    ]
    return [each for each in found if each.text or each.bullets or each.plots or each.tables]


def written(value: object) -> str:
    """Show a value of a recipe or a machine as text."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def variants(report: Report) -> Table:
    """Every variant with its numbers, a row each."""
    planned = any(variant.planned for variant in report.variants)
    columns = [
        *("variant", "status", "differs in", f"{report.unit}/s per device", "ratio to baseline"),
        *("MFU", "peak memory", "startup", "compile", "same run as baseline"),
        *(["planned"] if planned else []),
    ]
    rows = [
        [*row(report, variant), *([plan(variant)] if planned else [])]
        for variant in report.variants
    ]
    return Table("Variants and what was measured of them", columns, rows, cards=True)


def row(report: Report, variant: Variant) -> tuple[Words, ...]:
    differs = tuple(f"{key} = {written(value)}" for key, value in variant.differs.items())
    ratio = f"{variant.ratio.median:.3f}" if variant.ratio else MISSING
    return (
        heading(report, variant),
        variant.status,
        Cell(differs, code=True) if differs else MISSING,
        Cell((median(variant.tps),), unbroken(quartiles(variant.tps))),
        Cell((ratio,), unbroken(span(variant.ratio))),
        unbroken(share(variant.mfu)),
        unbroken(digits(variant.memory_gib, "GiB")),
        unbroken(digits(variant.startup_s, "s")),
        unbroken(digits(variant.compile_s, "s")),
        variant.parity.verdict if variant.status == "ran" else MISSING,
    )


def unbroken(text: str) -> str:
    """Keep a number and its unit on one line."""
    return text.replace(" ", "\u00a0")


def heading(report: Report, variant: Variant) -> Cell:
    """The name of a variant, and its ranks, layout and batch."""
    about = f"{variant.ranks} rank{'s' * (variant.ranks > 1)}"
    if layout := ", ".join(f"{axis} {size}" for axis, size in variant.layout.items() if size > 1):
        about += f": {layout}"
    if variant.units_per_step:
        about += f"; {variant.units_per_step:,} {variant.unit} a step"
    base = " (baseline)" if variant.name == report.baseline else ""
    key = variant.name if variant.status == "ran" else ""
    return Cell((variant.name + base,), about, variant=key)


def plan(variant: Variant) -> Words:
    """Planned figures, in the units of the measured ones."""
    shown: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "tps": (f"{variant.unit}/s", count),
        "memory_gib": ("peak memory", lambda value: digits(value, "GiB")),
        "step_s": ("a step", lambda value: digits(value, "s")),
        "mfu": ("MFU", share),
    }
    lines = []
    for name, value in (variant.planned or {}).items():
        title, show = shown.get(name, (name, digits))
        lines.append(f"{title} {show(value)}")
    return Cell(tuple(lines)) if lines else MISSING


def curve(report: Report, name: plots.Field, title: str) -> Iterator[Plot]:
    """One value over the run, and its difference from the baseline's."""
    found = {each.name: given for each in report.ran if (given := getattr(each, name))}
    if not found:
        return
    broken = [key for key, given in found.items() if None in given.values]
    gaps = f" Not finite at some steps: {', '.join(broken)}." if broken else ""
    yield Plot(
        name,
        title,
        by_step(title, found),
        {along: plots.curves(report, name, along) for along in plots.ALONG},
        f"Of the first run of each variant.{gaps}",
        is_curve=True,
    )
    if report.baseline not in found or len(found) == 1:
        return
    title = f"{title}: difference from the baseline"
    rows = [
        (each.name, *difference(getattr(each.parity, name)))
        for each in report.ran
        if each.name != report.baseline
    ]
    columns = ("variant", "difference", "at step", "allowed there")
    yield Plot(
        f"{name}-difference",
        title,
        Table(f"{title}, where it is farthest by what is allowed", columns, rows),
        {along: plots.differences(report, name, along) for along in plots.ALONG},
        "Relative to the baseline's value, without sign.",
        "The scale is logarithmic. A level bar is what is allowed, at the step where its variant "
        "is farthest by that measure. Where both are equal to the last bit there is no point.",
    )


def by_step(title: str, found: Mapping[str, Curve]) -> Table:
    """Values by step, a column for each variant."""
    steps = sorted({step for curve in found.values() for step in curve.steps})
    shown = thinned(steps)
    title += " by step"
    if len(shown) < len(steps):
        title += f": {len(shown)} of {len(steps)} steps; report.json has them all"
    values = [dict(zip(curve.steps, curve.values, strict=True)) for curve in found.values()]
    rows = [(str(step), *(digits(each.get(step)) for each in values)) for step in shown]
    return Table(title, ("step", *found), rows)


def thinned(steps: Sequence[int]) -> Sequence[int]:
    """Steps at equal distances, the first and the last among them."""
    if len(steps) <= MOST_ROWS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def difference(found: CurveDifference | None) -> tuple[str, str, str]:
    if found is None:
        return MISSING, MISSING, MISSING
    return digits(found.largest), str(found.step), digits(found.tolerance or None)


def parity(report: Report) -> Table:
    """The verdict on each run, with its reason."""
    rows = [(each.name, each.parity.verdict, each.parity.why) for each in report.ran]
    title = "Does it train the run that the baseline trains?"
    return Table(title, ("variant", "verdict", "why"), rows, cards=True)


def speed(report: Report) -> Plot:
    """Units per second of each variant and of each of its runs."""
    title = f"{report.unit.capitalize()} per second and device"
    rows = [
        (
            *(each.name, str(run.round), str(run.seed)),
            *(median(run.tps), quartiles(run.tps) or MISSING, run.folder, run.note or MISSING),
        )
        for each in report.ran
        if each.tps
        for run in each.runs
    ]
    columns = ("variant", "round", "seed", "median", "middle half of its steps", "folder", "note")
    return Plot(
        "tps",
        title,
        Table(f"{title}, by run", columns, rows),
        {"steps": plots.speed(report)},
        "Of the measured steps.",
        "Bar: median of all rounds, with the middle half of the steps; dots: the median of "
        "each run.",
    )


def time(report: Report) -> Plot:
    """Phases of a step, and the exposed communication, which is contained in several of them."""
    found = {}
    for each in report.ran:
        if each.time_shares:
            more = each.exposed_communication
            found[each.name] = each.time_shares | ({} if more is None else {EXPOSED: more})
    caption, drawn = "Share of the time of measured steps, by phase.", ""
    if any(EXPOSED in shares for shares in found.values()):
        caption += (
            " Exposed communication is the share of a traced step in which rank 0 communicated and"
            " computed nothing; it is part of the phases."
        )
        drawn = "It is the line below a bar."
    return stack("time", "Where the time goes", found, share, plots.time(report), caption, drawn)


def memory(report: Report) -> Plot:
    """Peak memory of each variant."""
    rows = [
        (each.name, digits(each.memory_gib, "GiB"))
        for each in report.ran
        if each.memory_gib is not None
    ]
    numbers = Table("Peak memory of the worst rank", ("variant", "peak"), rows)
    figures = {"steps": plots.memory(report)}
    return Plot("memory", "Peak memory", numbers, figures, "Of the worst rank.")


def held(report: Report) -> Table:
    """Memory of a rank by formula, next to the measured peak."""
    found = [each for each in report.ran if each.memory_formula]
    parts = [p for p in MEMORY_PARTS if any(each.memory_formula.get(p) for each in found)]
    rows = [
        (
            each.name,
            *(digits(each.memory_formula.get(part)) for part in parts),
            digits(sum(each.memory_formula.values())),
            digits(each.memory_gib),
            byte_size(each.state_bytes),
        )
        for each in (found if parts else ())
    ]
    measured = ("measured peak", "measured states")
    return Table(
        "Memory of a rank in GiB, by formula; on a CPU the measured peak is of the whole process",
        ("variant", *(MEMORY_PARTS[part] for part in parts), "sum", *measured),
        rows,
    )


def collectives(report: Report) -> Table:
    """Collectives of a step, as recorded and by formula."""
    rows = [
        (
            each.name,
            kind.axis,
            kind.operation.replace("_", "-"),
            MISSING if kind.count is None else str(kind.count),
            MISSING if kind.formula_count is None else str(kind.formula_count),
            byte_size(kind.bytes),
            byte_size(kind.formula_bytes),
        )
        for each in report.ran
        for kind in each.collectives
    ]
    return Table(
        "Collectives of a step of rank 0; single numbers, as losses, are in no formula",
        ("variant", "axis", "operation", "recorded", "formula", "sent", "by formula"),
        rows,
    )


def sent(report: Report) -> Plot:
    """Bytes sent in a step, by axis."""
    notes = {each.name: each.sent_note for each in report.ran if each.sent_note}
    about = " ".join(f"{name}: {note}" for name, note in notes.items())
    if notes and len(notes) == len(report.ran) and len(set(notes.values())) == 1:
        about = next(iter(notes.values()))
    found = {each.name: each.sent_bytes for each in report.ran if each.sent_bytes}
    caption = f"By rank 0, by axis of the mesh. {about}"
    return stack("sent", "Bytes sent in a step", found, byte_size, plots.sent(report), caption)


def stack(
    name: str,
    title: str,
    values: Mapping[str, Mapping[str, float]],
    show: Callable[[float | None], str],
    figure: Any,
    caption: str,
    drawn: str = "",
) -> Plot:
    """A plot of bars that are made of parts."""
    parts = tuple(dict.fromkeys(part for of in values.values() for part in of))
    rows = [(variant, *(show(of.get(part)) for part in parts)) for variant, of in values.items()]
    return Plot(
        name, title, Table(title, ("variant", *parts), rows), {"steps": figure}, caption, drawn
    )


def settings(report: Report) -> Section:
    """The settings that are not the same in all variants."""
    keys = dict.fromkeys(key for each in report.variants for key in each.differs)
    if not keys:
        return Section("differs", "What differs", "All variants have the same settings.")
    rows: list[list[Words]] = [
        [
            Cell((key,), code=True),
            *(written(v.differs[key]) if key in v.differs else MISSING for v in report.variants),
        ]
        for key in keys
    ]
    columns = ("setting", *(each.name for each in report.variants))
    table = Table("Settings that are not the same in all variants", columns, rows)
    return Section("differs", "What differs", tables=[table])


def conditions(report: Report) -> list[Table]:
    """The conditions of the measurement, and the machine."""
    made = (("command", Cell((report.command,), code=True)), ("made", report.created))
    given = {name: value for name, value in report.conditions.items() if value not in (None, "")}
    columns = ("what", "value")
    return [
        Table("Conditions", columns, [*made, *facts(given)]),
        Table("Machine of the runs", columns, facts(report.machine)),
    ]


def facts(named: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), written(value)) for name, value in named.items()]


def reasons(report: Report) -> Table:
    """The reasons why variants have no numbers, in full."""
    rows = [
        (each.name, each.status, Cell(each.reasons or ("no reason is known",)))
        for each in report.variants
        if each.status != "ran"
    ]
    return Table("Variants without numbers", ("variant", "status", "why"), rows, cards=True)

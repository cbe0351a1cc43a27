"""What a report says, section by section: the one thing that its page and its Markdown are made of.

Everything here is plain text and plain numbers; how they look is the templates' business (`page/`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Of a curve in a table; `report.json` has them all."""

MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "states": "optimizer states",
    "gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
}
"""Of `Variant.memory_formula`, and what they are called."""

EXPOSED = "exposed communication, of a traced step"


@dataclass(frozen=True)
class Cell:
    """Lines of a table's cell, and what stands below them in small letters."""

    lines: tuple[str, ...]
    small: str = ""
    variant: str = ""
    """The name of the variant whose line in the plots is drawn before it."""
    code: bool = False


Words = str | Cell


@dataclass(frozen=True)
class Table:
    """Rows that begin with their heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Words, ...], ...]
    cards: bool = False
    """On a narrow screen each row is a block of its own."""


@dataclass(frozen=True)
class Plot:
    """A plot, and its numbers as a table for whoever cannot see it."""

    name: str
    title: str
    table: Table
    figures: Mapping[str, Any]
    """Of `plots`, by what they are drawn along: `steps`, and where it matters `units`."""
    caption: str
    drawn: str = ""
    """What is what in the drawing."""
    is_curve: bool = False
    """It is about every step, too much for a page of text."""


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading."""

    name: str
    title: str
    text: str = ""
    bullets: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()


def sections(report: Report) -> list[Section]:
    """The parts that have anything to say, in order."""
    first, *rest = verdict(report)
    curves = [*curve(report, "loss", "Loss"), *curve(report, "grad_norm", "Gradient norm")]
    found = [
        Section("verdict", "Verdict", first, tuple(rest)),
        Section("variants", "Variants", tables=(variants(report),)),
        Section(
            "curves",
            "Loss and gradient norm",
            plots=tuple(curves),
            tables=(parity(report),) if curves else (),
        ),
        Section("speed", "Speed", plots=(*speed(report), *time(report))),
        Section("memory", "Memory", plots=tuple(memory(report)), tables=tuple(held(report))),
        Section(
            "traffic",
            "Communication",
            plots=tuple(sent(report)),
            tables=tuple(collectives(report)),
        ),
        settings(report),
        Section("conditions", "Conditions and machine", tables=tuple(conditions(report))),
        Section("notes", "Notes", bullets=report.notes),
        Section("reasons", "What could not run", tables=tuple(reasons(report))),
    ]
    return [each for each in found if each.text or each.bullets or each.plots or each.tables]


def written(value: object) -> str:
    """A value of a recipe or a machine as it is to be read."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def variants(report: Report) -> Table:
    """Every variant with its numbers, a row each."""
    planned = any(variant.planned for variant in report.variants)
    columns = (
        *(
            "variant",
            "status",
            "differs in",
            f"{report.unit}/s per device",
            "ratio to baseline",
            "MFU",
        ),
        *("peak memory", "startup", "compile", "same run as baseline"),
        *(["planned"] if planned else []),
    )
    rows = tuple(
        (*row(report, variant), *([plan(variant)] if planned else []))
        for variant in report.variants
    )
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
    """A number and its unit are not torn apart."""
    return text.replace(" ", "\u00a0")


def heading(report: Report, variant: Variant) -> Cell:
    """The name, and what the variant runs on."""
    about = f"{variant.ranks} rank{'s' * (variant.ranks > 1)}"
    if layout := ", ".join(f"{axis} {size}" for axis, size in variant.layout.items() if size > 1):
        about += f": {layout}"
    if variant.units_per_step:
        about += f"; {variant.units_per_step:,} {variant.unit} a step"
    base = " (baseline)" if variant.name == report.baseline else ""
    key = variant.name if variant.status == "ran" else ""
    return Cell((variant.name + base,), about, variant=key)


def plan(variant: Variant) -> Words:
    """What was foreseen, in the units of what was measured."""
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


def curve(report: Report, name: plots.Field, title: str) -> Iterable[Plot]:
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
    apart = {each.name: getattr(each.parity, name) for each in report.ran}
    title = f"{title}: difference from the baseline"
    yield Plot(
        f"{name}-difference",
        title,
        Table(
            f"{title}, where it is farthest by what is allowed",
            ("variant", "difference", "at step", "allowed there"),
            tuple(
                (key, *difference(given)) for key, given in apart.items() if key != report.baseline
            ),
        ),
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
    rows = ((str(step), *(digits(each.get(step)) for each in values)) for step in shown)
    return Table(title, ("step", *found), tuple(rows))


def thinned(steps: Sequence[int]) -> Sequence[int]:
    """Steps at even distances, the first and the last among them."""
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
    rows = tuple((each.name, each.parity.verdict, each.parity.why) for each in report.ran)
    title = "Does it train the run that the baseline trains?"
    return Table(title, ("variant", "verdict", "why"), rows, cards=True)


def speed(report: Report) -> Iterable[Plot]:
    """Units a second: of each variant, and of each of its runs."""
    title = f"{report.unit.capitalize()} per second and device"
    rows = []
    for each in report.ran:
        for run in each.runs if each.tps else ():
            cells = median(run.tps), quartiles(run.tps) or MISSING
            found = each.name, str(run.round), str(run.seed), *cells, run.folder
            rows.append((*found, run.note or MISSING))
    columns = ("variant", "round", "seed", "median", "middle half of its steps", "folder", "note")
    if rows:
        yield Plot(
            "tps",
            title,
            Table(f"{title}, by run", columns, tuple(rows)),
            {"steps": plots.speed(report)},
            "Of the measured steps.",
            "Bar: median of all rounds, with the middle half of the steps; dots: the median of "
            "each run.",
        )


def time(report: Report) -> Iterable[Plot]:
    """Phases of a step, and beside them what communication costs: it lies in several of them."""
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


def memory(report: Report) -> Iterable[Plot]:
    """Of each variant."""
    peaks = {
        each.name: digits(each.memory_gib, "GiB")
        for each in report.ran
        if each.memory_gib is not None
    }
    if peaks:
        title = "Peak memory of the worst rank"
        numbers = Table(title, ("variant", "peak"), tuple(peaks.items()))
        figures = {"steps": plots.memory(report)}
        yield Plot("memory", "Peak memory", numbers, figures, "Of the worst rank.")


def held(report: Report) -> Iterable[Table]:
    """What a rank holds by formula, beside the measured peak."""
    found = [each for each in report.ran if each.memory_formula]
    parts = [p for p in MEMORY_PARTS if any(each.memory_formula.get(p) for each in found)]
    if not parts:
        return
    rows = tuple(
        (
            each.name,
            *(digits(each.memory_formula.get(part)) for part in parts),
            digits(sum(each.memory_formula.values())),
            digits(each.memory_gib),
            byte_size(each.state_bytes),
        )
        for each in found
    )
    measured = ("measured peak", "measured states")
    columns = ("variant", *(MEMORY_PARTS[part] for part in parts), "sum", *measured)
    title = (
        "Memory of a rank in GiB, by formula; on a CPU the measured peak is of the whole process"
    )
    yield Table(title, columns, rows)


def collectives(report: Report) -> Iterable[Table]:
    """What a step sends, as it was recorded and by formula."""
    rows = tuple(
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
    )
    if rows:
        yield Table(
            "Collectives of a step of rank 0; single numbers, as losses, are in no formula",
            *(("variant", "axis", "operation", "recorded", "formula", "sent", "by formula"), rows),
        )


def sent(report: Report) -> Iterable[Plot]:
    """Bytes by axis."""
    notes = {each.name: each.sent_note for each in report.ran if each.sent_note}
    about = " ".join(f"{name}: {note}" for name, note in notes.items())
    if len(notes) == len(report.ran) and len(set(notes.values())) == 1:
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
) -> Iterable[Plot]:
    """A plot of bars that are made of parts."""
    parts = tuple(dict.fromkeys(part for of in values.values() for part in of))
    if parts:
        rows = tuple(
            (variant, *(show(of.get(part)) for part in parts)) for variant, of in values.items()
        )
        numbers = Table(title, ("variant", *parts), rows)
        yield Plot(name, title, numbers, {"steps": figure}, caption, drawn)


def settings(report: Report) -> Section:
    """The settings that are not the same in all variants."""
    keys = dict.fromkeys(key for each in report.variants for key in each.differs)
    if not keys:
        return Section("differs", "What differs", "All variants have the same settings.")
    rows: list[tuple[Words, ...]] = []
    for key in keys:
        values = (
            written(each.differs[key]) if key in each.differs else MISSING
            for each in report.variants
        )
        rows.append((Cell((key,), code=True), *values))
    columns = ("setting", *(each.name for each in report.variants))
    table = Table("Settings that are not the same in all variants", columns, tuple(rows))
    return Section("differs", "What differs", tables=(table,))


def conditions(report: Report) -> Iterable[Table]:
    """How it was measured, and on what."""
    made = (("command", Cell((report.command,), code=True)), ("made", report.created))
    given = {name: value for name, value in report.conditions.items() if value not in (None, "")}
    yield Table("Conditions", ("what", "value"), (*made, *facts(given)))
    if report.machine:
        yield Table("Machine of the runs", ("what", "value"), facts(report.machine))


def facts(named: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name.replace("_", " "), written(value)) for name, value in named.items())


def reasons(report: Report) -> Iterable[Table]:
    """Why a variant has no numbers, in full."""
    rows: tuple[tuple[Words, ...], ...] = tuple(
        (each.name, each.status, Cell(each.reasons or ("no reason is known",)))
        for each in report.variants
        if each.status != "ran"
    )
    if rows:
        yield Table("Variants without numbers", ("variant", "status", "why"), rows, cards=True)

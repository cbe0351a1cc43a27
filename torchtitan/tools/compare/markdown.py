"""Writes a report as Markdown, from which its page is made too.

A comment `<!-- plot NAME -->` is where the page has the plot of that name. Numbers are only rounded
here; one that was not measured is `MISSING`, never zero.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchtitan.tools.compare.parity import ALONG, relative_differences
from torchtitan.tools.compare.results import Report, Spread, Variant
from torchtitan.tools.compare.verdict import verdict

MISSING = "-"
MOST_ROWS = 40
"""Rows of a curve in a table; `report.json` has them all."""
CURVES = {"loss": "Loss", "grad_norm": "Gradient norm"}
EXPOSED = "exposed communication, of a traced step"

Columns = dict[str, Callable[[Variant], str | Sequence[str]]]


class Code(str):
    """Text of a cell that is code."""


def markdown(report: Report, *, for_page: bool = False) -> str:
    """Write the parts of a report that have content; curves and places of plots for a page only."""
    first, *rest = verdict(report)
    curves = []
    for field, title in CURVES.items():
        curves += [curve(report, field, title)] if for_page else []
        curves.append(differences(report, field, title))
    sections = {
        "Verdict": [plain(first), bullets(rest)],
        "Variants": [variants(report)],
        "Loss and gradient norm": [*curves, parity(report)],
        "Speed": [speed(report), time(report)],
        "Experts": [experts(report)],
        "Memory": [memory(report), planned_memory(report)],
        "Communication": [sent(report), collectives(report)],
        "What differs": [settings(report) or "All variants have the same settings."],
        "Conditions and machine": conditions(report),
        "Notes": [bullets(report.notes)],
        "What could not run": [reasons(report)],
    }
    blocks = [f"# {plain(report.title)}", plain(report.description)]
    for title, parts in sections.items():
        blocks += [f"## {title}", *parts] if any(parts) else []
    text = "\n\n".join(filter(None, blocks)) + "\n"
    return text if for_page else re.sub(r"<!-- plot \S+ -->\n\n", "", text)


def plain(text: str) -> str:
    """Write text so that Markdown shows it as it is, on one line."""
    marks = r"[\\`*\[\]<|~]|\b_|_\b|&(?=#?\w+;)|^[#>]|#$"
    return re.sub(marks, r"\\\g<0>", " ".join(text.split()))


def cell(text: str) -> str:
    if not isinstance(text, Code):
        return plain(text)
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Sequence[str]]],
    text: str = "",
    plot: str = "",
) -> str:
    """Write a table under its heading; empty without rows. A cell may have several texts."""
    lines = [
        [cell(each) if isinstance(each, str) else "; ".join(map(cell, each)) for each in row]
        for row in (columns, *rows)
    ]
    if len(lines) == 1:
        return ""
    lines.insert(1, ["---"] * len(columns))
    written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    spot = f"<!-- plot {plot} -->"
    return "\n\n".join(filter(None, (f"### {title}", plain(text), plot and spot, written)))


def by_variant(
    title: str,
    variants: Iterable[Variant],
    columns: Columns,
    text: str = "",
    plot: str = "",
) -> str:
    """Write a table with a row for each variant: its name, and what each column shows."""
    rows = [(each.name, *(show(each) for show in columns.values())) for each in variants]
    return table(title, ("variant", *columns), rows, text, plot)


def parts(
    variants: Iterable[Variant],
    field: Callable[[Variant], Mapping[str, float]],
    show: Callable[[float | None], str],
) -> Columns:
    """Make a column for each part that any of the variants has."""
    names = dict.fromkeys(name for each in variants for name in field(each))
    return {name: lambda each, name=name: show(field(each).get(name)) for name in names}  # type: ignore[misc]


def variants(report: Report) -> str:
    """Every variant with its numbers."""

    def heading(each: Variant) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in each.layout.items() if size > 1)
        about = f"{each.ranks} rank{'s' * (each.ranks > 1)}{axes and ': '}{axes}"
        if each.units_per_step:
            about += f"; {each.units_per_step:,} {each.unit} a step"
        return f"{each.name}{' (baseline)' * (each.name == report.baseline)} ({about})"

    columns: Columns = {
        "variant": heading,
        "status": lambda each: each.status,
        "differs in": lambda each: (
            [Code(f"{key} = {written(value)}") for key, value in each.differs.items()] or MISSING
        ),
        f"{report.unit}/s per device": lambda each: middle_half(each.tps),
        "ratio to baseline": lambda each: ratio(each.ratio),
        "MFU": lambda each: share(each.mfu),
        "peak memory": lambda each: digits(each.memory_gib, "GiB"),
        "startup": lambda each: digits(each.startup_s, "s"),
        "compile": lambda each: digits(each.compile_s, "s"),
        "same run as baseline": lambda each: (
            each.parity.verdict if each.status == "ran" else MISSING
        ),
    }
    if any(each.planned for each in report.variants):
        columns["planned"] = planned
    rows = [[show(each) for show in columns.values()] for each in report.variants]
    return table("Variants and what was measured of them", list(columns), rows)


def planned(variant: Variant) -> Sequence[str]:
    """Planned figures, in the units of the measured ones."""
    shown: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "tps": (f"{variant.unit}/s", count),
        "memory_gib": ("peak memory", lambda value: digits(value, "GiB")),
        "step_s": ("a step", lambda value: digits(value, "s")),
        "mfu": ("MFU", share),
    }
    found = []
    for name, value in (variant.planned or {}).items():
        title, show = shown.get(name, (name, digits))
        found.append(f"{title} {show(value)}")
    return found or MISSING


def curve(report: Report, field: str, title: str) -> str:
    """One value over the run, by step."""
    found = {each.name: given for each in report.ran if (given := getattr(each, field))}
    steps = sorted({step for curve in found.values() for step in curve.steps})
    shown, last, title = steps, len(steps) - 1, f"{title} by step"
    if len(steps) > MOST_ROWS:
        shown = [steps[round(i * last / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]
        title += f": {MOST_ROWS} of {len(steps)} steps; report.json has them all"
    values = [dict(zip(curve.steps, curve.values, strict=True)) for curve in found.values()]
    rows = [(str(step), *(digits(each.get(step)) for each in values)) for step in shown]
    broken = ", ".join(name for name, curve in found.items() if None in curve.values)
    text = "Of the first run of each variant."
    text += broken and f" Not finite at some steps: {broken}."
    return table(title, ("step", *found), rows, text, field)


def differences(report: Report, field: str, title: str) -> str:
    """The largest difference of each curve from the baseline's."""
    curves = {each.name: given for each in report.ran if (given := getattr(each, field))}
    base = curves.pop(report.baseline, None)
    if base is None or not curves:
        return ""
    by_step, by_units = (
        {name: relative_differences(given, base, along) for name, given in curves.items()}
        for along in ALONG
    )
    equal = [name for name, found in by_step.items() if found and not any(found.values())]
    apart = [name for name, found in by_units.items() if not found]
    text = "Relative to the baseline's value, without sign."
    text += f" Equal to the last bit throughout: {', '.join(equal)}." if equal else ""
    never = f" Never at the same number of {report.unit} as the baseline: {', '.join(apart)}."
    rows = []
    for each in report.ran:
        if each.name != report.baseline:
            found = getattr(each.parity, field)
            numbers = (found.largest, found.step, found.tolerance or None) if found else (None,) * 3
            rows.append((each.name, *map(digits, numbers)))
    return table(
        f"{title}: difference from the baseline, where it is farthest by what is allowed",
        ("variant", "difference", "at step", "allowed there"),
        rows,
        text + never * bool(apart),
        f"{field}-difference",
    )


def parity(report: Report) -> str:
    """The verdict on each run, with its reason."""
    return by_variant(
        "Does it train the run that the baseline trains?",
        report.ran,
        {"verdict": lambda each: each.parity.verdict, "why": lambda each: each.parity.why},
    )


def speed(report: Report) -> str:
    """Units per second of each run of each variant."""
    rows = [
        (each.name, str(run.round), str(run.seed), middle_half(run.tps), run.folder)
        for each in report.ran
        if each.tps
        for run in each.runs
    ]
    return table(
        f"{report.unit.capitalize()} per second and device, by run",
        ("variant", "round", "seed", "median (middle half of its steps)", "folder"),
        rows,
        "Of the measured steps.",
        "tps",
    )


def time(report: Report) -> str:
    """Phases of a step, and the exposed communication, which is contained in several of them."""
    found = [each for each in report.ran if each.time_shares]
    columns = parts(found, lambda each: each.time_shares, share)
    text = "Share of the time of measured steps, by phase."
    if any(each.exposed_communication is not None for each in found):
        columns[EXPOSED] = lambda each: share(each.exposed_communication)
        text += (
            " Exposed communication is the share of a traced step in which rank 0 communicated and"
            " computed nothing; it is part of the phases."
        )
    return by_variant("Where the time goes", found, columns, text, "time")


def experts(report: Report) -> str:
    """Balance of experts in the last step."""
    found = [each for each in report.ran if each.experts]
    columns: Columns = {
        "share of the busiest expert": lambda each: share(each.experts["busiest_share"]),
        "entropy": lambda each: digits(each.experts["entropy"]),
    }
    text = (
        "In the last report: the largest share of an expert in the choices of its block, and the "
        "mean entropy of these shares, where 1 is balanced."
    )
    return by_variant("Balance of experts", found, columns, text, "experts")


def memory(report: Report) -> str:
    """Peak memory of each variant."""
    found = [each for each in report.ran if each.memory_gib is not None]
    columns: Columns = {"peak": lambda each: digits(each.memory_gib, "GiB")}
    return by_variant("Peak memory of the worst rank", found, columns, plot="memory")


def planned_memory(report: Report) -> str:
    """Planned memory of a rank, next to the measured peak."""
    found = [each for each in report.ran if each.memory_formula]
    columns = parts(found, lambda each: each.memory_formula, digits)
    columns |= {
        "planned peak": lambda each: digits((each.planned or {}).get("memory_gib")),
        "measured peak": lambda each: digits(each.memory_gib),
        "measured states": lambda each: byte_size(each.state_bytes),
    }
    return by_variant(
        "Planned memory of the fullest rank in GiB; on a CPU both peaks are of the whole process",
        found,
        columns,
    )


def sent(report: Report) -> str:
    """Bytes sent in a step, by axis."""
    found = [each for each in report.ran if each.sent_bytes]
    notes = {each.name: each.sent_note for each in report.ran if each.sent_note}
    about = " ".join(f"{name}: {note}" for name, note in notes.items())
    if len(notes) == len(report.ran) and len(set(notes.values())) == 1:
        about = notes[report.ran[0].name]
    columns = parts(found, lambda each: each.sent_bytes, byte_size)
    text = f"By rank 0, by axis of the mesh. {about}"
    return by_variant("Bytes sent in a step", found, columns, text, "sent")


def collectives(report: Report) -> str:
    """Collectives of a step, as recorded and as planned."""
    rows = [
        (
            *(each.name, kind.axis, kind.operation.replace("_", "-")),
            *(digits(kind.count), digits(kind.formula_count)),
            *(byte_size(kind.bytes), byte_size(kind.formula_bytes)),
        )
        for each in report.ran
        for kind in each.collectives
    ]
    return table(
        "Collectives of a step of rank 0; sums of losses and counts are not planned",
        ("variant", "axis", "operation", "recorded", "planned", "sent", "planned bytes"),
        rows,
    )


def settings(report: Report) -> str:
    """The settings that are not the same in all variants."""
    keys = dict.fromkeys(key for each in report.variants for key in each.differs)
    rows = [
        (
            Code(key),
            *(written(v.differs[key]) if key in v.differs else MISSING for v in report.variants),
        )
        for key in keys
    ]
    columns = ("setting", *(each.name for each in report.variants))
    return table("Settings that are not the same in all variants", columns, rows)


def conditions(report: Report) -> list[str]:
    """The conditions of the measurement, and the machine."""
    given = {name: value for name, value in report.conditions.items() if value not in (None, "")}
    tables = {
        "Conditions": {"command": Code(report.command), "made": report.created} | given,
        "Machine of the runs": report.machine,
    }
    return [
        table(title, ("what", "value"), [(k.replace("_", " "), written(v)) for k, v in of.items()])
        for title, of in tables.items()
    ]


def reasons(report: Report) -> str:
    """The reasons why variants have no numbers, in full."""
    return by_variant(
        "Variants without numbers",
        [each for each in report.variants if each.status != "ran"],
        {
            "status": lambda each: each.status,
            "why": lambda each: each.reasons or "no reason is known",
        },
    )


def written(value: object) -> str:
    """Show a value of a recipe or a machine as text."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def count(value: float | None) -> str:
    """Format units, or units per second: 12,345; small numbers with three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def digits(value: float | None, unit: str = "") -> str:
    """Format a number with four significant digits, and a whole number in full."""
    if value is None:
        return MISSING
    return (str(value) if isinstance(value, int) else f"{value:.4g}") + (unit and f" {unit}")


def share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def byte_size(value: float | None) -> str:
    """Format bytes in powers of 1000, as on the axes of plots."""
    if value is None:
        return MISSING
    power = next((power for power in range(4) if value < 1000 ** (power + 1)), 4)
    return f"{value / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def middle_half(spread: Spread | None) -> str:
    """The median, and the range of the middle half of the values if they differ."""
    return (
        MISSING if spread is None else ranged(spread.median, spread.quartile_1, spread.quartile_3)
    )


def ranged(middle: float, low: float, high: float, show: Callable[[float], str] = count) -> str:
    return show(middle) + (f" ({show(low)} to {show(high)})" if low < high else "")


def ratio(spread: Spread | None) -> str:
    """The median of ratios, with their minimum and maximum if they differ."""
    if spread is None:
        return MISSING
    return ranged(spread.median, spread.least, spread.most, "{:.3f}".format)

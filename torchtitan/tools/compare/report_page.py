"""The report of a comparison, as a page and as Markdown.

Numbers are only rounded here; one that was not measured is `MISSING`, never zero.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchtitan.config import amount
from torchtitan.tools.compare.gather import relative_differences
from torchtitan.tools.compare.results import CurveDifference, Report, Spread, Variant
from torchtitan.tools.page import (
    Chart,
    Code,
    Line,
    Page,
    Table,
    draw_curves,
    draw_rows,
    side_by_side,
    stacked_bar,
)

MISSING = "-"
CURVES = {"loss": "Loss", "grad_norm": "Gradient norm"}
LOSSES = {
    "baseline": "baseline",
    "same": "same loss",
    "differs": "other loss",
    "not judged": "loss not judged",
}
"""Verdicts on a variant, as a line has room for them."""
EXPOSED = "exposed communication, of a traced step"

Columns = dict[str, Callable[[Variant], str | Sequence[str]]]


def report_page(report: Report) -> Page:
    """Return what the report says: the answer, a chart of speed and memory, then all numbers."""
    return Page(
        title=report.title,
        answer=answer(report),
        chart=overview(report),
        sections={
            "Variants": [report.description, variants(report), planned(report)],
            "Loss and gradient norm": [
                *(curves(report, field, title) for field, title in CURVES.items()),
                parity(report),
            ],
            "Speed": [time_chart(report), time(report)],
            "Experts": [experts(report)],
            "Memory": [planned_memory(report)],
            "Communication": [sent_chart(report), sent(report), collectives(report)],
            "What differs": [settings(report)],
            "Conditions and machine": conditions(report),
            "Notes": [report.notes],
            "What could not run": [reasons(report)],
        },
        name="report",
        data=dataclasses.asdict(report),
    )


def answer(report: Report) -> str:
    """Say what came out: which variants train the same run, then which of these is the fastest."""
    others = [each for each in report.ran if each.name != report.baseline]
    same = [each for each in others if each.parity.verdict == "same"]
    if not others:
        return "No variant ran besides the baseline."
    best, base = fastest(same), f"“{report.baseline}”"
    if len(others) > 1:
        have = "has" if len(same) == 1 else "have"
        said = f"{len(same)} of {len(others)} variants {have} the same loss as {base}"
        if best is None:
            return f"{said}."
        name, speed = f"“{best.name}”", relative(best)
        is_faster = best.ratio and best.ratio.median > 1
        which = f"the fastest of these, {name}, has" if is_faster else f"none is faster: {name} has"
        return f"{said}; {which} {speed}."
    only = others[0]
    has = {"same": "has the same loss as", "differs": "has another loss than"}
    verb = has.get(only.parity.verdict, "ran, and its loss is not judged against")
    return f"“{only.name}” {verb} {base}" + (f", and {relative(only)}." if only.ratio else ".")


def relative(variant: Variant) -> str:
    """Write the speed of a variant relative to the baseline, and its range over rounds."""
    speed = variant.ratio
    assert speed is not None
    range_text = f" ({speed.least:.2f} to {speed.most:.2f})" * (speed.least < speed.most)
    return f"{speed.median:.2f}x its speed{range_text}"


def fastest(variants: Iterable[Variant]) -> Variant | None:
    """Return the variant with the highest ratio to the baseline, if any has one."""
    rated = [each for each in variants if each.ratio]
    return max(rated, key=lambda each: each.ratio.median if each.ratio else 0.0, default=None)


def overview(report: Report) -> Chart | None:
    """Draw speed and memory by variant."""
    speeds, memory = [], []
    for each in report.ran:
        if each.tps:
            value = count(each.tps.median)
            if each.ratio and each.name != report.baseline:
                value += f", {ratio(each.ratio)}"
            speeds.append(stacked_bar(each.name, {"speed": each.tps.median}, value))
        if each.memory_gib is not None:
            value = digits(each.memory_gib, "GiB")
            memory.append(stacked_bar(each.name, {"peak": each.memory_gib}, value))
    panels = {f"{report.unit}/s per device": speeds, "Peak memory of the worst rank": memory}
    charts = [draw_rows(title, rows) for title, rows in panels.items() if rows]
    caption = "Medians of all measured steps, and ratios to the baseline."
    return side_by_side("Speed and memory", charts, caption) if charts else None


def by_variant(title: str, variants: Iterable[Variant], columns: Columns, text: str = "") -> Table:
    """Return a table: a row for each variant, and the columns in which any has a value."""
    shown = [*variants]
    cells = {name: [show(each) for each in shown] for name, show in columns.items()}
    cells = {name: column for name, column in cells.items() if {*map(str, column)} - {MISSING}}
    rows = [*zip((each.name for each in shown), *cells.values(), strict=True)]
    return Table(title, ("variant", *cells), rows, text)


def parts(
    variants: Iterable[Variant],
    field: Callable[[Variant], Mapping[str, float]],
    show: Callable[[float | None], str],
) -> Columns:
    """Make a column for each part that any of the variants has."""
    names = dict.fromkeys(name for each in variants for name in field(each))
    return {name: lambda each, name=name: show(field(each).get(name)) for name in names}  # type: ignore[misc]


def variants(report: Report) -> Table:
    """Every variant with its numbers."""

    def layout(each: Variant) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in each.layout.items() if size > 1)
        ranks = f"{each.ranks} rank{'s' * (each.ranks > 1)}{axes and ': '}{axes}"
        return f"{ranks}; {each.units_per_step:,} {each.unit}" if each.units_per_step else ranks

    columns: Columns = {
        "layout; per step": layout,
        "loss": lambda each: LOSSES[each.parity.verdict] if each.status == "ran" else each.status,
        f"{report.unit}/s per device": lambda each: quartiles(each.tps),
        "speed": lambda each: ratio(each.ratio),
        "MFU": lambda each: share(each.mfu),
        "peak memory": lambda each: digits(each.memory_gib, "GiB"),
        "startup": lambda each: digits(each.startup_s, "s"),
        "compile": lambda each: digits(each.compile_s, "s"),
    }
    text = "Speed is relative to the baseline in the same round, with the range over rounds."
    return by_variant("Measured", report.variants, columns, text)


def planned(report: Report) -> Table:
    """Planned figures, in the units of the measured ones."""
    shown: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "tps": (f"{report.unit}/s per device", count),
        "memory_gib": ("peak memory", lambda value: digits(value, "GiB")),
        "step_s": ("a step", lambda value: digits(value, "s")),
        "mfu": ("MFU", share),
    }
    found = [each for each in report.variants if each.planned]
    columns: Columns = {}
    for key in dict.fromkeys(key for each in found for key in each.planned or {}):
        title, show = shown.get(key, (key, digits))
        columns[title] = lambda each, key=key, show=show: show((each.planned or {}).get(key))  # type: ignore[misc]
    return by_variant("Planned", found, columns)


def curves(report: Report, field: str, title: str) -> Chart | None:
    """Draw one value over the steps."""
    shown = {each.name: given for each in report.ran if (given := getattr(each, field))}
    if not shown:
        return None
    others = [each.name for each in report.ran if each.name != report.baseline]
    colors = {report.baseline: 0} | {name: i for i, name in enumerate(others, 1)}
    drawn = [Line(name, given.steps, given.values, colors[name]) for name, given in shown.items()]
    broken = ", ".join(name for name, given in shown.items() if None in given.values)
    caption = "Of the first run of each variant."
    caption += f" Not finite at some steps: {broken}." if broken else ""
    return draw_curves(title, drawn, "step", caption)


def parity(report: Report) -> Table:
    """The verdict on each run, with its reason and its largest differences."""

    def largest(difference: CurveDifference | None) -> str:
        if difference is None:
            return MISSING
        allowed = f", tolerance {difference.tolerance:.2g}" if difference.tolerance else ""
        return f"{difference.largest:.2g} at step {difference.step}{allowed}"

    columns: Columns = {
        "verdict": lambda each: each.parity.verdict,
        "why": lambda each: each.parity.why,
        "loss": lambda each: largest(each.parity.loss),
        "gradient norm": lambda each: largest(each.parity.grad_norm),
    }
    curves = {each.name: each.loss for each in report.ran if each.loss}
    base = curves.pop(report.baseline, None)
    apart = {name: relative_differences(curve, base) for name, curve in curves.items() if base}
    equal = ", ".join(name for name, found in apart.items() if found and not any(found.values()))
    text = "Largest differences from the baseline, relative to tolerance."
    text += f" Loss equal to the last bit throughout: {equal}." if equal else ""
    return by_variant("Does it train the run that the baseline trains?", report.ran, columns, text)


def time_chart(report: Report) -> Chart | None:
    """Draw the share of each phase."""
    rows = []
    for each in report.ran:
        exposed = each.exposed_communication
        value = "" if exposed is None else f"exposed communication {share(exposed)}"
        if each.time_shares:
            rows.append(stacked_bar(each.name, each.time_shares, value))
    return draw_rows("Where the time goes", rows, "Of measured steps.") if rows else None


def time(report: Report) -> Table:
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
    return by_variant("Share of time", found, columns, text)


def experts(report: Report) -> Table:
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
    return by_variant("Balance of experts", found, columns, text)


def planned_memory(report: Report) -> Table:
    """Planned memory of a rank, next to the measured peak."""
    found = [each for each in report.ran if each.memory_formula]
    columns = parts(found, lambda each: each.memory_formula, gib)
    columns |= {
        "planned peak": lambda each: gib((each.planned or {}).get("memory_gib")),
        "measured peak": lambda each: gib(each.memory_gib),
        "measured states": lambda each: byte_size(each.state_bytes),
    }
    text = "Of the fullest rank, in GiB. On a CPU both peaks are of the whole process."
    return by_variant("Planned memory", found, columns, text)


def sent_chart(report: Report) -> Chart | None:
    """Draw the bytes sent in a step."""
    rows = [
        stacked_bar(each.name, each.sent_bytes, byte_size(sum(each.sent_bytes.values())))
        for each in report.ran
        if each.sent_bytes
    ]
    return draw_rows("Bytes sent per step by rank 0", rows) if rows else None


def sent(report: Report) -> Table:
    """Bytes sent in a step, by axis."""
    found = [each for each in report.ran if each.sent_bytes]
    notes = {each.name: each.sent_note for each in report.ran if each.sent_note}
    about = " ".join(f"{name}: {note}" for name, note in notes.items())
    if len(notes) == len(report.ran) and len(set(notes.values())) == 1:
        about = notes[report.ran[0].name]
    columns = parts(found, lambda each: each.sent_bytes, byte_size)
    text = f"By rank 0, by axis of the mesh. {about}"
    return by_variant("Bytes sent per step", found, columns, text)


def collectives(report: Report) -> Table:
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
    return Table(
        "Collectives of a step of rank 0; sums of losses and counts are not planned",
        ("variant", "axis", "operation", "recorded", "planned", "sent", "planned bytes"),
        rows,
    )


def settings(report: Report) -> Table | str:
    """The settings that are not the same in all variants."""
    found = [each for each in report.variants if each.differs]
    if not found:
        return "All variants have the same settings."
    columns: Columns = {
        "settings": lambda each: [Code(f"{k} = {written(v)}") for k, v in each.differs.items()]
    }
    return by_variant("Settings that are not the same in all variants", found, columns)


def conditions(report: Report) -> list[Table]:
    """The conditions of the measurement, and the machine."""
    given = {name: value for name, value in report.conditions.items() if value not in (None, "")}
    tables = {
        "Conditions": {"command": Code(report.command), "made": report.created} | given,
        "Machine of the runs": report.machine,
    }
    return [
        Table(title, ("what", "value"), [(k.replace("_", " "), written(v)) for k, v in of.items()])
        for title, of in tables.items()
    ]


def reasons(report: Report) -> Table:
    """The reasons why variants have no numbers, in full."""
    columns: Columns = {
        "status": lambda each: each.status,
        "why": lambda each: each.reasons or "no reason is known",
    }
    without = (each for each in report.variants if each.status != "ran")
    return by_variant("Variants without numbers", without, columns)


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


def gib(value: float | None) -> str:
    """Format GiB as a plan does; less than it shows is `MISSING`."""
    return MISSING if value is None or value < 0.005 else f"{value:.2f}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def byte_size(value: float | None) -> str:
    return MISSING if value is None else amount(value, "B")


def quartiles(spread: Spread | None) -> str:
    """The median, and the quartiles if they differ."""
    if spread is None:
        return MISSING
    low, high = spread.quartile_1, spread.quartile_3
    return count(spread.median) + (f" ({count(low)} to {count(high)})" if low < high else "")


def ratio(spread: Spread | None) -> str:
    """The median of ratios, with their minimum and maximum if there are several."""
    if spread is None:
        return MISSING
    range_text = f" ({spread.least:.2f} to {spread.most:.2f})"
    return f"{spread.median:.2f}x" + range_text * (spread.least < spread.most)

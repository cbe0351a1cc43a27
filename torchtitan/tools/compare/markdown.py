"""The report as Markdown: tables that read well as text too."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchtitan.tools.compare import words
from torchtitan.tools.compare.report import Difference, Report, Spread, Variant


def page(report: Report) -> str:
    """The whole document."""
    return "\n\n".join(block for block in _blocks(report) if block) + "\n"


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {report.title}"
    yield report.description
    yield "\n".join(f"- {sentence}" for sentence in words.verdict(report))
    yield _speed(report)
    yield "## Do they train the same run?"
    yield _parity(report)
    if lines := _reasons(report):
        yield "## What did not run"
        yield lines
    yield "## What differs"
    yield _differences(report)
    yield "## Where the time goes"
    yield _times(report)
    yield "## What is sent"
    yield _sent(report)
    yield "## Conditions"
    yield _conditions(report)
    if report.notes:
        yield "\n".join(f"- {note}" for note in report.notes)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def number(value: float | None, form: str, unit: str = "") -> str:
    """A value for people; a dash where there is none."""
    return words.MISSING if value is None else f"{format(value, form)}{unit}"


def _range(spread: Spread | None, form: str) -> str:
    if spread is None:
        return words.MISSING
    middle = format(spread.median, form)
    if spread.count == 1:
        return middle
    return f"{middle} ({format(spread.quartile_1, form)}-{format(spread.quartile_3, form)})"


def ratio(spread: Spread | None) -> str:
    """Median, and least and most of the rounds."""
    if spread is None:
        return words.MISSING
    rounds = f" ({spread.least:.2f}-{spread.most:.2f})" if spread.count > 1 else ""
    return f"{spread.median:.2f}{rounds}"


def _speed(report: Report) -> str:
    has_plan = any(variant.planned for variant in report.variants)
    head = [
        "variant",
        "ranks",
        "tokens/s/device",
        "ratio",
        "MFU",
        "peak GiB",
        "start s",
        "compile s",
    ]
    rows = []
    for each in report.variants:
        mfu = number(each.mfu and 100 * each.mfu, ".1f", " %")
        row = [
            each.name if each.status == "ran" else f"{each.name} ({each.status})",
            str(each.ranks),
            _range(each.tps, ",.0f"),
            ratio(each.ratio),
            mfu,
            number(each.memory_gib, ".2f"),
            number(each.startup_s, ".1f"),
            number(each.compile_s, ".1f"),
        ]
        if has_plan:
            planned = (each.planned or {}).get("tps")
            row.append(number(planned, ",.0f"))
        rows.append(row)
    legend = (
        "Tokens a second and device: median of the measured steps (quartiles). Ratio to "
        f"{report.baseline} of the same round: median (least-most)."
    )
    return table([*head, *["planned"] * has_plan], rows) + "\n\n" + legend


def _parity(report: Report) -> str:
    rows = []
    for each in report.variants:
        parity = each.parity
        rows.append(
            [each.name, parity.verdict, _apart(parity.loss), _apart(parity.grad_norm), parity.why]
        )
    head = ["variant", "verdict", "loss: largest difference", "gradient norm", "rule"]
    return table(head, rows)


def _apart(difference: Difference | None) -> str:
    if difference is None:
        return words.MISSING
    allowed = f" of {difference.tolerance:.1e}" if difference.tolerance else ""
    return f"{difference.largest:.1e}{allowed} (step {difference.step})"


def _reasons(report: Report) -> str:
    told = [variant for variant in report.variants if variant.reasons]
    return "\n".join(
        f"- **{each.name}** ({each.status}):\n"
        + "\n".join(f"  - `{line.replace('`', chr(39))}`" for line in each.reasons)
        for each in told
    )


def _differences(report: Report) -> str:
    known = [variant for variant in report.variants if variant.differs]
    keys = list(dict.fromkeys(key for variant in known for key in variant.differs))
    if not keys:
        return "Nothing but the machine and the moment."
    rows = [[key, *(_value(each, key) for each in known)] for key in keys]
    return table(["setting", *(each.name for each in known)], rows)


def _value(variant: Variant, key: str) -> str:
    value: Any = variant.differs.get(key)
    if key not in variant.differs or value is None:
        return words.MISSING
    return str(value).lower() if isinstance(value, bool) else str(value)


def _times(report: Report) -> str:
    known = [variant for variant in report.ran if variant.time_shares]
    phases = list(dict.fromkeys(name for variant in known for name in variant.time_shares))
    rows = [
        [
            each.name,
            *(number(100 * each.time_shares.get(phase, 0.0), ".1f", " %") for phase in phases),
            number(each.exposed_communication and 100 * each.exposed_communication, ".1f", " %"),
        ]
        for each in known
    ]
    legend = "Exposed communication is a part of the other columns: of a traced step."
    return table(["variant", *phases, "exposed communication"], rows) + "\n\n" + legend


def _sent(report: Report) -> str:
    axes = list(dict.fromkeys(axis for each in report.ran for axis in each.sent_bytes))
    if not axes:
        return "Nothing, or nothing that was recorded."
    rows = [
        [
            each.name,
            *(number(each.sent_bytes.get(axis, 0.0) / 1e6, ",.1f", " MB") for axis in axes),
            each.sent_note or "-",
        ]
        for each in report.ran
    ]
    return table(["variant (rank 0, in a step)", *axes, "note"], rows)


def _conditions(report: Report) -> str:
    facts = {**report.conditions, **report.machine, "command": report.command}
    facts["created"] = report.created
    rows = [
        [key.replace("_", " "), str(value)] for key, value in facts.items() if value not in ((), "")
    ]
    return table(["", "value"], rows)

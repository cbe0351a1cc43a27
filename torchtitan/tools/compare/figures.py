"""The figures of the page: where each is drawn, and what it shows in words and as a table.

`page/plots.js` draws them, from the same report; what stands here is there for whoever cannot see
a plot, or wants its numbers.
"""

from collections.abc import Callable, Iterable

from torchtitan.tools.compare.markup import figure, table, text
from torchtitan.tools.compare.report import Curve, Difference, Report, Variant
from torchtitan.tools.compare.words import MISSING, byte_size, count, digits, quartiles, share

MOST_ROWS = 40
"""Of a curve in a table; `report.json` has them all."""


def curves(report: Report) -> str:
    """Loss and gradient norm, and how far they are from the baseline's."""
    loss = curve(report, "loss", "Loss", lambda variant: variant.loss)
    norm = curve(report, "grad_norm", "Gradient norm", lambda variant: variant.grad_norm)
    if not loss + norm:
        return ""
    return f'<div id="controls"></div><div class="figures">{loss}{norm}</div>{parity(report)}'


def curve(report: Report, name: str, title: str, of: Callable[[Variant], Curve | None]) -> str:
    """One value over the run, and its difference from the baseline's."""
    found = {variant.name: given for variant in report.ran if (given := of(variant))}
    if not found:
        return ""
    ends = "; ".join(f"{key}: from {ends_of(given)}" for key, given in found.items())
    says = text(f"{title} by variant over the run. {ends}.")
    drawn = figure(
        name, title, says, f"Of the first run of each variant. {gaps(found)}", numbers(title, found)
    )
    if report.baseline not in found or len(found) == 1:
        return drawn
    title = f"{title}: difference from the baseline"
    says = text(f"{title}, relative to it, by variant. {farthest(report, name)}")
    caption = (
        "Relative to the baseline's value, without sign, on a logarithmic scale. A level bar is "
        "what is allowed, at the step where its variant is farthest by that measure. Where both "
        'are equal to the last bit there is no point. <span class="equal"></span>'
    )
    return drawn + figure(f"{name}-difference", title, says, caption, largest(report, name, title))


def ends_of(curve: Curve) -> str:
    return f"{digits(curve.values[0])} to {digits(curve.values[-1])}" if curve.values else "nothing"


def gaps(found: dict[str, Curve]) -> str:
    """What a reader has to know of values that cannot be drawn."""
    missing = [name for name, curve in found.items() if None in curve.values]
    return text(f"Not finite at some steps: {', '.join(missing)}.") if missing else ""


def numbers(title: str, found: dict[str, Curve]) -> str:
    """Values by step, a column for each variant."""
    steps = sorted({step for curve in found.values() for step in curve.steps})
    shown = thinned(steps)
    caption = f"{title} by step"
    if len(shown) < len(steps):
        caption += f": {len(shown)} of {len(steps)} steps; report.json has them all"
    by_step = {
        name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in found.items()
    }
    rows = (
        [str(step), *(digits(values.get(step)) for values in by_step.values())] for step in shown
    )
    return table(caption, ["step", *map(text, found)], rows)


def thinned(steps: list[int]) -> list[int]:
    """Steps at even distances, the first and the last among them."""
    if len(steps) <= MOST_ROWS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def difference(variant: Variant, name: str) -> Difference | None:
    return variant.parity.loss if name == "loss" else variant.parity.grad_norm


def farthest(report: Report, name: str) -> str:
    return " ".join(
        f"{variant.name}: {digits(found.largest)} at step {found.step}, "
        f"allowed {digits(found.tolerance or None)}."
        for variant in report.ran
        if (found := difference(variant, name))
    )


def largest(report: Report, name: str, title: str) -> str:
    rows = [
        [text(variant.name), *difference_cells(difference(variant, name))]
        for variant in report.ran
        if variant.name != report.baseline
    ]
    columns = ["variant", "difference", "at step", "allowed there"]
    return table(f"{title}, where it is farthest by what is allowed", columns, rows)


def difference_cells(found: Difference | None) -> list[str]:
    if found is None:
        return [MISSING] * 3
    return [digits(found.largest), str(found.step), digits(found.tolerance or None)]


def parity(report: Report) -> str:
    """The verdict on each run, with its reason."""
    rows = [
        [text(variant.name), variant.parity.verdict, text(variant.parity.why)]
        for variant in report.ran
    ]
    caption = "Does it train the run that the baseline trains?"
    return table(caption, ["variant", "verdict", "why"], rows, cards=True)


def speed(report: Report) -> str:
    found = [variant for variant in report.ran if variant.tps]
    if not found:
        return ""
    says = "; ".join(f"{v.name}: {count(v.tps.median)}" for v in found if v.tps)
    rows = []
    for variant in found:
        for run in variant.runs:
            median = run.tps.median if run.tps else None
            cells = [str(run.round), str(run.seed), count(median), quartiles(run.tps) or MISSING]
            rows.append([text(variant.name), *cells, text(run.folder), text(run.note or MISSING)])
    columns = ["variant", "round", "seed", "median", "middle half of its steps", "folder", "note"]
    return figure(
        "tps",
        "Tokens per second and device",
        text(f"Tokens per second and device, median of the measured steps. {says}."),
        "Bar: median of the measured steps of all rounds, with the middle half of them; dots: the"
        " median of each run.",
        table("Tokens per second and device, by run", columns, rows),
    )


def time(report: Report) -> str:
    """Phases of a step, and beside them what communication costs: it lies in several of them."""
    exposed = "exposed communication, of a traced step"
    found = {}
    for variant in report.ran:
        if variant.time_shares:
            more = variant.exposed_communication
            found[variant.name] = variant.time_shares | ({} if more is None else {exposed: more})
    caption = "Share of the time of measured steps, by phase."
    if any(exposed in shares for shares in found.values()):
        caption += (
            " The line below a bar is exposed communication: the share of a traced step in which"
            " rank 0 communicated and computed nothing. It is part of the phases above it."
        )
    return stack("time", "Where the time goes", found, share, caption)


def memory(report: Report) -> str:
    found = [variant for variant in report.ran if variant.memory_gib is not None]
    if not found:
        return ""
    rows = [[text(variant.name), digits(variant.memory_gib, "GiB")] for variant in found]
    says = "; ".join(f"{v.name}: {digits(v.memory_gib, 'GiB')}" for v in found)
    return figure(
        "memory",
        "Peak memory",
        text(f"Peak memory of the worst rank. {says}."),
        "Of the worst rank.",
        table("Peak memory of the worst rank", ["variant", "peak"], rows),
    )


def sent(report: Report) -> str:
    notes = {variant.name: variant.sent_note for variant in report.ran if variant.sent_note}
    words = " ".join(f"{name}: {note}" for name, note in notes.items())
    if len(notes) == len(report.ran) and len(set(notes.values())) == 1:
        words = next(iter(notes.values()))
    return stack(
        "sent",
        "Bytes sent in a step",
        {v.name: v.sent_bytes for v in report.ran if v.sent_bytes},
        byte_size,
        f"By rank 0, by axis of the mesh. {text(words)}",
    )


def stack(
    name: str,
    title: str,
    values: dict[str, dict[str, float]],
    show: Callable[[float | None], str],
    caption: str,
) -> str:
    """A figure of bars that are made of parts."""
    parts = list(dict.fromkeys(part for of in values.values() for part in of))
    if not parts:
        return ""
    rows = [
        [text(variant), *(show(of.get(part)) for part in parts)] for variant, of in values.items()
    ]
    says = "; ".join(f"{key}: {spoken(of, show)}" for key, of in values.items())
    numbers = table(title, ["variant", *map(text, parts)], rows)
    return figure(name, title, text(f"{title}. {says}."), caption, numbers)


def spoken(of: dict[str, float], show: Callable[[float | None], str]) -> str:
    return ", ".join(f"{part} {show(value)}" for part, value in of.items())


def figures(report: Report) -> Iterable[tuple[str, str, str]]:
    """Name, title and content of each section with plots, in order."""
    yield "curves", "Loss and gradient norm", curves(report)
    yield "speed", "Speed", speed(report) + time(report)
    yield "memory", "Memory", memory(report)
    yield "traffic", "Communication", sent(report)

"""A comparison in words: the verdict as sentences, and the notation of numbers.

The text is plain, for any form of a report; the only thing computed is which ratio is the greatest.
A number that was not measured is `MISSING`, never zero.
"""

from collections.abc import Iterable

from torchtitan.tools.compare.report import Report, Spread, Variant

MISSING = "-"
SAME = ("baseline", "same", "within seeds")
"""Verdicts of variants that train the run that the baseline trains."""


def verdict(report: Report) -> tuple[str, ...]:
    """The results, a sentence each, the most important first."""
    base = quoted(report.baseline)
    trained = {
        "same": f"Train the same run as {base}",
        "within seeds": f"As near to {base} as its own seeds are to each other",
        "differs": "Do not train the same run",
        "not judged": "Not judged whether they train the same run",
    }
    absent = {"cannot run": "Cannot run", "failed": "Failed", "not run": "Not run"}
    found = speed(report)
    for kind, title in trained.items():
        if names := [v.name for v in report.ran if v.parity.verdict == kind]:
            found.append(f"{title}: {listed(names)}.")
    for status, title in absent.items():
        if names := [v.name for v in report.variants if v.status == status]:
            found.append(f"{title}: {listed(names)}.")
    return tuple(found)


def speed(report: Report) -> list[str]:
    """The fastest variant, and its lead, in sentences."""
    rivals = [v for v in report.ran if v.ratio is not None and v.name != report.baseline]
    if not rivals:
        return ["No variant could be compared with the baseline in speed."]
    best = fastest(rivals)
    sentences = [f"{quoted(best.name)} {lead(best, report)}"]
    if best.ratio and best.ratio.median <= 1:
        sentences[0] = f"The baseline, {quoted(report.baseline)}, is the fastest. {sentences[0]}"
    if best.parity.verdict not in SAME:
        known = "is not known to train" if best.parity.verdict == "not judged" else "does not train"
        sentences[0] += f" But it {known} the baseline's run."
        honest = [v for v in rivals if v.parity.verdict in SAME]
        if honest:
            best = fastest(honest)
            name = quoted(best.name)
            sentences.append(f"Of those that train it, {name} {lead(best, report)}")
        elif len(rivals) > 1:
            sentences.append("None of the others that were compared is known to train it.")
    return sentences


def fastest(variants: Iterable[Variant]) -> Variant:
    """The variant with the highest ratio to the baseline of the same round."""
    return max(variants, key=lambda v: v.ratio.median if v.ratio else 0.0)


def lead(variant: Variant, report: Report) -> str:
    """The speed of a variant relative to the baseline, to follow its name in a sentence."""
    ratio = variant.ratio
    assert ratio is not None
    faster = "is the fastest:" if ratio.median > 1 else "comes nearest to the baseline, with"
    words = f"{faster} {ratio.median:.3f} times the {report.unit} per second and device of"
    words += f" {quoted(report.baseline)}"
    if ratio.count == 1:
        return f"{words} in the only round, so its spread is not known."
    words += f" ({ratio.least:.3f} to {ratio.most:.3f} in {ratio.count} rounds)."
    if ratio.least <= 1 <= ratio.most:
        words += " These rounds do not agree on which of the two is faster."
    return words


def quoted(name: str) -> str:
    return f"“{name}”"


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(quoted, names))


def count(value: float | None) -> str:
    """Format units, or units per second: 12,345; small numbers with three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def digits(value: float | None, unit: str = "") -> str:
    """Format a number with four significant digits."""
    return MISSING if value is None else f"{value:.4g}{unit and ' ' + unit}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}".replace("%", " %")


def byte_size(value: float | None) -> str:
    """Format bytes in powers of 1000, as on the axes of plots."""
    if value is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.4g} {unit}"


def median(spread: Spread | None) -> str:
    return MISSING if spread is None else count(spread.median)


def quartiles(spread: Spread | None) -> str:
    """The range of the middle half of the values, if there are several."""
    if spread is None or spread.count == 1:
        return ""
    return f"{count(spread.quartile_1)} to {count(spread.quartile_3)}"


def span(spread: Spread | None) -> str:
    """The minimum and maximum of ratios, if they are not all the same."""
    if spread is None or spread.least == spread.most:
        return ""
    return f"{spread.least:.3f} to {spread.most:.3f}"

"""A comparison in words: the verdict as sentences, and how numbers are written.

Plain text, for any form of a report; nothing is computed but which of the ratios is the greatest. A
number that was not measured is `MISSING`, never zero.
"""

from collections.abc import Iterable

from torchtitan.tools.compare.report import Report, Spread, Variant

MISSING = "-"
SAME = ("baseline", "same", "within seeds")
"""Verdicts of variants that train the run that the baseline trains."""


def verdict(report: Report) -> tuple[str, ...]:
    """What came out, a sentence each, the most important first."""
    return (*speed(report), *parity(report), *absent(report))


def speed(report: Report) -> list[str]:
    """Which variant is the fastest, and by how much."""
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
    """By the ratio to the baseline of the same round, which leaves the machine's moods out."""
    return max(variants, key=lambda v: v.ratio.median if v.ratio else 0.0)


def lead(variant: Variant, report: Report) -> str:
    """How fast a variant is beside the baseline: the end of a sentence that its name begins."""
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


def parity(report: Report) -> list[str]:
    """Which variants train the baseline's run."""
    base = quoted(report.baseline)
    titles = {
        "same": f"Train the same run as {base}",
        "within seeds": f"As near to {base} as its own seeds are to each other",
        "differs": "Do not train the same run",
        "not judged": "Not judged whether they train the same run",
    }
    found = []
    for kind, title in titles.items():
        names = [v.name for v in report.ran if v.parity.verdict == kind]
        if names:
            found.append(f"{title}: {listed(names)}.")
    return found


def absent(report: Report) -> list[str]:
    """Which variants have no numbers."""
    titles = {"cannot run": "Cannot run", "failed": "Failed", "not run": "Not run"}
    found = []
    for status, title in titles.items():
        names = [v.name for v in report.variants if v.status == status]
        if names:
            found.append(f"{title}: {listed(names)}.")
    return found


def quoted(name: str) -> str:
    return f"“{name}”"


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(quoted, names))


def count(value: float | None) -> str:
    """Units, or units per second: 12,345; small ones with three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def digits(value: float | None, unit: str = "") -> str:
    """Four digits that count."""
    return MISSING if value is None else f"{value:.4g}{unit and ' ' + unit}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}".replace("%", " %")


def byte_size(value: float | None) -> str:
    """In powers of 1000, as the axes of plots have it."""
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
    """Between which values the middle half lies, if there are several."""
    if spread is None or spread.count == 1:
        return ""
    return f"{count(spread.quartile_1)} to {count(spread.quartile_3)}"


def span(spread: Spread | None) -> str:
    """The least and the greatest of ratios, if they are not all the same."""
    if spread is None or spread.least == spread.most:
        return ""
    return f"{spread.least:.3f} to {spread.most:.3f}"

"""The results of a comparison in sentences; only the greatest ratio is computed."""

from collections.abc import Iterable

from torchtitan.tools.compare.results import Report, Variant

SAME = ("baseline", "same", "within seeds")
"""Verdicts of variants that train the run that the baseline trains."""


def verdict(report: Report) -> tuple[str, ...]:
    """The results, a sentence each: what trains the same run, then what is faster."""
    base = quoted(report.baseline)
    trained = {
        "same": f"Train the same run as {base}, with the same loss",
        "within seeds": f"As near to {base} as its own seeds are to each other",
        "differs": "Do not train the same run",
        "not judged": "Not judged whether they train the same run",
    }
    absent = {"cannot run": "Cannot run", "failed": "Failed", "not run": "Not run"}
    found = []
    for kind, title in trained.items():
        if names := [v.name for v in report.ran if v.parity.verdict == kind]:
            found.append(f"{title}: {listed(names)}.")
    found += speed(report)
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
    what = f"times the {report.unit} per second and device of {quoted(report.baseline)}"
    words = f"{'is the fastest:' if ratio.median > 1 else 'reaches'} {ratio.median:.3f} {what}"
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

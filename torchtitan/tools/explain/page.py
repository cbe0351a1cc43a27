"""The facts of a run, and what to try, on a page of plain text."""

import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

from torchtitan.tools.explain.advice import Advice
from torchtitan.tools.explain.facts import Facts, Traces
from torchtitan.tools.explain.predicted import Prediction
from torchtitan.tools.explain.slowest_ranks import Slowest
from torchtitan.tools.history import show

WIDTH: Final = 100
BAR = 30
LABEL = 10
# Percent of a step.
NOTABLE = 1.0
# Seconds of a pause that is not worth mentioning.
SHORT = 0.05
IN_WORDS: Final = {
    "data": "waiting for the next batch",
    "forward": "with its collectives",
    "backward": "with its collectives",
    "pipeline": "waiting for other stages",
    "clip": "norm of the gradients",
    "sync": "ranks agree on loss and status",
    "optimizer": "the update",
    "other": "what is left",
}
"""Descriptions of the phases of a step, see `torchtitan.timeline`."""


def page(facts: Facts, advice: Sequence[Advice], prediction: Prediction) -> str:
    """Write the whole page."""
    lines = [*_about(facts), "", *_phases(facts), "", *_predicted(prediction)]
    lines += ["", *_between_ranks(facts)]
    return "\n".join([*lines, "", *_advice(advice, facts)])


def _about(facts: Facts) -> Iterator[str]:
    recipe = facts.recipe
    model = " ".join(str(recipe[k]) for k in ("model.name", "model.flavor") if k in recipe)
    where = f"{facts.ranks} x {facts.device}" if facts.ranks else ""
    layout = ", ".join(f"{axis} {size}" for axis, size in facts.layout.items())
    yield _line(
        "run", "; ".join(part for part in (str(facts.folder), model, where, layout) if part)
    )
    yield _line("state", facts.state.words)
    steps = recipe.get("training.steps")
    done = f"step {facts.step:,}" + (f" of {steps:,}" if steps else "")
    batch = f", {facts.units_a_step:,} {facts.unit} each" if facts.units_a_step else ""
    yield _line("done", f"{done}{batch}; {facts.units:,} {facts.unit}")
    added = [key for key in recipe if fnmatchcase(key, "auxiliary_losses.*.name")]
    if added:
        weighted = (f"{recipe[key[:-4] + 'weight']:g} x {recipe[key]}" for key in added)
        yield _line("loss", " + ".join(["that of the task", *weighted]))
    mfu = "" if facts.mfu is None else f", MFU {facts.mfu:.1%}"
    speed = (
        f"{show(facts.rate, ',.0f')} {facts.unit}/s/device, {show(facts.step_s, '.3g')} s per step"
        f"{mfu} (medians of the reports after the first)"
    )
    yield _line("speed", speed if facts.rate else "unknown: there is no report after the first")
    if facts.memory_gib is not None:
        whole = "device" if facts.on_cuda else "machine"
        peak = f"{facts.memory_gib:.2f} GiB at most, {facts.memory_pct:.0f}% of the {whole}"
        yield _line("memory", f"{peak}; the worst rank")
    yield _line("start", _start(facts))
    counts = {"step skipped": facts.skipped} | {
        name: facts.events.get(name, 0) for name in ("rollback", "restart", "straggler")
    }
    incidents = [f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n]
    yield _line(
        "incidents", ", ".join(incidents).replace("step skippeds", "steps skipped") or "none"
    )


def _start(facts: Facts) -> str:
    if facts.first_step_s is None:
        return "unknown: there is no event log (metrics.save_events)"
    before = facts.before_first_step_s
    startup = "" if before is None else f"startup {before:.1f} s, "
    compiling = f"; {facts.compile_s:.1f} s of it all compiling" if facts.compile_s else ""
    return f"{startup}first step {facts.first_step_s:.1f} s{compiling}"


def _phases(facts: Facts) -> Iterator[str]:
    if not facts.phases:
        yield "Where a step goes is unknown: there is no report of it after the first."
        return
    whole = sum(facts.phases.values())
    yield f"Where a step of {whole:.3g} s goes (mean of all ranks, after the first report):"
    longest = max(facts.phases.values()) or 1.0
    for name, seconds in facts.phases.items():
        bar = "#" * round(BAR * seconds / longest)
        numbers = f"{1000 * seconds:10.1f} ms {seconds / whole:6.1%}"
        yield f"  {name:<{LABEL}} {numbers}  {bar:<{BAR}}  {IN_WORDS.get(name, '')}".rstrip()
    times = {"validation": f"{facts.validations} times, "} if facts.validations > 1 else {}
    long = [
        f"{name} {seconds:.1f} s ({times.get(name, '')}{facts.share_of_pause(name):.1%} of the "
        "time)"
        for name, seconds in facts.pauses.items()
        if seconds >= SHORT
    ]
    if long:
        yield f"Between steps: {', '.join(long)}."


def _predicted(prediction: Prediction) -> Iterator[str]:
    """Yield a table of the quantities, predicted and measured."""
    if prediction.rows:
        where = f" on {prediction.hardware}" if prediction.hardware else ""
        yield f"Prediction by the plan of its recipe{where}, with limits, and measurement:"
        yield f"  {'':<26} {'predicted':>9} {'':<20} {'measured':>9}"
    for row in prediction.rows:
        numbers = (_digits(value) for value in row[2:])
        predicted, measured, low, high = numbers
        limits = "" if row.low is None else f"({low} to {high})"
        yield (
            f"  {row.quantity:<26} {predicted:>9} {limits:<20} {measured:>9} {row.unit}"
        ).rstrip()
    for note in prediction.notes:
        yield textwrap.fill(f"note: {note}", WIDTH, initial_indent="  ", subsequent_indent="  ")


def _digits(value: float | None) -> str:
    """Format a number with three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _between_ranks(facts: Facts) -> Iterator[str]:
    if facts.sent:
        sent = ", ".join(f"{_bytes(size)} over {axis}" for axis, size in facts.sent.items())
        is_complete = facts.on_cuda or facts.layout.get("pp", 1) == 1
        rest = "" if is_complete else ", and what gloo does not record: from stage to stage"
        yield f"Rank 0 sends per step: {sent}{rest}."
    if facts.traces:
        yield from describe_traces(facts.traces)
    else:
        yield f"There is no trace; torchtitan profile {facts.folder} has a live run write one."
    yield from _slowest(facts.slowest, facts.on_cuda)


def describe_traces(traces: Traces) -> Iterator[str]:
    """Describe the traces of all ranks."""
    steps = f"{traces.steps} step{'s' * (traces.steps != 1)}"
    yield f"The newest trace, of {steps} ({traces.folder}):"
    for rank, compute in traces.compute_s.items():
        yield (
            f"  rank {rank:<4} computes {1000 * compute:.1f} ms per step; exposed communication "
            f"{traces.exposed[rank]:.1%}, idle {traces.idle[rank]:.1%}"
        )
    if traces.left_out:
        yield f"  {traces.left_out} ranks more were not read"


def _slowest(slowest: Sequence[Slowest], on_cuda: bool) -> Iterator[str]:
    if not slowest:
        return
    notable = [one for one in slowest if one.percent >= NOTABLE]
    if notable:
        yield "The slowest rank by phase, and what it works longer than the median rank:"
    else:
        yield f"No rank works longer in a phase than the median rank by {NOTABLE:g}% of a step."
    for one in notable:
        yield (
            f"  {one.phase:<{LABEL}} rank {one.rank}, {one.percent:.1f}% of a step; "
            f"slowest in {one.often:.0%} of the reports"
        )
    if on_cuda:
        yield (
            "  On CUDA only data and optimizer tell ranks apart: in forward and backward the "
            "collectives\n  keep them in step. The compute time in the traces of all ranks does."
        )


def _advice(advice: Sequence[Advice], facts: Facts) -> Iterator[str]:
    if not advice:
        known = facts.phases or facts.traces
        yield "Nothing stands out." if known else "There are no numbers to give advice from."
        return
    yield "What to try:"
    for number, one in enumerate(advice, 1):
        text = f"{number}. {one.because[0].upper()}{one.because[1:]}: {one.attempt}."
        yield textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="     ")


def _line(label: str, text: str) -> str:
    return textwrap.fill(f"{label:<{LABEL}} {text}", WIDTH, subsequent_indent=" " * (LABEL + 1))


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

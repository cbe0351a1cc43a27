"""Builds a report from finished runs, and decides by their curves whether two train the same."""

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.checks import load_job
from torchtitan.config import CannotRun, RecipeError, Registry, needs_wing
from torchtitan.job import RECIPE_FILE, JobConfig
from torchtitan.models import MODELS
from torchtitan.tasks import TASKS
from torchtitan.timeline import PHASES, REST
from torchtitan.tools.compare.results import (
    Collectives,
    ComparedPlan,
    CurveDifference,
    Parity,
    Report,
    RunCurve,
    Spread,
    Status,
    Variant,
)
from torchtitan.tools.compare.runs import MeasuredRun, spread
from torchtitan.tools.history import RunHistory, median

GROWTH = {"float32": 2.0**-20, "bfloat16": 2.0**-12}
NORM = 30.0
JUDGED = 10


def compare_curves(
    ours: RunCurve,
    theirs: RunCurve,
    our_norms: RunCurve,
    their_norms: RunCurve,
    jobs: Sequence[JobConfig],
) -> Parity:
    """Decide whether a variant trains the same run as the baseline.

    Recipes that differ only in layout or technique have the same loss in exact arithmetic, so what
    tells them apart is rounding. Each update amplifies a difference, and training is chaotic: 1e-7
    in the first step may be 1e-2 after forty, although neither run is wrong. So the first steps are
    compared, by the coarser dtype of computation,

        relative difference at step s <= GROWTH[dtype] s,   s = 1 ... JUDGED

    and for the gradient norm NORM times as much. GROWTH is 16 unit roundoffs of float32, and 1/16
    of one of bfloat16, whose errors average out over the tokens of a batch and whose sums are
    float32; the numbers were measured (benchmarks/README.md). Float8 has too few bits for a bound.

    Args:
        ours, our_norms: loss and gradient norm of the variant.
        theirs, their_norms: those of the baseline.
        jobs: both recipes.
    """
    if any(job.convert for job in jobs):
        differences = (difference(ours, theirs, 0.0), difference(our_norms, their_norms, 0.0))
        why = "linears in Float8 or MXFP8 have no tolerance by dtype"
        return Parity("not judged", why, *differences)
    dtype = max((job.training.mixed_precision_param for job in jobs), key=GROWTH.__getitem__)
    growth = GROWTH[dtype]
    loss = difference(ours, theirs, growth)
    norm = difference(our_norms, their_norms, NORM * growth)
    if loss is None or norm is None:
        return Parity("not judged", "they have no steps in common, or none that is finite")
    judged = [step for step in relative_differences(ours, theirs) if step <= JUDGED]
    steps = f"steps {min(judged)} to {max(judged)}"
    rule = f"{growth:.1e} per step ({dtype}; {NORM:g} times that for the norm), {steps}"
    if loss.largest <= loss.tolerance and norm.largest <= norm.tolerance:
        overall = difference(ours, theirs, 0.0)
        assert overall is not None, "what is judged is a part of all"
        apart = f"; at step {overall.step} the loss is {overall.largest:.1e} off"
        later = apart if overall.largest else "; the loss is equal to the last bit"
        return Parity("same", f"within {rule}{later}", loss, norm)
    return Parity("differs", f"more than {rule}", loss, norm)


def difference(ours: RunCurve, theirs: RunCurve, growth: float) -> CurveDifference | None:
    """Find the largest difference relative to its tolerance; None without common steps.

    The tolerance is `growth` times the step, in the steps that are judged; if `growth` is 0,
    nothing is judged and all steps are compared.
    """
    found = [
        CurveDifference(apart, step, growth * step)
        for step, apart in relative_differences(ours, theirs).items()
        if not growth or step <= JUDGED
    ]
    return max(found, key=lambda one: one.largest / (one.tolerance or 1.0), default=None)


def relative_differences(ours: RunCurve, theirs: RunCurve) -> dict[int, float]:
    """Compute the differences by step, where both curves have a value."""
    baseline = dict(zip(theirs.steps, theirs.values, strict=True))
    return {
        step: abs(value - other) / abs(other)
        for step, value in zip(ours.steps, ours.values, strict=True)
        if value is not None and (other := baseline.get(step))
    }


PLANS = Registry[Callable[[JobConfig, int, str, str], ComparedPlan]]("comparison")
"""Its entry `plan` plans a recipe on a number of ranks, for a type and a name of devices."""
NO_DIFFERENCE = ("job.", "profiling.", "metrics.", "training.steps")
"""Prefixes of keys that have no influence on the training of a run."""
DATA = ("data.", "debug.seed", "training.seq_len")
SMALL = 1e-3
"""Share of the time below which a pause is not listed by itself."""
MACHINE = ("device", "platform", "torchtitan", "git_commit", "torch", "python")


@dataclass(frozen=True)
class Candidate:
    """A variant with the runs that it has."""

    name: str
    job: JobConfig | None
    ranks: int
    status: Status
    reasons: tuple[str, ...] = ()
    runs: tuple[MeasuredRun, ...] = ()

    @property
    def flat(self) -> dict[str, Any]:
        """The settings by dotted key, and the number of ranks."""
        if self.job is None:
            return {}
        settings = self.job.flat().items()
        return {"ranks": self.ranks} | {
            k: v for k, v in settings if not k.startswith(NO_DIFFERENCE)
        }


def read_run(name: str, folder: Path, warmup: int) -> Candidate:
    """Read an existing run, from a study or not."""
    history = RunHistory.open(folder)
    ranks = int(history.environment.get("ranks", 1))
    job, reasons = None, tuple[str, ...]()
    try:
        recipe = folder / RECIPE_FILE
        if recipe.is_file():
            job = load_job(recipe, (), None, "cuda", exempt={"job.hardware"}).config
    except CannotRun as error:
        reasons = tuple(error.lines)
    if not history.reports:
        return Candidate(name, job, ranks, "failed", ("it ended before its first report",))
    seed = job.debug.seed if job else 0
    run = MeasuredRun(folder, 1, seed, warmup, None)
    return Candidate(name, job, ranks, "ran", reasons, (run,))


def report(
    candidates: Sequence[Candidate],
    baseline: str,
    *,
    title: str,
    description: str,
    conditions: Mapping[str, Any],
    root: Path,
) -> Report:
    """The report; `root` is the folder it will be written to."""
    base = next(each for each in candidates if each.name == baseline)
    differing = _differing(candidates)
    plans = [_plan(each) for each in candidates]
    variants = tuple(
        _variant(each, base, differing, root, planned)
        for each, planned in zip(candidates, plans, strict=True)
    )
    machines = [run.history.environment for each in candidates for run in each.runs]
    return Report(
        title=title,
        description=description,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        command=shlex.join(["torchtitan", *sys.argv[1:]]),
        machine={key: machines[0].get(key) for key in MACHINE} if machines else {},
        conditions=dict(conditions),
        baseline=baseline,
        variants=variants,
        notes=tuple(_notes(candidates, variants, machines, plans)),
    )


def _differing(candidates: Sequence[Candidate]) -> list[str]:
    """The settings that are not the same in all recipes, in the order of a recipe."""
    flats = [each.flat for each in candidates if each.job is not None]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in keys if any(flat.get(key) != flats[0].get(key) for flat in flats)]


def _variant(
    each: Candidate,
    base: Candidate,
    differing: list[str],
    root: Path,
    planned: ComparedPlan | str | None,
) -> Variant:
    job, flat = each.job, each.flat
    degrees = job.degrees(each.ranks) if job and each.status != "cannot run" else None
    first = each.runs[0] if each.runs else None
    collectives, sent, sent_note = _traffic(each, planned)
    task = TASKS[MODELS[job.model.name].task] if job else None
    units = 0
    if job and task and degrees:
        units = job.global_batch(degrees) * task.units(job.training.seq_len)
    return Variant(
        name=each.name,
        status=each.status,
        reasons=each.reasons,
        differs={key: flat[key] for key in differing if key in flat},
        ranks=each.ranks,
        layout=degrees._asdict() if degrees else {},
        unit=task.unit if task else "tokens",
        units_per_step=units,
        runs=tuple(run.summary(root) for run in each.runs),
        tps=spread([tps for run in each.runs for tps in run.tps]),
        ratio=_ratio(each, base),
        step_s=spread([seconds for run in each.runs for seconds in run.step_seconds]),
        memory_gib=max((run.memory_gib for run in each.runs if run.memory_gib), default=None),
        mfu=median(mfu for run in each.runs for mfu in run.mfu),
        time_shares=_shares(each.runs),
        exposed_communication=median(run.exposed for run in each.runs),
        sent_bytes=sent,
        sent_note=sent_note,
        collectives=collectives,
        planned=planned.figures if isinstance(planned, ComparedPlan) else None,
        memory_formula=planned.memory_gib if isinstance(planned, ComparedPlan) else {},
        state_bytes=first.state_bytes if first else None,
        startup_s=median(run.startup_s for run in each.runs),
        compile_s=median(run.compile_s for run in each.runs),
        parity=_parity(each, base),
        loss=first.curve("loss") if first else None,
        grad_norm=first.curve("grad_norm") if first else None,
        experts=first.experts if first else {},
        expert_loads=first.history.expert_loads if first else {},
    )


def _ratio(each: Candidate, base: Candidate) -> Spread | None:
    theirs = {run.round: median(run.tps) for run in base.runs}
    pairs = [(median(run.tps), theirs.get(run.round)) for run in each.runs]
    return spread([ours / other for ours, other in pairs if ours and other])


def _shares(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for run in runs:
        for name, each in run.seconds_by_phase().items():
            seconds[name] = seconds.get(name, 0.0) + each
    total = sum(seconds.values())
    for name in [name for name in seconds if name not in PHASES]:
        if seconds[name] < SMALL * total:
            seconds[REST] = seconds.get(REST, 0.0) + seconds.pop(name)
    return {name: each / total for name, each in seconds.items()} if total else {}


def sent_bytes(each: Candidate) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by axis."""
    return _traffic(each, _plan(each))[1]


def _traffic(
    each: Candidate, plan: ComparedPlan | str | None
) -> tuple[tuple[Collectives, ...], dict[str, float], str]:
    """Collectives of a step, recorded and planned; their bytes by axis, and a note on these.

    Messages, which gloo does not record, are those of the plan.
    """
    if not each.runs:
        return (), {}, ""
    run = each.runs[0]
    if run.left_out:
        return (), run.sent, run.left_out
    recorded = {(kind["axis"], kind["operation"]): kind for kind in run.collectives}
    planned = plan.collectives if isinstance(plan, ComparedPlan) else {}
    kinds, by_axis, estimated = [], dict(run.sent), []
    for kind in sorted(recorded.keys() | planned.keys()):
        axis, operation = kind
        found = recorded.get(kind, {"count": 0, "bytes": 0.0})
        count, size = planned.get(kind, (None, None))
        if operation == "send" and kind not in recorded and not run.has_messages:
            found = {"count": None, "bytes": None}
            by_axis[axis] = by_axis.get(axis, 0.0) + (size or 0.0)
            estimated.append(axis)
        kinds.append(Collectives(axis, operation, found["count"], found["bytes"], count, size))
    axes = ", ".join(estimated)
    note = f"messages of {axes}: planned, as gloo records none" if estimated else ""
    return tuple(kinds), by_axis, note


def _plan(each: Candidate) -> ComparedPlan | str | None:
    """Plan a variant on the device of its runs, or say why it cannot be; None without runs."""
    if each.job is None or not each.runs:
        return None
    history = each.runs[0].history
    return plan_of(each.job, each.ranks, history.device_type, history.device or "")


def plan_of(job: JobConfig, ranks: int, device_type: str, device: str) -> ComparedPlan | str:
    """Plan a recipe on devices of this name, or say why it cannot be."""
    if "plan" not in PLANS:
        return needs_wing("plan")
    try:
        return PLANS["plan"](job, ranks, device_type, device)
    except RecipeError as error:
        return error.lines[0]


def _parity(each: Candidate, base: Candidate) -> Parity:
    if each.name == base.name:
        return Parity("baseline", "the others are compared with it")
    if not each.runs or not base.runs:
        return Parity("not judged", "one of the two has no finished run")
    if each.job is None or base.job is None:
        return Parity("not judged", "the recipe of one of the two is not known")
    mine, theirs = each.flat, base.flat
    for key in dict.fromkeys([*mine, *theirs]):
        if key.startswith(DATA) and mine.get(key) != theirs.get(key):
            return Parity("not judged", f"they are not trained on the same data: {key}")
    batches = [c.job.global_batch(c.job.degrees(c.ranks)) for c in (each, base) if c.job]
    if batches[0] != batches[1]:
        return Parity(
            "not judged", f"their global batches have {batches[0]} and {batches[1]} sequences"
        )
    ours, base_run = each.runs[0], base.runs[0]
    return compare_curves(
        ours.curve("loss"),
        base_run.curve("loss"),
        ours.curve("grad_norm"),
        base_run.curve("grad_norm"),
        (each.job, base.job),
    )


def _notes(
    candidates: Sequence[Candidate],
    variants: Sequence[Variant],
    machines: Sequence[Mapping[str, Any]],
    plans: Sequence[ComparedPlan | str | None],
) -> list[str]:
    notes = []
    for each, planned in zip(candidates, plans, strict=True):
        if isinstance(planned, str):
            notes.append(f"{each.name} has no plan: {planned}.")
    if any(isinstance(planned, ComparedPlan) and not planned.is_on_hardware for planned in plans):
        notes.append(
            "Without known hardware (job.hardware), a plan has no speed, and no memory outside the "
            "allocator."
        )
    counts = sorted({(v.units_per_step, v.unit) for v in variants if v.units_per_step})
    if len(counts) > 1:
        listed = ", ".join(f"{count:,} {unit}" for count, unit in counts)
        notes.append(f"The variants train on different amounts per step: {listed}.")
    for key in MACHINE:
        found = sorted({str(machine.get(key)) for machine in machines})
        if len(found) > 1:
            notes.append(f"The runs are not of one {key}: {', '.join(found)}.")
    for each in candidates:
        losses = [run.curve("loss") for run in each.runs]
        apart = max(
            (
                abs(a - b) / abs(b)
                for one in losses[1:]
                for a, b in zip(one.values, losses[0].values, strict=False)
                if a is not None and b
            ),
            default=0.0,
        )
        if apart:
            notes.append(f"Rounds of {each.name} differ among themselves: the loss by {apart:.1e}.")
    if any(each.exposed_communication is not None for each in variants):
        notes.append(
            "Exposed communication is of one traced step of rank 0, which is slower than others."
        )
    assert all(math.isfinite(each.tps.median) for each in variants if each.tps)
    return notes

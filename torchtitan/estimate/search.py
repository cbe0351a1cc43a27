"""Search of the valid layouts of a recipe for the fastest that fits on given hardware.

All layouts are enumerated, and each gets a bound of its time and memory from a few numbers of the
model. Layouts are planned in the order of these bounds, two at a time, and only plans are reported.
A layout with the same kernels as a planned one is expected to exceed its bound as much. The search
ends when no other layout is expected to be among the fastest plans, or its time is up.

What is computed does not change: neither the batch of a step, nor precision, nor the optimizer.
"""

import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.checks import problems
from torchtitan.checks.memory_limits import of_rank
from torchtitan.config import Config, PlannedWorld
from torchtitan.device import GIB
from torchtitan.estimate.hardware import Hardware, Link, dtype_name
from torchtitan.estimate.plan import Range, plan
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import name_parameters, state_bytes
from torchtitan.parallel.schedules import SCHEDULES

Changes = Mapping[str, Any]
"""Settings of a layout by dotted key."""

PROCESSES = 2
"""Layouts that are planned at the same time."""
TOP = 5
"""Number of layouts that fit to find, of which none is expected to be slower than one left out."""
ALL = 64
"""Number of layouts up to which every one is planned, if there is time."""
LEAST_POSITIONS = 1024
"""Positions of a sequence that each rank of context parallelism has at least."""
KEPT = 0.6
"""Share of the counted activations of a block that compiled code keeps at least."""
TP, PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CP, COPIES = (
    "parallelism.context_parallel_degree",
    "parallelism.data_parallel_replicate_degree",
)
SHARDS = "parallelism.data_parallel_shard_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
SIZE = "parallelism.pipeline_parallel_microbatch_size"
RESHARD = "parallelism.fsdp_reshard_after_forward"
LOCAL, BATCH = "training.local_batch_size", "training.global_batch_size"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
BUDGET = "activation_checkpoint.memory_budget"
STAGES_BY_HAND = (
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_layers_per_stage",
    "module_fqns_per_model_part",
)


class Recomputation(NamedTuple):
    """Choice of the activations that are recomputed."""

    changes: Changes
    again: float
    """Share of the forwards that is repeated."""
    kept: float
    """Share of the activations of blocks that is kept."""


RECOMPUTATION: Mapping[str, Recomputation] = {
    "none": Recomputation({MODE: "none"}, 0.0, 1.0),
    "op": Recomputation({MODE: "selective", OPTION: "op"}, 0.3, 0.4),
    "every second block": Recomputation({MODE: "selective", OPTION: 2}, 0.5, 0.5),
    "full": Recomputation({MODE: "full"}, 1.0, 0.0),
    "memory budget": Recomputation({MODE: "memory_budget", BUDGET: 0.5}, 0.1, 0.4),
}


class PlannedLayout(NamedTuple):
    """Layout of a recipe with the numbers of its plan."""

    changes: Changes
    fits: bool
    reserved_gib: Range
    tokens_per_second_per_device: float
    seconds_per_step: float
    mfu: float | None
    parts: Mapping[str, float]
    """Seconds of a step by cause."""


@dataclass
class SearchResult:
    """Layouts that were planned, the fastest that fits first."""

    layouts: list[PlannedLayout] = field(default_factory=list)
    too_large: list[PlannedLayout] = field(default_factory=list)
    """Planned layouts that do not fit."""
    enumerated: int = 0
    refused: int = 0
    """Layouts that the checks of recipes refuse."""
    without_room: int = 0
    """Layouts that cannot fit by a bound of their memory."""
    failed: dict[str, int] = field(default_factory=dict)
    """Layouts whose plan failed, by the reason."""
    is_complete: bool = False
    """Whether no other layout is expected to be among the fastest."""
    seconds: float = 0.0


def with_changes(job: JobConfig, changes: Changes) -> JobConfig:
    """Return a recipe with other settings."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    new = {}
    for section, settings in sections.items():
        config: Config = getattr(job, section)
        new[section] = config.model_copy(update=settings)
    return job.model_copy(update=new)


def layouts(job: JobConfig, ranks: int, ranks_per_node: int) -> Iterator[Changes]:
    """Yield layouts of a recipe on a number of ranks; most, but not all, are valid."""
    spec, args, given = MODELS[job.model.name], job.model_args(), job.parallelism
    length, batch = job.training.seq_len, job.global_batch(job.degrees(ranks))
    layers = len(spec.blocks(build_empty(spec.build, args, length)))
    heads = spec.tensor_splits(args).heads.values()
    by_hand = any(getattr(given, key) for key in STAGES_BY_HAND)
    for tp in _divisors(ranks):
        if tp > ranks_per_node or (tp > 1 and any(count % tp for count in heads)):
            continue
        for pp in _divisors(ranks // tp):
            if pp > layers + 2 or (by_hand and pp != given.pipeline_parallel_degree):
                continue
            for cp in _divisors(ranks // tp // pp):
                if cp > 1 and (length % (2 * cp * tp) or length // cp < LEAST_POSITIONS):
                    continue
                data = ranks // tp // pp // cp
                if batch % data:
                    continue
                for copies in _copies(data, cp * tp, ranks_per_node):
                    degrees = {TP: tp, PP: pp, CP: cp, COPIES: copies, SHARDS: -1, BATCH: batch}
                    has_shards = data // copies * cp > 1
                    for work in _batches(job, batch // data, pp, layers, by_hand):
                        for reshard in _policies(pp) if has_shards else ["default"]:
                            for each in RECOMPUTATION.values():
                                compiled = job.compile.compiles("model")
                                if each.changes[MODE] != "memory_budget" or compiled:
                                    yield degrees | work | {RESHARD: reshard, **each.changes}


def _copies(data: int, inner: int, ranks_per_node: int) -> Iterator[int]:
    """Yield numbers of replicas such that whole nodes hold a replica, and one or all."""
    for copies in _divisors(data):
        spanned = data // copies * inner
        if copies in (1, data) or (spanned >= ranks_per_node and spanned % ranks_per_node == 0):
            yield copies


def _batches(
    job: JobConfig, share: int, pp: int, layers: int, by_hand: bool
) -> Iterator[dict[str, Any]]:
    """Yield ways to divide a rank's `share` of the sequences of a step."""
    if pp == 1:
        yield from ({LOCAL: size} for size in _divisors(share) if size <= 16)
        return
    names = [name for name in SCHEDULES if name != "LoopedBFS"]
    for name in [job.parallelism.pipeline_parallel_schedule] if by_hand else names:
        schedule = SCHEDULES[name]
        stages = pp if schedule.stages == "one" else 2 * pp
        if stages > layers + 2 and not by_hand:
            continue
        for size in (1, 2, 4):
            counts = [n for n in _divisors(share // size) if share % size == 0 and n >= pp]
            counts = [n for n in counts if schedule.runs(n, stages, pp)]
            # More microbatches fill a pipeline better; fewer need less memory.
            for count in counts[:1] + counts[1:][-2:]:
                yield {SCHEDULE: name, SIZE: size, LOCAL: size * count}


def _policies(pp: int) -> list[str]:
    return ["default", "always"] if pp > 1 else ["default", "never", "always"]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class LayoutBounds:
    """Bounds of the time and the memory of layouts, from numbers of a model and its hardware."""

    job: JobConfig
    ranks: int
    hardware: Hardware

    @cached_property
    def _network(self) -> torch.nn.Module:
        return build_empty(
            MODELS[self.job.model.name].build, self.job.model_args(), self.job.training.seq_len
        )

    @cached_property
    def _parameters(self) -> int:
        return count_parameters(self._network).total

    @cached_property
    def _held(self) -> float:
        """Bytes of parameters, gradients and states without sharding."""
        if self.job.training.enable_cpu_offload:
            return 0.0
        spec, each = MODELS[self.job.model.name], getattr(torch, self.job.training.dtype).itemsize
        named = name_parameters([self._network], spec.role)
        on_host = self.job.optimizer.offload_states
        states = 0.0 if on_host else state_bytes(self.job.optimizer, named, each)
        in_backward = self.job.optimizer.early_step_in_backward
        held: float = (1 if in_backward else 2) * each * self._parameters + states
        return held

    @cached_property
    def _rate(self) -> float:
        """FLOP/s of the fastest product."""
        dtype = getattr(torch, self.job.training.mixed_precision_param)
        kind, quick = dtype_name(dtype), 1.0
        if self.job.convert:  # may compute in fewer bits
            quick = 2.0
        rates = [each.tflops * 1e12 for each in self.hardware.products if each.dtype == kind]
        return quick * (max(rates, default=0.0) or self.hardware.peak(dtype) or 1e12)

    @cached_property
    def _block(self) -> tuple[int, int, float]:
        """Number of blocks, width of the hidden states, bytes that a block keeps of a position."""
        spec, args = MODELS[self.job.model.name], self.job.model_args()
        names = [*spec.blocks(self._network)]
        shape = spec.shapes(args, self.job.training.seq_len).after(names[0])
        compute = getattr(torch, self.job.training.mixed_precision_param).itemsize
        return len(names), shape[1], spec.kept_by_block(args, compute, names[0])

    @cached_property
    def _flops(self) -> float:
        spec = MODELS[self.job.model.name]
        return spec.flops_per_unit(self.job.model_args(), self.job.training.seq_len)

    def seconds(self, layout: Changes) -> float:
        """Return a bound of the time of a step: it takes about as long, or longer."""
        job, tp, pp, cp = self.job, layout[TP], layout[PP], layout[CP]
        data = self.ranks // (tp * pp * cp)
        shards, copies = data // layout[COPIES] * cp, layout[COPIES]
        layers, width, _ = self._block
        tokens = layout[BATCH] * job.training.seq_len
        again = _recomputation(layout).again
        compute = tokens / self.ranks * self._flops * (1 + again / 3) / self._rate
        compute /= 1 - _bubble(layout)
        streams = tokens / data / cp * layers / pp * width * 2 * (tp - 1) / tp
        in_turn = (8 + 2 * again) * streams / _bandwidth(self._link(tp))
        if job.parallelism.enable_async_tensor_parallel:
            in_turn = 0.0
        passes = layout[BATCH] // data // layout[LOCAL]
        part, gathers = self._parameters / tp / pp, 1 if _keeps_gathered(layout) else 2
        of_shards = (2 * gathers + 4) * part * passes * (shards - 1) / shards
        of_copies = 8 * part / shards * (copies - 1) / copies
        spread = of_shards / _bandwidth(self._link(tp * shards))
        spread += of_copies / _bandwidth(self._link(tp * cp * data))
        return float(max(compute + in_turn, spread))

    def gib(self, layout: Changes) -> float:
        """Return a bound of the memory of a rank: it needs about as much, or more."""
        job, tp, pp, cp = self.job, layout[TP], layout[PP], layout[CP]
        data = self.ranks // (tp * pp * cp)
        shards = data // layout[COPIES] * cp
        layers, width, block = self._block
        held = self._held / tp / pp / shards
        if pp > 1 and shards > 1 and _keeps_gathered(layout):
            reduce = getattr(torch, job.training.mixed_precision_reduce).itemsize
            held += (2 + reduce) * self._parameters / tp / pp
        sequences, in_flight = layout[LOCAL], 1
        if pp > 1:
            sequences, count = layout[SIZE], layout[LOCAL] // layout[SIZE]
            in_flight = count if layout[SCHEDULE] == "GPipe" else min(pp, count)
        each = KEPT * _recomputation(layout).kept * block / tp
        each += 2 * width / (1 if job.parallelism.disable_sequence_parallel else tp)
        kept = sequences * job.training.seq_len / cp * each * layers / pp * in_flight
        return float(held + kept) / GIB

    def _link(self, ranks: int) -> Link:
        """Return the slowest link among neighboring ranks."""
        inside = ranks <= self.hardware.ranks_per_node
        return self.hardware.node if inside else self.hardware.network


def _bandwidth(link: Link) -> float:
    return link.bandwidth * 1e9


def _recomputation(layout: Changes) -> Recomputation:
    return next(
        each for each in RECOMPUTATION.values() if each.changes.items() <= {*layout.items()}
    )


def _keeps_gathered(layout: Changes) -> bool:
    policies = ("never",) if layout[PP] == 1 else ("never", "default")
    return layout[RESHARD] in policies


def _bubble(layout: Changes) -> float:
    """Return about the idle share of a pipeline of equal stages."""
    if (pp := layout[PP]) == 1:
        return 0.0
    count, schedule = layout[LOCAL] // layout[SIZE], SCHEDULES[layout[SCHEDULE]]
    if schedule.is_v:
        return 0.0
    laps = 1 if schedule.stages == "one" else 2
    if schedule.splits_backward:
        laps *= 3
    idle: float = (pp - 1) / (laps * count + pp - 1)
    return idle


def _kernels(layout: Changes) -> tuple[Any, ...]:
    """Return settings that determine the kernels of a block."""
    size = layout[SIZE] if layout[PP] > 1 else layout[LOCAL]
    keys = (TP, CP, RESHARD, MODE)
    return (size, layout.get(OPTION), layout[PP] > 1, *(layout[key] for key in keys))


class LayoutQueue:
    """Layouts without a plan, the one that is expected to be the fastest first."""

    def __init__(self, bounds: Sequence[tuple[float, Changes]]) -> None:
        self._alike: dict[tuple[Any, ...], list[tuple[float, Changes]]] = {}
        # Among equals the simplest is the last of its list, which is taken first.
        for bound, layout in sorted(bounds, key=lambda each: _order(*each), reverse=True):
            self._alike.setdefault(_kernels(layout), []).append((bound, layout))
        self._excess: dict[tuple[Any, ...], float] = {}
        """Least ratio of planned times and their bounds, by kernels."""

    def learn(self, layout: Changes, ratio: float) -> None:
        """Note the ratio of a planned time and its bound."""
        kernels = _kernels(layout)
        self._excess[kernels] = min(ratio, self._excess.get(kernels, ratio))

    def pop(self, most: float) -> tuple[float, Changes] | None:
        """Remove the first; None if it is expected to take longer than `most` seconds."""
        least = min(self._excess.values(), default=1.0)
        expected = {
            kernels: alike[-1][0] * self._excess.get(kernels, least)
            for kernels, alike in self._alike.items()
        }
        first = min(expected, key=lambda kernels: expected[kernels], default=None)
        if first is None or expected[first] >= most:
            return None
        found = self._alike[first].pop()
        if not self._alike[first]:
            del self._alike[first]
        return found


def _order(bound: float, layout: Changes) -> tuple[float, int, int]:
    return bound, layout[PP], layout[TP]


def search(
    job: JobConfig, ranks: int, hardware: Hardware, *, device_type: str, seconds: float
) -> SearchResult:
    """Search the layouts of a valid recipe.

    Args:
        seconds: time after which no plan is awaited, if there is one of a layout that fits.
    """
    start, found = time.monotonic(), SearchResult()
    capacity = hardware.memory_gib - hardware.outside_allocator_gib
    queue, plans_all = _queue(job, ranks, hardware, found)
    fork = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[float, Changes, Any, Path]] = {}

    def is_over() -> bool:
        return bool(found.layouts) and time.monotonic() - start > seconds

    def begin(folder: Path) -> bool:
        """Plan the next layout that is valid and may fit, in another process."""
        enough = len(found.layouts) >= TOP and not plans_all
        most = found.layouts[TOP - 1].seconds_per_step if enough else math.inf
        while not is_over() and (taken := queue.pop(most)):
            bound, layout = taken
            if count := _unusable(with_changes(job, layout), ranks, device_type, capacity):
                setattr(found, count, getattr(found, count) + 1)
                continue
            ours, theirs = fork.Pipe(False)
            errors = folder / f"{len(running)}_{time.monotonic_ns()}"
            words = (theirs, errors, job, layout, ranks, hardware)
            process = fork.Process(target=_plan_one, args=words, daemon=True)
            process.start()
            theirs.close()
            running[ours] = bound, layout, process, errors
            return True
        return False

    with tempfile.TemporaryDirectory() as folder:
        while not is_over():
            while len(running) < PROCESSES and begin(Path(folder)):
                pass
            if not running:
                break
            left = seconds - (time.monotonic() - start)
            for ready in wait([*running], timeout=max(left, 1.0)):
                assert isinstance(ready, Connection)
                bound, layout, process, errors = running.pop(ready)
                answer = _answer(ready, errors)
                process.join()
                if isinstance(answer, str):
                    found.failed[answer] = found.failed.get(answer, 0) + 1
                    continue
                (found.layouts if answer.fits else found.too_large).append(answer)
                queue.learn(layout, answer.seconds_per_step / bound)
            found.layouts.sort(key=lambda each: (each.seconds_per_step, each.reserved_gib.value))
        found.is_complete = not is_over()
        for _, _, process, _ in running.values():
            process.terminate()
            process.join()
    found.seconds = time.monotonic() - start
    return found


def _queue(
    job: JobConfig, ranks: int, hardware: Hardware, found: SearchResult
) -> tuple[LayoutQueue, bool]:
    """Return the layouts that may fit, and whether they are few; count them all."""
    bounds, may_fit = LayoutBounds(job, ranks, hardware), []
    capacity = hardware.memory_gib - hardware.outside_allocator_gib
    for layout in layouts(job, ranks, hardware.ranks_per_node):
        found.enumerated += 1
        if bounds.gib(layout) > capacity:
            found.without_room += 1
        else:
            may_fit.append((bounds.seconds(layout), layout))
    return LayoutQueue(may_fit), len(may_fit) <= ALL


def _unusable(job: JobConfig, ranks: int, device_type: str, capacity: float) -> str | None:
    """Return the count in `SearchResult` that a layout without a plan belongs to."""
    found = problems(job, PlannedWorld(ranks, device_type))
    if any(each.severity == "error" and each.path != "model.tokenizer_path" for each in found):
        return "refused"
    needs = of_rank(job, ranks)
    if needs and needs.least().on_device / GIB > capacity:
        return "without_room"
    return None


def _plan_one(
    answer: Connection,
    errors: Path,
    job: JobConfig,
    layout: Changes,
    ranks: int,
    hardware: Hardware,
) -> None:
    """Send the numbers of a plan from a process of its own, whose messages are in a file."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    planned = plan(with_changes(job, layout), ranks, hardware)
    step = planned.time
    assert step is not None, "the hardware is known"
    parts = {"computation": step.compute, "update": step.update, "bubble": step.bubble}
    parts |= {"host": step.host_bound}
    parts |= {f"communication ({axis})": each for axis, each in step.exposed.items()}
    answer.send(
        PlannedLayout(
            layout,
            bool(planned.fits),
            planned.reserved_gib,
            step.tokens_per_second_per_device,
            step.seconds,
            step.mfu,
            parts,
        )
    )


def _answer(connection: Connection, errors: Path) -> PlannedLayout | str:
    """Receive the numbers of a plan, or the last line of its errors."""
    with connection:
        try:
            answer: PlannedLayout = connection.recv()
        except EOFError:
            lines = errors.read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "it ended")
    return answer


REASONS = {
    "computation": "less computation",
    "update": "a shorter update",
    "bubble": "a smaller pipeline bubble",
    "host": "less waiting for the host",
}


def reason(fast: PlannedLayout, slow: PlannedLayout) -> str:
    """Explain in words why a layout is before the next."""
    gain = slow.seconds_per_step / fast.seconds_per_step - 1
    if gain < 0.002:
        return "as fast as the next"
    names = {*fast.parts, *slow.parts}
    saved = {name: slow.parts.get(name, 0.0) - fast.parts.get(name, 0.0) for name in names}
    most = max(sorted(saved), key=lambda name: saved[name])
    words = REASONS.get(most) or f"less exposed {most}"
    here, there = (each.parts.get(most, 0.0) / each.seconds_per_step for each in (fast, slow))
    shares = f"{here:.1%} of the step instead of {there:.1%}"
    return f"{gain:+.1%} over the next: {words} ({shares})"


def explained(layouts: Sequence[PlannedLayout]) -> list[str]:
    """Return the reason for the place of each layout; none for the last."""
    pairs = itertools.pairwise(layouts)
    return [*(reason(one, other) for one, other in pairs), ""][: len(layouts)]


def fastest(result: SearchResult, top: int = TOP) -> list[dict[str, Any]]:
    """Return the fastest layouts as JSON objects."""
    best = result.layouts[: top + 1]
    rows = zip(best, explained(best), strict=True)
    return [
        each._asdict() | {"reserved_gib": each.reserved_gib._asdict(), "reason": why}
        for each, why in rows
    ][:top]


def planned_recipe(job: JobConfig, given: JobConfig, extends: str) -> str:
    """Return a recipe, as TOML, that extends the file of the `given` one with all that differs."""
    import tomlkit

    before, tree = given.flat(), dict[str, dict[str, Any]]()
    for key, value in job.flat().items():
        if key not in before or before[key] != value:
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
    text: str = tomlkit.dumps({"extends": extends} | tree)
    return f"# The fastest layout by `torchtitan plan --search`.\n{text}"

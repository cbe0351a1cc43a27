"""Trace the next steps of a live run, and summarize the traces.

The request is a small file in the run's dump folder. Rank 0 reads it, all ranks receive it with the
result of a step, and each traces the same steps. The run needs no configuration, and only the
folder must be shared.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from torchtitan.config import ConfigError, print_error
from torchtitan.profiling import ON_REQUEST, REQUEST_FILE
from torchtitan.provenance import write_whole
from torchtitan.timeline import TRACED
from torchtitan.tools.history import RunHistory, traces_in
from torchtitan.tools.options import Count, Run, Verb, verb

Interval = tuple[float, float]
Intervals = list[Interval]
"""Sorted and separate intervals, each of which ends after it begins."""

MOST_OPERATORS = 10

STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Copies between devices are symmetric memory's way to communicate.
COMMUNICATES_ON_DEVICE = re.compile(r"nccl|Memcpy PtoP", re.IGNORECASE)
# Copies to and from the host neither compute nor take part in a collective.
TO_HOST = re.compile(r"Memcpy (HtoD|DtoH)")
# C++ of a compiled graph has no operators of its own.
COMPUTES_ON_CPU = re.compile(r"aten::|## Call CompiledFxGraph")
# Within an operator on a DTensor a collective may be started and waited for.
WAITS_ON_CPU = re.compile(r"c10d::|_c10d_functional::")
OF_AUTOGRAD = "autograd::engine::evaluate_function"
GLOO = "gloo:"


class Operator(NamedTuple):
    """An operator, or a kernel, of a trace."""

    name: str
    seconds: float
    """Seconds without those of the operators that it calls."""
    calls: int


class Share(NamedTuple):
    """Seconds of a phase."""

    span: float
    compute: float
    exposed: float


@dataclass(frozen=True)
class TraceSummary:
    """The traced steps of one rank, in seconds, all steps together.

    At each moment something computes; or nothing does, but a collective is in progress (exposed
    communication: the run would be faster by so much without it); or neither (idle: the host was
    too slow, or it waited for data).

        span = compute + exposed + idle          communication = exposed + what compute hides

    On CUDA, kernels of NCCL and copies between devices are communication, and all other kernels
    compute. A kernel of NCCL that waits for another rank counts as communication, since nothing can
    tell it apart. On a CPU, operators of torch compute, on the thread of training and on those of
    autograd; gloo communicates on threads of its own, from the start of a collective to its end.
    For sends and receives it records only the request and the wait.
    """

    steps: int
    span: float
    compute: float
    communication: float
    exposed: float
    """Communication while nothing computed."""
    idle: float
    operators: tuple[Operator, ...]
    """Operators that took most time, in descending order."""
    phases: dict[str, Share]
    """Phases by their names in `torchtitan.timeline`; empty in a trace of another program."""


class Event(NamedTuple):
    """An event of the profiler, with times in seconds."""

    name: str
    category: str
    thread: Any
    begin: float
    end: float

    @property
    def times(self) -> Interval:
        """Its interval."""
        return self.begin, self.end


def read_trace(path: Path) -> TraceSummary:
    """Summarize a Chrome trace of torch's profiler.

    Raises:
        ConfigError: if the file is none.
    """
    try:
        content = json.loads(path.read_bytes())
        # A trace has microseconds.
        events = [
            Event(
                e["name"], e.get("cat", ""), e.get("tid"), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            )
            for e in content["traceEvents"]
            if e.get("ph") == "X"
        ]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; wanted a Chrome trace") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is no Chrome trace of torch.profiler") from None
    return summarize(events)


def summarize(events: Sequence[Event]) -> TraceSummary:
    """Summarize the events of one rank."""
    steps = [e for e in events if e.category == "user_annotation" and e.name.startswith(STEP)]
    on_device = [e for e in events if e.category in ON_DEVICE]
    compute, communication = _device_intervals(on_device) if on_device else _cpu_intervals(events)
    whole = _whole([*steps, *on_device] if steps else events)
    compute, communication = intersect(compute, whole), intersect(communication, whole)
    exposed = subtract(communication, compute)
    phases = {
        name: Share(*map(length, (own, intersect(own, compute), intersect(own, exposed))))
        for name, own in _phases(events, "gpu_" if on_device else "").items()
    }
    return TraceSummary(
        steps=len({step.name for step in steps}),
        span=length(whole),
        compute=length(compute),
        communication=length(communication),
        exposed=length(exposed),
        idle=length(subtract(whole, union([*compute, *communication]))),
        operators=_operators(on_device or _operators_of_cpu(events)),
        phases=phases,
    )


def _whole(events: Iterable[Event]) -> Intervals:
    times = [moment for event in events for moment in (event.begin, event.end)]
    return union([(min(times), max(times))]) if times else []


def _device_intervals(events: Sequence[Event]) -> tuple[Intervals, Intervals]:
    sent = {e for e in events if COMMUNICATES_ON_DEVICE.search(e.name)}
    compute = (e.times for e in events if e not in sent and not TO_HOST.match(e.name))
    return union(compute), union(e.times for e in sent)


def _cpu_intervals(events: Sequence[Event]) -> tuple[Intervals, Intervals]:
    """Compute and communication, thread by thread, as each may wait for its own collectives."""
    compute: Intervals = []
    for thread in _threads_of_training(events):
        own = [event for event in events if event.thread == thread]
        waits = union(e.times for e in own if WAITS_ON_CPU.match(e.name))
        compute += subtract(union(e.times for e in own if COMPUTES_ON_CPU.match(e.name)), waits)
    return union(compute), union(e.times for e in events if e.name.startswith(GLOO))


def _threads_of_training(events: Iterable[Event]) -> set[Any]:
    return {event.thread for event in events if event.name.startswith((STEP, OF_AUTOGRAD))}


def _operators_of_cpu(events: Sequence[Event]) -> list[Event]:
    threads = _threads_of_training(events)
    return [e for e in events if e.category == "cpu_op" and e.thread in threads]


def _operators(events: Iterable[Event]) -> tuple[Operator, ...]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    for event, own in _self_times(events):
        seconds[event.name] += own
        calls[event.name] += 1
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))[:MOST_OPERATORS]
    return tuple(Operator(name, seconds[name], calls[name]) for name in longest)


def _self_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with its duration without the events nested in it on its thread."""
    ordered = sorted(events, key=lambda event: (event.begin, -event.end))
    left = [event.end - event.begin for event in ordered]
    open_on: defaultdict[Any, list[int]] = defaultdict(list)
    for number, event in enumerate(ordered):
        around = open_on[event.thread]
        while around and ordered[around[-1]].end <= event.begin:
            around.pop()
        if around:
            left[around[-1]] -= event.end - event.begin
        around.append(number)
    return zip(ordered, left, strict=True)


def _phases(events: Iterable[Event], prefix: str) -> dict[str, Intervals]:
    """The times of each phase, without the phases nested in it."""
    category = f"{prefix}user_annotation"
    marks = [e for e in events if e.category == category and e.name.startswith(TRACED)]
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for mark in marks:
        inner = union(
            e.times for e in marks if e is not mark and mark.begin <= e.begin and e.end <= mark.end
        )
        found[mark.name.removeprefix(TRACED)] += subtract([mark.times], inner)
    return {name: union(times) for name, times in found.items()}


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments that are in any of `intervals`, which may be in any order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def subtract(these: Intervals, others: Intervals) -> Intervals:
    """The moments of `these` that are in none of `others`."""
    left: Intervals = []
    at = 0
    for begin, end in these:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        reached, other = begin, at
        while other < len(others) and others[other][0] < end:
            if others[other][0] > reached:
                left.append((reached, others[other][0]))
            reached = max(reached, others[other][1])
            other += 1
        if reached < end:
            left.append((reached, end))
    return left


def intersect(these: Intervals, others: Intervals) -> Intervals:
    """The moments that are in both sets."""
    return subtract(these, subtract(these, others))


def length(intervals: Intervals) -> float:
    """The total length of intervals."""
    return sum(end - begin for begin, end in intervals)


POLL_INTERVAL = 0.5
"""Seconds between two looks at what the run has written."""
MOST_TRACES = 8
"""Number of ranks whose traces are read, as one may be of hundreds of megabytes."""
ANSWER_TIMEOUT = 300
"""Seconds that a run may take to answer: to the end of its step, and of the traced ones."""

app = verb()


@app.command(cls=Verb, help=__doc__)
def profile(
    run: Run,
    steps: Annotated[int, Count("Number of steps to trace (default: 1).")] = 1,
    wait: Annotated[
        int, Count("Time to wait for the traces (default: 300).", "SECONDS")
    ] = ANSWER_TIMEOUT,
) -> int:
    try:
        folder = request_trace(run, steps, wait)
    except NoAnswer as failure:
        print_error(failure)
        return 1
    print(*describe_traces(folder), sep="\n")
    print("open the traces at https://ui.perfetto.dev")
    return 0


class NoAnswer(RuntimeError):
    """The run did not write the requested traces."""


def request_trace(
    folder: Path, steps: int, timeout: float, log: Callable[[str], None] = print
) -> Path:
    """Request a trace of some steps, wait for those of every rank, and return their folder.

    Args:
        timeout: seconds to wait in total.

    Raises:
        ConfigError: if no run is alive in the folder, or a trace was requested already.
        NoAnswer: if the traces do not come.
    """
    history = RunHistory.open(folder)
    state, traces = history.state(), history.traces_folder
    if not state.is_alive:
        raise ConfigError(f"{folder}: there is no run to trace; the last one {state.words}")
    request = folder / REQUEST_FILE
    if request.exists():
        raise ConfigError(
            f"{request}: a trace was already requested and has not started; wait for it"
        )
    known = set(traces.glob(f"*{ON_REQUEST}"))
    write_whole(request, json.dumps({"steps": steps}) + "\n")
    log(f"requested from {folder} a trace of {steps} step{'s' * (steps > 1)}; it is {state.words}")

    end, logged, is_taken = time.monotonic() + timeout, 0, False
    try:
        while True:
            # Asked before looking, since a run that ends may have written them just before.
            now = history.state()
            if not is_taken and not request.exists():
                log("the run received the request; it traces and writes the traces")
                is_taken = True
            new, done = _written(traces, known)
            if done > logged:
                log(f"{done} of {state.ranks} ranks wrote their traces, in {new}")
                logged = done
            if done >= state.ranks:
                return new
            if not now.is_alive:
                raise NoAnswer(f"the run ended before it wrote all traces: it {now.words}")
            if time.monotonic() > end:
                what = f"no traces of all ranks in {timeout:g} seconds"
                raise NoAnswer(f"{what}; the run is {now.words}")
            time.sleep(POLL_INTERVAL)
    finally:
        request.unlink(missing_ok=True)


def _written(traces: Path, known: set[Path]) -> tuple[Path, int]:
    """The folder that was not known before, and the number of ranks with a trace there."""
    new = sorted(set(traces.glob(f"*{ON_REQUEST}")) - known)
    return (new[0], len(traces_in(new[0]))) if new else (traces, 0)


def describe_traces(folder: Path) -> Iterator[str]:
    """Describe the traces in a folder: what each rank computes, and how long it waits."""
    paths = traces_in(folder)
    found = {rank: read_trace(paths[rank]) for rank in list(paths)[:MOST_TRACES]}
    steps = max((trace.steps for trace in found.values()), default=0)
    yield f"The trace of {steps} step{'s' * (steps != 1)} ({folder}):"
    for rank, trace in found.items():
        compute = 1000 * trace.compute / max(trace.steps, 1)
        span = trace.span or 1
        yield (
            f"  rank {rank:<4} computes {compute:.1f} ms per step; exposed communication "
            f"{trace.exposed / span:.1%}, idle {trace.idle / span:.1%}"
        )
    if len(paths) > len(found):
        yield f"  {len(paths) - len(found)} more ranks were not read"

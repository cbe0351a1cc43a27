"""Trace the next steps of a live run, and summarize the traces.

The request is a small file in the run's dump folder. Rank 0 looks for it, all ranks receive
it with the result of a step, and each writes a trace of the same steps; so nothing must be
configured, and nothing but the folder is shared.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from torchtitan.config import ConfigError, print_error
from torchtitan.profiling import ON_REQUEST, REQUEST_FILE
from torchtitan.tools.history import RunHistory, traces_in
from torchtitan.tools.options import Count, Run, Verb, verb
from torchtitan.tools.trace_summary import read_trace

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
    unfinished = request.with_name(f"{REQUEST_FILE}.writing")
    unfinished.write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")
    unfinished.replace(request)
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

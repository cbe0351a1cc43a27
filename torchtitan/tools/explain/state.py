"""Whether a run goes on, by what its ranks note at every step."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigError
from torchtitan.flight_recorder import RankTrace, read_traces, report


@dataclass(frozen=True)
class State:
    """Where a run is, or how it ended."""

    is_alive: bool
    """As far as can be told: of processes on another machine it cannot."""
    step: int
    ranks: int
    words: str


def state_of(folder: Path, recipe: Mapping[str, Any]) -> State:
    """The state of the run in a dump folder."""
    notes = folder / str(recipe.get("comm.save_traces_folder", "comm_traces"))
    try:
        traces = read_traces(notes)
    except ConfigError:
        return State(False, 0, 0, "unknown: its ranks left no notes of their steps")
    step, ranks = max(trace.step for trace in traces), max(t.world_size for t in traces)
    if all(trace.state == "finished" for trace in traces):
        return State(False, step, ranks, f"ended well at step {step}")
    if any(trace.state == "ended" or trace.failure or trace.crash for trace in traces):
        return State(False, step, ranks, report(traces)[0])
    gone = [str(trace.rank) for trace in traces if _is_gone(trace)]
    if gone:
        words = f"stopped without a word at step {step}: rank {', '.join(gone)} is gone"
        return State(False, step, ranks, words)
    ago = max(time.time() - max(trace.time for trace in traces), 0.0)
    return State(True, step, ranks, f"in step {step}, which began {ago:.0f} s ago")


def _is_gone(trace: RankTrace) -> bool:
    """Whether its process was on this machine, and is no more."""
    if trace.state == "finished" or trace.host != socket.gethostname():
        return False
    try:
        os.kill(trace.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # somebody else's, so it is there
    return False

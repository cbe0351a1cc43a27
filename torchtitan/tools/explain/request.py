"""`torchtitan profile RUN`: has a run that goes on write a trace of its next steps.

The wish is a small file in the run's dump folder. Rank 0 looks for it, all ranks learn of it with
the verdict on a step, and each writes a trace of the same steps; so that nothing has to be
configured, and nothing but the folder is shared.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan.config import ConfigError
from torchtitan.profiling import ON_REQUEST, REQUEST_FILE
from torchtitan.tools.history import RunHistory, traces_in

# Seconds between two looks at what the run has written.
PACE = 0.5


class NoAnswer(RuntimeError):
    """The run did not trace what it was asked for."""


def profile(folder: Path, steps: int, patience: float, tell: Callable[[str], None] = print) -> Path:
    """Ask for a trace of so many steps, and wait for that of every rank; their folder.

    Args:
        patience: seconds to wait in all.

    Raises:
        ConfigError: where no run goes on in the folder, or it was asked already.
        NoAnswer: where the traces do not come.
    """
    history = RunHistory.open(folder)
    state, traces = history.state(), history.traces_folder
    if not state.is_alive:
        raise ConfigError(f"{folder}: there is no run to trace; the last one {state.words}")
    request = folder / REQUEST_FILE
    if request.exists():
        raise ConfigError(f"{request}: it was asked for a trace already, and has not begun")
    known = set(traces.glob(f"*{ON_REQUEST}"))
    unfinished = request.with_name(f"{REQUEST_FILE}.writing")
    unfinished.write_text(json.dumps({"steps": steps}) + "\n")
    unfinished.replace(request)
    tell(f"asked {folder} for a trace of {steps} step{'s' * (steps > 1)}; it is {state.words}")

    end, told, is_taken = time.monotonic() + patience, 0, False
    try:
        while True:
            # Asked before looking, since a run that ends may have written them just before.
            now = history.state()
            if not is_taken and not request.exists():
                tell("the run knows of it; it traces, and writes what it traced")
                is_taken = True
            new, done = _written(traces, known)
            if done > told:
                tell(f"{done} of {state.ranks} ranks wrote theirs, in {new}")
                told = done
            if done >= state.ranks:
                return new
            if not now.is_alive:
                raise NoAnswer(f"the run is over before it wrote all traces: it {now.words}")
            if time.monotonic() > end:
                what = f"no traces of all ranks in {patience:g} seconds"
                raise NoAnswer(f"{what}; the run is {now.words}")
            time.sleep(PACE)
    finally:
        request.unlink(missing_ok=True)


def _written(traces: Path, known: set[Path]) -> tuple[Path, int]:
    """The folder that was not known before, and how many ranks wrote a trace there."""
    new = sorted(set(traces.glob(f"*{ON_REQUEST}")) - known)
    return (new[0], len(traces_in(new[0]))) if new else (traces, 0)

"""Compares the time of a save with the grace period, from a request to stop until SIGKILL.

Only the scheduler knows this period, so its manifest puts it into a variable. If a save takes
longer, the run will resume from an earlier one, and its log should say so.
"""

import logging
import math
from collections.abc import Mapping

from torchtitan.config import ConfigError

VARIABLE = "TORCHTITAN_GRACE_SECONDS"
SAVED_BYTES = 12
"""Bytes saved for a parameter: its weight and the two moments of Adam in float32."""
WRITTEN_PER_SECOND = 1e9
"""Bytes that a node is expected to write per second."""


def read_grace(environment: Mapping[str, str]) -> float | None:
    """Return the seconds between a request to stop and SIGKILL; None: unknown.

    Raises:
        ConfigError: if the variable is not a number above 0.
    """
    word = environment.get(VARIABLE)
    if not word:
        return None
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{VARIABLE}: got {word}; wanted a number of seconds > 0")
    return seconds


def planned_seconds(parameters: int, nodes: int) -> float:
    """Return the seconds that nodes are expected to take to save a model."""
    return SAVED_BYTES * parameters / nodes / WRITTEN_PER_SECOND


def outlook(
    took: float | None, planned: float, saved_step: int | None, grace: float | None
) -> tuple[int, str]:
    """Return the level and the text of a message about the save that follows a request to stop.

    Args:
        took: seconds of the last save; None: there was none.
        planned: seconds that it is expected to take.
        saved_step: step of the newest finished save, if any.
        grace: seconds until SIGKILL; None: unknown.
    """
    seconds = planned if took is None else took
    says = "a save is expected to take" if took is None else "the last save took"
    if grace is None or seconds <= grace:
        newest = f"the newest is of step {saved_step}" if saved_step else "none is finished yet"
        return logging.INFO, f"{says} {seconds:.3g} s; {newest}"
    resumes = f"resumes from step {saved_step}, the newest save" if saved_step else "starts over"
    return logging.WARNING, (
        f"{says} {seconds:.3g} s, but the run may be killed after {grace:g} s ({VARIABLE}); if it "
        f"is, it {resumes}"
    )

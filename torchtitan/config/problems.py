"""Problems of settings that are each valid, in one form.

A settings class finds the problems of its own section, in `Config.problems`. Problems between
sections are found by a rule, a function of the whole recipe in `torchtitan.checks`, so that no
section knows the names of another's keys.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Problem(NamedTuple):
    """Problem with the value at a dotted path.

    `message` follows "got <value>; ". `also` names the other settings, or sections, it depends on:
    if one of them is invalid itself, the problem is not reported. All paths of a section's own
    problems are within that section, and `self.key` in a message is a key of it.
    """

    path: str
    message: str
    also: tuple[str, ...] = ()
    severity: Literal["error", "note"] = "error"
    """Severity; a note flags a valid setting that may surprise."""

    def within(self, section: str) -> "Problem":
        """Return a section's own problem as one of the whole recipe."""
        path, *also = (f"{section}.{name}" for name in (self.path, *self.also))
        message = self.message.replace("self.", f"{section}.")
        return Problem(path, message, tuple(also), self.severity)


@dataclass(frozen=True)
class PlannedWorld:
    """Ranks and machine a recipe is to run on, as far as known."""

    ranks: int | None = None
    """Number of ranks; None: any number that fits the recipe."""
    device_type: str = "cpu"
    is_here: bool = False
    """Whether it runs on this machine, so that missing capabilities are problems too."""
    may_restart: bool = False
    """Whether failed processes are restarted."""
    local_ranks: int | None = None
    """Number of ranks that share this machine's memory; None skips the memory check."""

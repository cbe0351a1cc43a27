"""What cannot work about settings that are each valid: the one form in which it is said.

A settings class says what is wrong with its own section, in `Config.problems`. What settings of
several sections cannot do together is for a rule, a function of the whole recipe in
`torchtitan.checks`, so that no section knows the names of another's keys.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Problem(NamedTuple):
    """What is wrong with the value at a dotted path.

    `message` follows "got <value>; ". `also` names the other settings, or sections, it rests on:
    where one of them is wrong itself, nothing is said. Of a section's own problems all paths are
    within that section, and `self.key` in a message is a key of it.
    """

    path: str
    message: str
    also: tuple[str, ...] = ()
    severity: Literal["error", "note"] = "error"
    """A note is of what works, but perhaps not as its writer thinks."""

    def within(self, section: str) -> "Problem":
        """A section's own problem as one of the whole recipe."""
        path, *also = (f"{section}.{name}" for name in (self.path, *self.also))
        message = self.message.replace("self.", f"{section}.")
        return Problem(path, message, tuple(also), self.severity)


@dataclass(frozen=True)
class PlannedWorld:
    """Where a recipe is to run, as far as that is known."""

    ranks: int | None = None
    """None: any number that fits the recipe."""
    device_type: str = "cpu"
    is_here: bool = False
    """On this very machine: what it lacks is a problem too."""
    may_restart: bool = False
    """Processes that die are started again."""
    local_ranks: int | None = None
    """How many of the ranks share this machine's memory; None: that is not asked."""

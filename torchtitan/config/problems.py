"""Problems of settings that are each valid, in one form.

A settings class finds the problems of its own section, and those that only exist if a recipe
chooses it, in `Config.problems`. All others between sections are found by a rule, a function of the
whole recipe in `torchtitan.checks`, so that no section knows the names of another's keys.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


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
    is_between: bool = False
    """Whether the paths are those of the recipe, instead of relative to a section."""

    def within(self, section: str) -> "Problem":
        """Return a section's own problem as one of the whole recipe."""
        if self.is_between:
            return self
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
    """Number of ranks that are started on this machine, as far as known."""


@dataclass(frozen=True)
class Context:
    """Everything that a section may know when it is asked for its problems."""

    recipe: Any = None
    """The whole recipe; None if a section is checked alone."""
    world: PlannedWorld = PlannedWorld()
    key: str = ""
    """The section's own key in the recipe."""


def between(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Mark problems between sections, whose paths are those of the recipe."""
    for problem in problems:
        yield problem._replace(is_between=True)

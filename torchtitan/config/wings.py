"""The wings: packages of torchtitan that the core does not import, and that can be removed."""

from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1]
WINGS: Final = ("plan", "cluster", "research")


def has_wing(name: str) -> bool:
    """Whether a wing is installed."""
    return any((PACKAGE / name).glob("*.py"))


def needs_wing(name: str) -> str:
    """Return the message for a key or a verb of a wing that is not installed."""
    return f"it needs torchtitan.{name}, which is not installed"


def absent_wings() -> str:
    """Name the wings that are not installed; empty if all are."""
    absent = [f"torchtitan.{name}" for name in WINGS if not has_wing(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""

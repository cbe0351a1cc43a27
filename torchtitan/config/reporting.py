"""Prints errors and notes on standard error: the place and what is wrong, then the fix below it.

A message is one line in an exception and in a log: `place: what is wrong; the fix in the
imperative`. When it is printed, it is divided where its first clause begins with one of `FIXES`.
"""

import re
from typing import Final, Literal

from torchtitan.logging import has_color, tell

Level = Literal["error", "warning", "note"]

FIXES: Final = (
    "add|allowed|check|choose|continue|copy|decompress|delete|did you mean|emulate|exclude|give"
    "|increase|install|keep|leave|list|lower|make|move|name|pass|put|reduce|remove|rename|restore|resume|run|save|see"
    "|select|send|set|start|train|unpack|use|wait|wanted|write"
)
"""First words of a clause that says what to do."""
_FIX = re.compile(rf"[;.] (?=({FIXES})\b)", re.IGNORECASE)
_COLORS: Final = {"error": "\033[1;31m", "warning": "\033[1;33m", "note": "\033[1;36m"}


def print_error(error: Exception | str) -> None:
    """Print the notices of an error, and each of its mistakes."""
    for notice in getattr(error, "notices", ()):
        print_message("note", notice)
    messages: list[str] = []
    for line in getattr(error, "lines", [str(error)]):
        if messages and line.startswith(" "):  # more about the mistake before it
            messages[-1] += f"\n{line}"
        else:
            messages.append(line)
    for message in messages:
        print_message("error", message)


def print_message(level: Level, message: str) -> None:
    """Print one message; its level is in color on a terminal."""
    color, end = (_COLORS[level], "\033[0m") if has_color() else ("", "")
    what, *below = divided(message)
    below = [line if line.startswith(" ") else f"  {line}" for line in below]
    tell(f"{color}{level}:{end} {what}", *below)


def divided(message: str) -> list[str]:
    """Divide a message into what is wrong, further lines about it, and the fixes."""
    first, *details = message.split("\n")
    # Not within a quoted value.
    ends = (cut for cut in _FIX.finditer(first) if first.count('"', 0, cut.start()) % 2 == 0)
    cut = next(ends, None)
    if cut is None:
        return [first, *details]
    fixes = re.split(r"; |(?<=\.) ", first[cut.end() :])
    fixes.sort(key=lambda fix: not fix.lower().startswith("did you mean"))
    return [first[: cut.start()], *details, *fixes]

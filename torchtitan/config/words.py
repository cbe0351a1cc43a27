"""Phrases of error messages and of help, and how errors and notes are printed."""

import ast
import difflib
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from torchtitan.logging import has_color, tell

MAX_SHOWN: Final = 200
"""Maximum characters of a value or key quoted in a message."""
MAX_LISTED: Final = 8
"""Maximum number of names of a list that a command shows whole."""
MAX_SUGGESTED: Final = 3
MAX_NESTED: Final = 32
"""Maximum levels of nested lists and tables in a recipe."""
SECTION_AND_KEY: Final = "[section] and key = value"


def nearest(got: Any, known: Iterable[object], prefix: str = "") -> str:
    """Return `; did you mean X?` for the known name nearest to `got`, or nothing."""
    return did_you_mean(prefix + name for name in near_names(got, known))


def near_names(got: Any, known: Iterable[object], cutoff: float = 0.6) -> list[str]:
    """Return the known name nearest to `got` by edit distance, if one is near."""
    names = {name.lower(): name for name in map(str, known)}
    is_word = isinstance(got, str) and len(got) <= MAX_SHOWN
    near = difflib.get_close_matches(got.lower(), names, 1, cutoff) if is_word else []
    return [names[name] for name in near]


def did_you_mean(names: Iterable[str]) -> str:
    """Return `; did you mean X or Y?`, or nothing if there are no names."""
    likely = list(dict.fromkeys(names))[:MAX_SUGGESTED]
    return f"; did you mean {' or '.join(likely)}?" if likely else ""


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return names in a row; of many only the first."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(names: Iterable[str], command: str) -> str:
    """Return names in a row; of many only the first, and the command that lists them all."""
    known = list(names)
    if len(known) <= MAX_LISTED or not command:
        return ", ".join(known)
    return f"{first_of(known, MAX_LISTED)} ({command})"


def located(origin: str, key: str) -> str:
    """Return the location of a setting and its key; only the flag if that is the location."""
    return origin if origin == f"--{key}" else f"{origin}: {key}"


def allowed_names(got: Any, known: Iterable[str]) -> str:
    """Return `allowed: a, b; did you mean a?`.

    Names that differ in a number alone, llama3 and llama4, are not suggested for each other.
    """
    names = list(known)
    likely = [name for name in names if _number(name) == _number(got) or not _is_similar(name, got)]
    return f"allowed: {', '.join(names)}{nearest(got, likely)}"


def _number(name: Any) -> list[str]:
    return re.findall(r"\d+", str(name))


def _is_similar(name: str, got: Any) -> bool:
    """Whether two names differ only in a number that both have."""
    return re.sub(r"\d+", "0", name.lower()) == re.sub(r"\d+", "0", str(got).lower())


def show(value: Any) -> str:
    """Format a value as TOML or JSON, truncated if it is long."""
    if value is None:
        return "nothing"
    if isinstance(value, date | time | float):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**128:
        return f"an integer of {value.bit_length()} bits"
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def told(value: Any) -> str:
    """Return the start of a message about a value in a recipe: `got 5; `."""
    if value == {}:
        return "it is written as a section; "
    if holds_sections(value):
        return "it is written as a list of sections; "
    return f"got {show(value)}; "


def shorten(text: str) -> str:
    """Truncate long text, with a note of its length."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def dotted(path: Sequence[str]) -> str:
    """Format a key as TOML: parts other than plain words are quoted."""
    plain = (part.isidentifier() or part.replace("-", "").isalnum() for part in path)
    parts = zip(path, plain, strict=True)
    return shorten(".".join(p if is_plain else show(p) for p, is_plain in parts))


def local_path(text: str) -> Path:
    """Return the path of a setting, with `~` for the user's home folder."""
    return Path(os.path.expanduser(text))


def exists(text: str) -> bool:
    """Whether the file or folder of a setting exists; an empty text names none.

    A repository of the Hugging Face hub is taken to exist: that is known when it is read.
    """
    # Unlike Path.exists it takes any text.
    return is_hub_id(text) or os.path.exists(os.path.expanduser(text))


HUB_ID = re.compile(r"hf://(?!datasets/|spaces/)([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def is_hub_id(text: str) -> bool:
    """Whether a setting is a repository of the Hugging Face hub: hf://org/name[@revision]."""
    return HUB_ID.fullmatch(text) is not None


def holds_sections(value: Any) -> bool:
    """Whether a value represents a list of sections: `[{}, {}]`."""
    return isinstance(value, list) and bool(value) and all(item == {} for item in value)


@cache
def docstring(of: Any) -> str:
    """Return the docstring of a module, class or function, without its indentation.

    It is read from the source if `python -OO` has dropped it; a class without one has its base's.
    """
    for each in inspect.getmro(of) if inspect.isclass(of) else [of]:
        if each.__doc__:
            return inspect.cleandoc(each.__doc__)
        with suppress(OSError, TypeError):  # there is no source
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(each)))
            if found := ast.get_docstring(tree if inspect.ismodule(each) else tree.body[0]):
                return found
    return ""


def amount(value: float, unit: str) -> str:
    """Format a large number with a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if value < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:,.4g} Z{unit}"


def counted(number: int, noun: str) -> str:
    """Format a number of things: 1 sequence, 2,048 sequences."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


Level = Literal["error", "warning", "note"]

# A message is one line in an exception and in a log: `place: what is wrong; the fix in the
# imperative`. When it is printed, it is divided where its first clause begins with one of these.
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

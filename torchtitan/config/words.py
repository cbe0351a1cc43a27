"""Small phrases of error messages."""

import difflib
import json
from collections.abc import Iterable
from datetime import date, time
from typing import Any


def nearest(got: Any, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the known name nearest to `got`, or nothing."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(got.lower(), names, n=1) if isinstance(got, str) else []
    return f"; did you mean {prefix}{names[near[0]]}?" if near else ""


def allowed_names(got: Any, known: Iterable[str]) -> str:
    """`allowed: a, b; did you mean a?`"""
    names = list(known)
    return f"allowed: {', '.join(names)}{nearest(got, names)}"


def show(value: Any) -> str:
    """A value as TOML writes it."""
    if value == {}:
        return "a section"
    if holds_sections(value):
        return "a list of sections"
    if value is None:
        return "nothing"
    if isinstance(value, date | time | float):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def holds_sections(value: Any) -> bool:
    """Whether a value stands for a list of sections: `[{}, {}]`."""
    return isinstance(value, list) and bool(value) and all(item == {} for item in value)

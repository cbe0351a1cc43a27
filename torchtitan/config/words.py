"""Small phrases of error messages."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


def nearest(got: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the known name nearest to `got`, or nothing."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(got.lower(), names, n=1)
    dotted = f"{prefix}." if prefix else ""
    return f"; did you mean {dotted}{names[near[0]]}?" if near else ""


def allowed_names(got: Any, known: Iterable[str]) -> str:
    """`allowed: a, b; did you mean a?`"""
    names = list(known)
    return f"allowed: {', '.join(names)}{nearest(got, names) if isinstance(got, str) else ''}"


def show(value: Any) -> str:
    """A value as TOML writes it."""
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)

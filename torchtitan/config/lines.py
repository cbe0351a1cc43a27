"""Line numbers of the keys of a TOML text, which tomli does not report."""

import re
from collections.abc import Iterator

import tomli

from torchtitan.config.settings import KeyPath

BLANK = r"(?:\s|#[^\n]*)*"
KEY_PART = r"""[ \t]*(?:"(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)[ \t]*"""
STRING = r'''"""(?:[^\\]|\\.)*?"{3,5}|"(?:[^"\\]|\\.)*"''' r"""|'''.*?'{3,5}|'[^']*'"""
# A date and a time may be separated by a blank.
BARE_VALUE = r"\d{4}-\d\d-\d\d \d\d:[^\s,\]}#]*|[^\s,\]}#]+"


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the first line, from 1, of every table and key of `text`, which is valid TOML.

    The path of a table in a list of tables has its number after the name of the list.
    """
    lines: dict[KeyPath, int] = {}
    line, counted = 1, 0
    for path, position in _Walk(text):
        line, counted = line + text.count("\n", counted, position), position
        for depth in range(1, len(path) + 1):
            lines.setdefault(path[:depth], line)
    return lines


class _Walk:
    """Scanner of valid TOML that visits each key once, skipping strings and comments."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.sizes: dict[KeyPath, int] = {}

    def __iter__(self) -> Iterator[tuple[KeyPath, int]]:
        section: KeyPath = ()
        while self._next():
            start = self.position
            if opening := self._take(r"\[\[?"):
                section = self._numbered(self._key(), is_new=opening == "[[")
                self._take(r"\]\]?")
                yield section, start
            else:
                yield from self._pair(section)

    def _numbered(self, names: KeyPath, *, is_new: bool) -> KeyPath:
        """Return the path of a header, through the last table of each list of tables."""
        path: KeyPath = ()
        for depth, name in enumerate(names, 1):
            path = (*path, name)
            if is_new and depth == len(names):
                self.sizes[path] = self.sizes.get(path, 0) + 1
            if size := self.sizes.get(path):
                path = (*path, str(size - 1))
        return path

    def _pair(self, section: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        start = self.position
        path = (*section, *self._key())
        yield path, start
        self._take("=")
        yield from self._value(path)

    def _value(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        opening = self._next()
        if opening not in "[{":
            value = self._take(STRING) or self._take(BARE_VALUE)
            assert value, "this is not valid TOML"
            return
        self.position += 1
        number = 0
        while (following := self._next()) not in "]}":
            if opening == "{":
                yield from self._pair(path)
            elif following == "{":
                yield (*path, str(number)), self.position
                yield from self._value((*path, str(number)))
            else:
                yield from self._value(path)
            number += 1
            self._next()
            self._take(",")
        self.position += 1

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while not parts or self._take(r"\."):
            part = self._take(KEY_PART).strip()
            parts.append(next(iter(tomli.loads(f"{part} = 0"))) if part[0] in "\"'" else part)
        return tuple(parts)

    def _next(self) -> str:
        """Return the next character outside of blanks and comments, empty at the end."""
        self._take(BLANK)
        return self.text[self.position : self.position + 1]

    def _take(self, pattern: str) -> str:
        """Consume and return the match of `pattern` here; empty if there is none."""
        found = re.compile(pattern, re.DOTALL).match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found[0] if found else ""

"""The sources of settings: recipes with what they extend, and flags."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.settings import KeyPath, Setting
from torchtitan.config.words import show


def read_toml(
    path: Path, problems: list[str], seen: tuple[Path, ...] = ()
) -> list[dict[KeyPath, Setting]]:
    """The settings of a recipe and of everything it extends, the farthest ancestor first."""
    if path.resolve() in seen:
        chain = " -> ".join(str(p.name) for p in (*seen, path))
        problems.append(f"{path}: extends: the recipes extend each other in a circle: {chain}")
        return []
    if not path.is_file():
        problems.append(f"{path}: no such recipe{_nearest_file(path)}")
        return []
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        problems.append(f"{path}:{line[1] if line else 1}: not valid TOML: {error}")
        return []
    except UnicodeDecodeError as error:
        problems.append(f"{path}: not UTF-8 text: {error}")
        return []
    lines = _key_lines(text)
    settings = {
        key: Setting(value, f"{path}:{_line(lines, key)}") for key, value in _flatten(table)
    }
    parent = settings.get(("extends",))
    if parent is None:
        return [settings]
    if not isinstance(parent.value, str):
        problems.append(f"{parent.origin}: extends: got {show(parent.value)}; wanted a file name")
        return [settings]
    base = path.parent / parent.value
    if not base.is_file():
        problems.append(f"{parent.origin}: extends: no such recipe {base}{_nearest_file(base)}")
        return [settings]
    return [*read_toml(base, problems, (*seen, path.resolve())), settings]


def read_flags(flags: Sequence[str], problems: list[str]) -> dict[KeyPath, Setting]:
    """`--a.b v`, `--a.b=v`, `--a.b v w`, and for booleans `--a.b`, `--no-a.b`, `--a.no-b`."""
    settings: dict[KeyPath, Setting] = {}
    name = None
    for word in flags:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            negated = re.fullmatch(r"no-(.+)", name) or re.fullmatch(r"(.+\.)no-(.+)", name)
            if negated:
                name = "".join(negated.groups())
            path = tuple(name.replace("-", "_").split("."))
            settings[path] = Setting([value] if equals else [], f"--{name}")
            if negated:
                settings[path] = Setting(False, word)
        elif name is None or settings[path].value is False:
            problems.append(f"{word!r}: not a flag; write --section.key value")
        else:
            settings[path].value.append(word)
    return settings


def _flatten(table: Mapping[str, Any], prefix: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every table header and key; tomllib keeps the values but not their places."""
    lines: dict[KeyPath, int] = {}
    section: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]", line):
            section = _split_key(header[1])
            lines.setdefault(section, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\-\"' ]+?)\s*=", line):
            lines.setdefault((*section, *_split_key(key[1])), number)
    return lines


def _split_key(dotted: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    recipes = sorted(p.name for p in path.parent.glob("*.toml"))
    near = difflib.get_close_matches(path.name, recipes, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""

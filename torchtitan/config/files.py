"""Recipe files: TOML text to settings with line numbers, including the recipes they extend.

Recipes that come with the package, in `train_configs/` of a clone or `torchtitan/recipes` of a
wheel, are found by name in any folder: `debug_model`, `llama3_8b.toml`, `studies/fsdp_debug`.
"""

import io
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tomli

from torchtitan.config.node_files import ONLY_POINTER, POINTER, read_for_node
from torchtitan.config.registry import PACKAGE
from torchtitan.config.settings import KeyPath, Setting
from torchtitan.config.words import MAX_NESTED, SECTION_AND_KEY, nearest, shorten, show, told

CLONED: Final = "train_configs"
OTHER_FORMATS = {
    ".py": "TorchTitan 0.3's Python configs are not read; see docs/from_torchtitan.md",
    **dict.fromkeys((".yaml", ".yml", ".json"), "write the settings as TOML: docs/config.md"),
}


def read_recipe(
    path: Path, problems: list[str], seen: tuple[Path, ...] = ()
) -> list[dict[KeyPath, Setting]]:
    """Read a recipe and everything it extends, the farthest ancestor first."""
    settings = read_file(path, problems)
    parent = settings.pop(("extends",), None)
    if parent is None:
        return [settings]
    complain = f"{parent.origin}: extends: {told(parent.value)}"
    if not isinstance(parent.value, str):
        problems.append(complain + "wanted the path of a recipe, relative to this one")
        return [settings]
    base = extended(path, parent.value)
    chain = (*seen, path)
    if _real(base) in map(_real, chain):
        circle = " -> ".join(link.name for link in (*chain, base))
        problems.append(f"{complain}wanted a recipe that does not lead back here: {circle}")
        return [settings]
    if not os.path.isfile(base):
        own = [link.name for link in chain if link.parent == base.parent]
        near = _nearest_file(base, own)
        problems.append(f"{complain}there is no file {shorten(str(base))}{near}")
        return [settings]
    return [*read_recipe(base, problems, chain), settings]


def extended(path: Path, value: str) -> Path:
    """Return the recipe that `path` extends: a path relative to it, or else a packaged recipe."""
    base = Path(os.path.normpath(path.parent / value))
    return base if os.path.isfile(base) else packaged_recipes().get(packaged_name(value), base)


def read_file(path: Path, problems: list[str]) -> dict[KeyPath, Setting]:
    """Read the settings of one file; empty if it cannot be read."""
    if os.path.isdir(path):
        problems.append(f"{path}: is a folder; wanted a recipe, a file of TOML")
        return {}
    if os.path.islink(path) and not os.path.exists(path):
        problems.append(f"{path}: is a link to {os.readlink(path)}, where there is no file")
        return {}
    if os.path.exists(path) and not os.path.isfile(path):
        fix = "a recipe is read more than once, so write it to a file"
        problems.append(f"{path}: is a pipe or a device; {fix}")
        return {}
    if not os.path.isfile(path):
        near = _nearest_file(path) or "; see `torchtitan recipes` for those of the package"
        problems.append(f"{path}: there is no such recipe{near}")
        return {}
    if other := OTHER_FORMATS.get(path.suffix):
        problems.append(f"{path}: a recipe is a file of TOML; {other}")
        return {}
    try:
        text = read_text(path)
        if text.startswith(POINTER.decode()):
            problems.append(f"{path}: {ONLY_POINTER}")
            return {}
        table = tomli.loads(text)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return {}
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        problems.append(f"{path}:{line}: not UTF-8 text: got the byte 0x{byte:02x}")
        return {}
    except tomli.TOMLDecodeError as error:
        problems.append(_syntax_problem(path, text, error))
        return {}
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, say
        problems.append(f"{path}: not valid TOML: {error}")
        return {}
    if _is_deep(table):
        problems.append(f"{path}: nested too deeply; wanted {SECTION_AND_KEY}")
        return {}
    lines = key_lines(text)
    return {key: Setting(value, f"{path}:{lines[key]}") for key, value in _flatten(table)}


def read_text(path: Path) -> str:
    """Read the text of a recipe, with any line ends, with or without a byte order mark."""
    return io.TextIOWrapper(io.BytesIO(read_for_node(path)), encoding="utf-8-sig").read()


def _is_deep(table: Mapping[str, Any]) -> bool:
    level: list[Any] = [table]
    for _ in range(MAX_NESTED):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [x for items in inner for x in items if isinstance(x, dict | list)]
    return bool(level)


def _real(path: Path) -> str:
    return os.path.realpath(path) if "\0" not in str(path) else ""


def _flatten(table: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            yield path, {}
            yield from _flatten(value, path)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield path, [{} for _ in value]
            yield from _flatten({str(number): item for number, item in enumerate(value)}, path)
        else:
            yield path, value


def _syntax_problem(path: Path, text: str, error: tomli.TOMLDecodeError) -> str:
    lines = text.splitlines() or [""]
    number = min(error.lineno, len(lines))
    got = lines[number - 1].strip()
    hint = "; is it written twice?" if "overwrite" in error.msg else ""
    value = re.fullmatch(r"[^=]+= *([^\s\"'\[{#=][^\"'#]*?) *(?:#.*)?", got)
    if error.msg == "Invalid value" and value:
        hint = f"; put text in quotes: {show(value[1])}"
    return f"{path}:{number}: not valid TOML: got `{shorten(got)}`; {error.msg}{hint}"


def _nearest_file(path: Path, seen: Collection[str] = ()) -> str:
    is_folder = os.path.isdir(path.parent)
    recipes = sorted(path.parent.glob("*.toml")) if is_folder else []
    names = [recipe.name for recipe in recipes if recipe.name not in seen]
    near = nearest(path.name, names, str(path).removesuffix(path.name))
    if near := near or nearest(packaged_name(path), packaged_recipes()):
        return near
    if not is_folder:
        return f"; there is no folder {shorten(str(path.parent))}"
    return ""


def packaged_folder() -> Path:
    """Return the folder of the packaged recipes."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / CLONED


def packaged_recipes() -> dict[str, Path]:
    """Return the file of each packaged recipe and study by name, its path without the suffix."""
    folder = packaged_folder()
    files = sorted(folder.rglob("*.toml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe: the file itself, or else the packaged recipe of that name."""
    path = Path(recipe)
    return path if os.path.isfile(path) else packaged_recipes().get(packaged_name(path), path)


def packaged_name(recipe: str | Path) -> str:
    """Return the name that a recipe would have if it were packaged.

    The suffix may be left out, and the folder of a clone added, so that commands written for a
    clone work in any folder.
    """
    return str(recipe).removeprefix(f"{CLONED}/").removesuffix(".toml")


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

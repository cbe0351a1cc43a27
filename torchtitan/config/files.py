"""Recipe files: TOML text to settings with line numbers, including the recipes they extend."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.lines import key_lines
from torchtitan.config.packaged import packaged_name, packaged_recipes
from torchtitan.config.settings import KeyPath, Setting
from torchtitan.config.words import MAX_NESTED, SECTION_AND_KEY, nearest, shorten, show

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
    complain = f"{parent.origin}: extends: got {show(parent.value)}; "
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
    if not os.path.isfile(path):
        near = _nearest_file(path) or "; see `torchtitan recipes` for those of the package"
        problems.append(f"{path}: there is no such recipe{near}")
        return {}
    if other := OTHER_FORMATS.get(path.suffix):
        problems.append(f"{path}: a recipe is a file of TOML; {other}")
        return {}
    try:
        text = read_text(path)
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
    return path.read_text(encoding="utf-8-sig")


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
    recipes = sorted(p.name for p in path.parent.glob("*.toml") if p.name not in seen)
    near = nearest(path.name, recipes, str(path).removesuffix(path.name))
    if near := near or nearest(packaged_name(path), packaged_recipes()):
        return near
    if not os.path.isdir(path.parent):
        return f"; there is no folder {shorten(str(path.parent))}"
    return ""

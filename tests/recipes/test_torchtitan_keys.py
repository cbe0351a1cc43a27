"""Every key of three versions of TorchTitan: here it means what it meant there, or is named.

`torchtitan_keys.json` has the keys of each version with type and default. Each is written into a
recipe of that version, which is migrated, with its default and with every other value of its kind.
Nothing but what the key says may change, and what changes nothing has a notice.
"""

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomlkit

from tests.tables import table
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.tools.migrate import migrated, read_old

FACTS = json.loads(Path(__file__).with_name("torchtitan_keys.json").read_text(encoding="utf-8"))
SIGN = {
    "v0.1.0": {"job.use_for_integration_test": False},
    "v0.2.0": {"training.debug_moe_force_load_balance": False},
    "v0.2.2": {"model.print_after_conversion": False},
}
"""A key by which each version is told."""

OTHER = {key: json.loads(values) for key, values in table(__file__, "torchtitan_values.txt")}

READ_AS = {
    ("activation_checkpoint.selective_ac_option", "2"): 2,
    ("activation_checkpoint.selective_ac_option", "3"): 3,
    ("parallelism.context_parallel_rotate_method", "alltoall"): "ring",
    ("experimental.custom_import", "json"): ["json"],
}
"""Values that are written otherwise here; equal ones need no line."""


class Case(NamedTuple):
    """A key with a value, in a recipe that says what the key acts with."""

    version: str
    key: str
    value: Any
    is_default: bool
    beside: tuple[tuple[str, Any], ...]


def cases():
    for version, entries in FACTS.items():
        for entry in entries:
            key, default = entry["key"], entry["default"]
            values = OTHER.get(key) or others(entry["type"], default)
            for value in [*([] if default is None else [default]), *values]:
                for beside in circumstances(version, key):
                    yield Case(version, key, value, value == default, tuple(beside.items()))


def others(kind, default):
    """Values of a type that are not the default: all of them where they are named."""
    if "Literal" in kind:
        names = ast.literal_eval(kind[kind.index("Literal[") + 7 :].rstrip("] |None") + "]")
        if kind.startswith("list"):
            return [[name] for name in names]
        return [name for name in names if name != default]
    if "list" in kind:
        return [["other"]]
    if "bool" in kind:
        return [not default]
    if "int" in kind:
        return [3 if default != 3 else 5]
    return [0.25] if "float" in kind else ["folder"]


def circumstances(version, key):
    """What else a recipe says: with a converter's keys, that it is asked for, or that it is not."""
    yield {}
    section = key.rpartition(".")[0]
    if section in ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx"):
        # Both versions of its name, whatever that of the section is.
        yield {"model.converters": [section]}
        yield {"model.converters": [section.removeprefix("quantize.linear.")]}
    if key.startswith("checkpoint.initial_load"):
        yield {"checkpoint.enable_checkpoint" if version == "v0.1.0" else "checkpoint.enable": True}
    if section == "validation" and key != "validation.enable":
        yield {"validation.enable": True}
    if section == "fault_tolerance" and key != "fault_tolerance.group_size":
        on = {"fault_tolerance.enable": True} if key != "fault_tolerance.enable" else {}
        yield on | {"fault_tolerance.group_size": 2}


ALL = list(cases())


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """The files that TorchTitan's defaults name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("tests/assets/tokenizer", "tests/assets/c4_test", "folder"):
        (folder / name).mkdir(parents=True)
    tokenizer = folder / "torchtitan/datasets/tokenizer/tokenizer.model"
    tokenizer.parent.mkdir(parents=True)
    tokenizer.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
    read.cache_clear()


def written(keys):
    """A recipe."""
    document = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        table = document
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    return tomlkit.dumps(document)


@cache
def read(text):
    Path("r.toml").write_text(text, encoding="utf-8")
    path, notices = Path("r.toml"), list[str]()
    try:
        migration = read_old(path)
        notices = migration.notices
        recipe = load_job(migrated(path, migration), [], None, "cuda")
    except RecipeError as error:
        error.notices = (*notices, *error.notices)
        return error
    return replace(recipe, notices=[*notices, *recipe.notices])


def recipe(case, *, without=False):
    """The case as it is read."""
    said = {case.key: case.value} if not without else {}
    return read(written({**SIGN[case.version], **dict(case.beside), **said}))


def names(case, line):
    """Whether a line says the key, by its name there."""
    return f": {case.key}: " in line


def is_about(case, line, targets):
    """Whether a line is of the key, here or there, or tells that another one does not fit it."""
    if any(f": {target}: " in line for target in [case.key, *targets]):
        return True
    return case.key.rpartition(".")[2] in line or case.key == "fault_tolerance.enable"


def moved(case, notices):
    """Where a notice says that the key is now."""
    return [
        line.split(": is now ")[1].split(",")[0]
        for line in notices
        if names(case, line) and ": is now " in line
    ]


@pytest.mark.gate
@pytest.mark.parametrize("version", FACTS)
def test_every_key_means_what_it_meant_or_is_named(version):
    wrong = [
        f"{case.key} = {case.value!r} beside {dict(case.beside)}: {why}"
        for case in ALL
        if case.version == version and (why := what_is_wrong(case))
    ]
    assert not wrong, "\n".join(wrong)


def test_recipes_are_migrated_without_the_key_in_question():
    """Or else nothing could be told of it."""
    refused = [case for case in ALL if isinstance(recipe(case, without=True), RecipeError)]
    assert not refused


def misspelt():
    """Each key with a letter missing, in its own name or in that of a section."""
    known = {entry["key"] for entries in FACTS.values() for entry in entries}
    for key in sorted(known):
        parts = key.split(".")
        for depth, part in enumerate(parts):
            cut = len(part) // 2
            yield ".".join([*parts[:depth], part[:cut] + part[cut + 1 :], *parts[depth + 1 :]])


@pytest.mark.gate
def test_misspelt_keys_are_refused():
    accepted = []
    for key in dict.fromkeys(misspelt()):
        found = read(written({key: True, "model.converters": ["float8", "mx"]}))
        prefixes = [".".join(key.split(".")[:depth]) for depth in range(1, key.count(".") + 2)]
        lines = found.lines if isinstance(found, RecipeError) else []
        if not any(f": {name}: unknown " in line for name in prefixes for line in lines):
            accepted.append(f"{key}: {lines}")
    assert not accepted, "\n".join(accepted)


def what_is_wrong(case):
    found, base = recipe(case), recipe(case, without=True)
    if isinstance(found, RecipeError):
        targets = moved(case, list(found.notices))
        new = set(found.lines) - set(base.lines if isinstance(base, RecipeError) else ())
        is_named = any(is_about(case, line, targets) for line in new)
        is_refused = bool(new) and not (case.is_default and not isinstance(base, RecipeError))
        return None if is_named and is_refused else f"refused: {found.lines}"
    if isinstance(base, RecipeError):
        return f"accepted, but not without: {base.lines}"
    notices = [line for line in found.notices if names(case, line)]
    now, before = (json.loads(json.dumps(of.config.flat())) for of in (found, base))
    changed = {key for key in now.keys() | before.keys() if now.get(key) != before.get(key)}
    if case.is_default:
        is_here = case.key in now or notices
        return None if not changed and is_here else f"the default changes {changed}, {notices}"
    left_out = [line for line in notices if " is dropped; " in line]
    if left_out:
        return None if not changed else f"left out, but it changes {changed}"
    targets = moved(case, notices) or [case.key]
    if case.key == "model.converters":
        return None if all(key.startswith("convert.") for key in changed) else f"{changed}"
    if case.key == "checkpoint.initial_load_in_hf":
        targets = ["checkpoint.initial_load_path"]
        assert now[targets[0]] == "./tests/assets/tokenizer"
        return None if changed == set(targets) else f"{changed}"
    if case.key == "model.flavor":
        changed &= {case.key}
    if case.key.endswith(".dataset"):
        changed.discard("data.dataset_path")
    if changed != set(targets) and not (not changed and now.get(targets[0]) == case.value):
        return f"it changes {changed}, not {targets}: {found.notices}"
    wanted = READ_AS.get((case.key, case.value) if isinstance(case.value, str) else (), case.value)
    got = now[targets[0]]
    same = got == wanted or (case.key.endswith("exclude_from_loading") and "data" in got)
    return None if same else f"it is {got!r}, not {wanted!r}"

"""Rules of the house that a reader relies on: imports point down, and importing is cheap."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module

import pytest

from tests.sources import MODULES, PACKAGE, nodes, place, text, tree
from tests.tables import table
from torchtitan.config.registry import WINGS
from torchtitan.job import JobConfig
from torchtitan.tools.cli import verbs

LAYERS = table(__file__, "layers.txt")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = [
    *("datasets", "pyarrow", "tiktoken", "tokenizers", "wandb", "tensorboard", "rich", "torchao"),
    "fsspec",
]
FAMILY = ("model", "spec", "hugging_face", "meta")
SLOW_TORCH = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]

# Sinks may be the user's own, or a service's, and raise anything; that must not end a run. Nor must
# what the client libraries of object stores raise. And what one rank meets, all ranks raise.
OUTER_CODE = (
    *("metrics/__init__.py", "metrics/meter.py", "remote.py", "data/streaming.py"),
    "config/hub.py",
    "checkpoint/placement.py",
)


def unit(path):
    """The module or package of `torchtitan` that a file belongs to."""
    return _unit(path.relative_to(PACKAGE).with_suffix("").parts)


def _unit(parts):
    """Of the tools each is a part of its own."""
    return ".".join(parts[:2] if parts[0] == "tools" else parts[:1])


def imported_units(found):
    names = set()
    for node in found:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "torchtitan":
            found = {alias.name for alias in node.names} - {"__version__"}  # of the package itself
            names |= {f"torchtitan.{name}" for name in found}
        elif isinstance(node, ast.ImportFrom) and node.module == "torchtitan.tools":
            names |= {f"torchtitan.tools.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names.add(node.module)
    return {_unit(name.split(".")[1:]) for name in names if name.startswith("torchtitan.")}


def of_its_kind(path):
    """Whether a file has the name of its kind: sections have settings, tools a command."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    if (
        path.stem in ("__init__", "settings", "command")
        or folder == "tools"
        or ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) in modules_of_verbs()
        or path.stem == path.parent.name
    ):
        return True
    return (path.parent / "spec.py").exists() and path.stem in FAMILY


def repeated(named):
    places = defaultdict(list)
    for name, path in named:
        places[name].append(place(path))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_names_of_modules_are_unique():
    files = [path for path in MODULES if not of_its_kind(path)]
    folders = [path.parent for path in MODULES if path.name == "__init__.py"][1:]
    commands = [
        path for path in folders if (path / "command.py").exists() or path.parent.name == "tools"
    ]
    assert repeated((path.stem, path) for path in [*files, *folders] if path not in commands) == {}


@pytest.mark.costs("parses every module")
def test_names_of_classes_are_unique():
    found = []
    for path in MODULES:
        if path.name == "model.py" and of_its_kind(path):
            continue  # every family has its blocks, and their attention
        found += [(each.name, path) for each in tree(path).body if isinstance(each, ast.ClassDef)]
    assert repeated(found) == {}


def test_every_module_has_a_layer():
    units = {unit(path) for path in MODULES} - {"__init__", "tools.__init__"}
    assert units | {"research"} == LEVEL.keys()  # which can be removed


def test_imports_point_down():
    found = [
        f"{place(path)} imports {other}, which is not below {unit(path)}"
        for path in MODULES
        for other in imported_units(nodes(path)) - {unit(path)}
        if LEVEL[other] <= LEVEL[unit(path)]
    ]
    assert found == []


def test_own_modules_are_imported_at_the_top():
    found = [
        f"{place(path)}: {function.name} hides an import"
        for path in MODULES
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef) and imported_units(ast.walk(function))
    ]
    assert found == []


@pytest.mark.costs("parses every module")
def test_no_failure_is_swallowed_and_nothing_is_global():
    found = []
    for path in MODULES:
        for node in nodes(path):
            where = f"{place(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                found.append(f"{where}: a global")
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                if caught == "Exception" and place(path) in OUTER_CODE:
                    continue
                if caught in ("Exception", "BaseException", "everything"):
                    found.append(f"{where}: catches {caught}")
    assert found == []


def test_a_part_says_what_is_wrong_with_its_own_section_alone():
    """What cannot work between sections is for `checks`, which knows the whole recipe."""
    keys, found = re.compile(rf"\b({'|'.join(JobConfig.model_fields)})\.[a-z_]+\b"), []
    for path in (path for path in MODULES if LEVEL.get(unit(path), 0) > LEVEL["job"]):
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef) or function.returns is None:
                continue
            where = f"{place(path)}: {function.name}"
            if "Problem" not in ast.unparse(function.returns):
                if function.name == "problems":
                    found.append(f"{where}: problems are said in one form")
                continue
            for node in ast.walk(function):
                value = node.value if isinstance(node, ast.Constant) else None
                named = keys.search(value) if isinstance(value, str) else None
                found += [f"{where} names {named[0]}"] if named else []
    assert found == []


def test_rules_ask_for_a_model_that_may_not_be():
    """Another rule says that there is no such flavor; `model_of` is then None."""
    rules = (path for path in (PACKAGE / "checks").glob("*.py") if path.name != "model.py")
    assert [place(path) for path in rules if "model_args(" in text(path)] == []


IMPORTS = """
import json, sys
loaded = {}
import torchtitan.tools.cli
loaded["command"] = [*sys.modules]
import logging, torch
def refuse(*args): raise RuntimeError("touched CUDA")
kept = torch.cuda._lazy_init, torch.cuda.get_device_name
torch.cuda._lazy_init = torch.cuda.get_device_name = refuse
import VERBS
assert not logging.getLogger("torchtitan").handlers
torch.cuda._lazy_init, torch.cuda.get_device_name = kept
loaded["verbs"] = [*sys.modules]
torchtitan.trainer.main(sys.argv[1:])
loaded["step"] = [*sys.modules]
print(json.dumps(loaded))
"""
"""Imports more and more in one process, so that a later stage also has what an earlier one has."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The modules that are loaded by the command, by all its verbs, and by a step of one rank."""
    words = [f"{PACKAGE.parent}/train_configs/debug_model.toml", "--training.steps", "1"]
    words += [f"--job.dump_folder={tmp_path_factory.mktemp('run')}", "--training.seq_len=32"]
    words += ["--no-validation.enable", "--no-checkpoint.enable"]
    imports = IMPORTS.replace("VERBS", ", ".join(modules_of_verbs()))
    command = [sys.executable, "-c", imports, *words]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {stage: set(names) for stage, names in json.loads(printed.splitlines()[-1]).items()}


@pytest.mark.costs("a process of its own")
def test_reading_a_recipe_imports_nothing_heavy(loaded):
    assert not loaded["verbs"] & {*HEAVY, *SLOW_TORCH}


def test_the_command_imports_no_verb_and_no_torch(loaded):
    """So that `--help` and the completion of a shell are quick."""
    assert not loaded["command"] & {*HEAVY, *modules_of_verbs(), "torch"}


def test_a_step_of_one_rank_imports_only_what_it_needs(loaded):
    """Each of these takes as long to import as a step."""
    slow = {"sympy", "torch.distributed.tensor", "torch._dynamo", "datasets", "wandb"}
    assert "torchtitan.trainer" in loaded["step"]
    assert not {name for name in loaded["step"] if name.startswith("torchtitan.research.")}
    assert not loaded["step"] & slow


PURE = {"isinstance", "hasattr", "len", "all", "range", "sorted", "list", "equal", "isfinite"}
PURE |= {"rank", "size"}


@pytest.mark.costs("parses every module")
def test_nothing_depends_on_what_python_drops():
    """`python -O` drops asserts, and `-OO` docstrings."""
    found = []
    for path in MODULES:
        helps = {id(k.value) for k in of_type(path, ast.keyword) if k.arg == "help"}
        for node in nodes(path):
            where = f"{place(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assert):
                for part in ast.walk(node.test):
                    is_call = isinstance(part, ast.Call) and last_name(part.func) not in PURE
                    if is_call or isinstance(part, ast.NamedExpr):
                        found.append(f"{where}: {ast.unparse(part)} may have an effect")
            is_docstring = isinstance(node, ast.Name | ast.Attribute) and (
                last_name(node) == "__doc__"
            )
            if is_docstring and id(node) not in helps and place(path) != "config/words.py":
                found.append(f"{where}: a docstring may be None; use config.docstring")
    assert found == []


MARKUP = {"Console", "Progress", "TextColumn", "Status", "Spinner", "from_markup"}
MARKUP |= {"render", "track"}


@pytest.mark.costs("parses every module")
def test_rich_gets_text_in_one_place():
    """Elsewhere a name with brackets would be markup."""
    found = [
        f"{place(path)}:{node.lineno}: {ast.unparse(node.func)}"
        for path in MODULES
        if "rich" in text(path) and place(path) != "logging.py"
        for node in of_type(path, ast.Call)
        if last_name(node.func) in MARKUP
    ]
    assert found == []


def test_arguments_are_written_one_by_one():
    found = [
        f"{place(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in MODULES
        for node in of_type(path, ast.Starred)
        if isinstance(node.value, ast.Tuple)
        and any(node in call.args for call in of_type(path, ast.Call))
    ]
    assert found == []


@pytest.mark.costs("parses every module")
def test_text_files_have_an_encoding():
    found = []
    for path in MODULES:
        for node in of_type(path, ast.Call):
            given, name = {key.arg for key in node.keywords}, last_name(node.func)
            values = [*node.args, *(key.value for key in node.keywords if key.arg == "mode")]
            modes = [each.value for each in values if isinstance(each, ast.Constant)]
            is_method = isinstance(node.func, ast.Attribute)
            is_text = (is_method and name in ("read_text", "write_text")) or (
                name == "open" and any(re.fullmatch(r"[rwax]t?\+?", str(mode)) for mode in modes)
            )
            if is_text and "encoding" not in given:
                found.append(f"{place(path)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def of_type(path, kind):
    return (node for node in nodes(path) if isinstance(node, kind))


def last_name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


COMMAND = """
import sys
from torchtitan.tools.cli import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=open("modules.txt", "w"))
"""


def imported_by(words, folder):
    """The modules that a command has loaded at its end."""
    command = [sys.executable, "-c", COMMAND, *words.split()]
    paths = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run(command, cwd=folder, env=paths, capture_output=True, check=False)
    return set((folder / "modules.txt").read_text().split())


@pytest.mark.gate
def test_commands_import_what_their_answer_needs(tmp_path):
    """How fast they are is measured by benchmarks/commands.py."""
    for words in (
        *("--help", "train --help", "--help optimizer", "check --help all", "data --help"),
        *("checkpoint convert --help", "recipes", "recipes copy debug_model", "--version"),
    ):
        assert not imported_by(words, tmp_path) & {"torch", "numpy"}, words
    of_a_run = {f"torchtitan.{n}" for n in ("build", "train", "plan.plan", "checkpoint.saver")}
    slow = {*HEAVY, *SLOW_TORCH, "torch._dynamo", "sympy", *of_a_run} - {"rich"}
    for words in (
        "check llama3_8b --model.tokenizer_path none",
        "check qwen3_moe_debug --compile.enable --device cuda",
    ):
        found = imported_by(words, tmp_path)
        assert "torchtitan.checks" in found
        assert not found & slow, words
    # For a hint the settings of all systems are imported, and what they need.
    assert not imported_by("check llama3_8b --trainig.steps 3", tmp_path) & (slow - of_a_run)


WORDS = {"bfloat16", "common", "float8", "images", "modelled", "random", "rotated", "slicing"}
WORDS |= {"striding"}
"""Names in research/ that are words of every day."""
HAS_SYSTEMS = (PACKAGE / "research").is_dir()
SYSTEMS = {
    name
    for entries in (import_module("torchtitan.research").ENTRIES if HAS_SYSTEMS else {}).values()
    for entry, place in entries.items()
    for name in (entry, re.split("[.:]", place)[0], place.split(":")[1])
    if name.lower() not in WORDS
}
OLD_KEYS = "config/other_names.py"
"""The keys of older recipes, some of which named a system."""


def test_the_main_road_names_no_system_from_a_paper():
    """So that each system of research/ can be removed."""
    systems, found = re.compile(rf"(?i)\b({'|'.join(SYSTEMS)})\b"), []
    for path in main_road() if HAS_SYSTEMS else ():
        if place(path) != OLD_KEYS:
            found += [f"{place(path)}: {match[0]}" for match in systems.finditer(text(path))]
    assert found == []


def test_the_core_names_no_module_of_a_wing():
    wings = re.compile(rf"\btorchtitan[./]({'|'.join(WINGS)})\b")
    core = (path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in WINGS)
    assert [(place(path), found[0]) for path in core if (found := wings.search(text(path)))] == []


def test_every_seam_of_a_wing_is_listed():
    """With the file or folder that owns the registry."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    listed = set()
    table = page.partition("| kind | owner |\n|---|---|\n")[2].partition("\n\n")[0]
    for row in table.splitlines():
        kinds, owners = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
        listed |= {(kind, owner) for kind in kinds for owner in owners}
    found = set()
    for path in (path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in WINGS):
        for node in of_type(path, ast.Call):
            if isinstance(node.func, ast.Subscript) and last_name(node.func.value) == "Registry":
                [kind] = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
                owners = {owner for name, owner in listed if name == kind}
                assert any(place(path).startswith(owner) for owner in owners), (kind, place(path))
                found.add(kind)
    assert found == {kind for kind, _ in listed} - {"verb.GROUP"}


def test_the_main_road_knows_no_images():
    """They belong to a system of research/: its data sets, settings, pictures and counts."""
    words = re.compile(
        r"images\b|\bvit_|ViT|masked_autoencoder|corrupt_|linear_probe|\bscenes|raster|photograph"
    )
    found = [(place(path), words.findall(text(path))) for path in main_road()]
    assert [each for each in found if each[1]] == []


def main_road():
    return [path for path in MODULES if "research" not in path.relative_to(PACKAGE).parts]


def modules_of_verbs():
    return [module for modules in verbs().values() for module in modules.values()]

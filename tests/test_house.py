"""Rules of the house that a reader relies on: imports point down, and importing is cheap."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from torchtitan.job import JobConfig
from torchtitan.tools.cli import VERBS

PACKAGE = Path(__file__).parent.parent / "torchtitan"

# A module may import what stands on a lower line, and its own package; never sideways, never up.
LAYERS = [
    ["research"],
    ["__main__"],
    ["tools.cli"],
    ["tools.plan", "tools.preflight"],
    ["tools.train", "tools.check", "tools.compare", "tools.verify", "tools.migrate"],
    ["tools.recipes", "tools.doctor", "tools.manifest"],
    ["tools.watch", "tools.plot", "tools.profile", "tools.trace"],
    ["tools.generate", "tools.checkpoint", "tools.tokenizer", "tools.data"],
    ["tools.explain", "tools.evaluate"],
    ["tools.launched"],
    ["tools.history", "tools.options"],
    ["tools.reference"],
    ["tools.commands"],
    ["launch", "preflight"],
    ["train"],
    ["trainer"],
    ["build"],
    ["features", "estimate"],
    ["parts"],
    ["provenance"],
    ["checks"],
    ["job"],
    ["resilience"],
    ["checkpoint", "metrics", "profiling", "validate", "legacy_recipes"],
    ["flight_recorder", "step", "expert_loads"],
    ["parallel"],
    ["tasks", "convert"],
    ["models", "data", "optim", "comm", "losses", "auxiliary_losses", "timeline"],
    ["remote"],
    ["config", "device", "digest", "torch_private", "local_ranks", "seeds", "packages"],
    ["logging"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = [
    *("datasets", "pyarrow", "tiktoken", "tokenizers", "wandb", "tensorboard", "rich", "torchao"),
    *("plotly", "markdown_it", "fsspec"),
]
FAMILY = ("model", "spec", "hugging_face", "meta")
SLOW_TORCH = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]

# Sinks may be the user's own, or a service's, and raise anything; that must not end a run. Nor must
# what the client libraries of object stores raise. And what one rank meets, all ranks raise.
OUTER_CODE = ("metrics/meter.py", "remote.py", "checkpoint/placement.py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package of `torchtitan` that a file belongs to."""
    return _unit(path.relative_to(PACKAGE).with_suffix("").parts)


def _unit(parts: Sequence[str]) -> str:
    """Of the tools each is a part of its own."""
    return ".".join(parts[:2] if parts[0] == "tools" else parts[:1])


def imported_units(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
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


def of_its_kind(path: Path) -> bool:
    """Whether a file has the name of its kind: sections have settings, tools a command.

    A command's module has the name of the command, a folder's main module that of the folder, and
    every family of models has the same files.
    """
    folder = path.parent.relative_to(PACKAGE).as_posix()
    if (
        path.stem in ("__init__", "settings", "command")
        or folder == "tools"
        or path.stem == path.parent.name
    ):
        return True
    return (path.parent / "spec.py").exists() and path.stem in FAMILY


def repeated(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, path in named:
        places[name].append(path.relative_to(PACKAGE).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def test_names_of_modules_are_unique() -> None:
    files = [path for path in modules() if not of_its_kind(path)]
    folders = [path.parent for path in modules() if path.name == "__init__.py"][1:]
    commands = [path for path in folders if path.parent.name == "tools"]
    assert repeated((path.stem, path) for path in [*files, *folders] if path not in commands) == {}


def test_names_of_classes_are_unique() -> None:
    found = []
    for path in modules():
        if path.name == "model.py" and of_its_kind(path):
            continue  # every family has its blocks, and their attention
        tree = ast.parse(path.read_text())
        found += [(each.name, path) for each in tree.body if isinstance(each, ast.ClassDef)]
    assert repeated(found) == {}


def test_every_module_has_a_layer() -> None:
    units = {unit(path) for path in modules()} - {"__init__", "tools.__init__"}
    assert units | {"research"} == LEVEL.keys()  # which can be removed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = unit(path)
    for other in imported_units(ast.parse(path.read_text())) - {own}:
        assert LEVEL[other] > LEVEL[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_own_modules_are_imported_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            assert not imported_units(function), f"{function.name} hides an import"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_failure_is_swallowed_and_nothing_is_global(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None
            caught = ast.unparse(node.type)
            if caught == "Exception" and path.relative_to(PACKAGE).as_posix() in OUTER_CODE:
                continue
            assert caught not in ("Exception", "BaseException"), f"line {node.lineno}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_part_says_what_is_wrong_with_its_own_section_alone(path: Path) -> None:
    """What cannot work between sections is for `checks`, which knows the whole recipe."""
    if LEVEL.get(unit(path), 0) <= LEVEL["job"]:
        return
    keys = re.compile(rf"\b({'|'.join(JobConfig.model_fields)})\.[a-z_]+\b")
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or function.returns is None:
            continue
        if "Problem" not in ast.unparse(function.returns):
            assert function.name != "problems", "problems are said in one form"
            continue
        for node in ast.walk(function):
            text = node.value if isinstance(node, ast.Constant) else None
            named = keys.search(text) if isinstance(text, str) else None
            assert not named, f"{function.name} names {named and named[0]}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "checks").glob("*.py")), ids=lambda p: p.name)
def test_rules_ask_for_a_model_that_may_not_be(path: Path) -> None:
    """Another rule says that there is no such flavor; `model_of` is then None."""
    assert path.name == "model.py" or "model_args(" not in path.read_text()


def test_reading_a_recipe_imports_nothing_heavy() -> None:
    verbs = ", ".join(f"torchtitan.tools.{module}" for module in modules_of_verbs())
    assert not imported_by(f"import {verbs}") & {*HEAVY, *SLOW_TORCH}


def test_the_command_imports_no_verb_and_no_torch() -> None:
    """So that `--help` and the completion of a shell are quick."""
    loaded = imported_by("import torchtitan.tools.cli")
    verbs = {f"torchtitan.tools.{module.partition('.')[0]}" for module in modules_of_verbs()}
    assert not loaded & {*HEAVY, *verbs, "torch"}


def test_a_step_of_one_rank_imports_only_what_it_needs() -> None:
    """Each of these takes as long to import as a step."""
    recipe = "--training.steps 1 --no-validation.enable --no-checkpoint.enable"
    with TemporaryDirectory() as folder:
        words = (
            f"{PACKAGE.parent}/train_configs/debug_model.toml --job.dump_folder {folder} {recipe}"
        )
        loaded = imported_by(
            f"from torchtitan.train import main\nmain('--job.config_file {words}'.split())"
        )
    assert "torchtitan.trainer" in loaded
    assert not {name for name in loaded if name.startswith("torchtitan.research.")}
    assert not loaded & {"sympy", "torch.distributed.tensor", "torch._dynamo", "datasets", "wandb"}


WORDS = {"bfloat16", "common", "float8", "images", "modelled", "random", "rotated", "slicing"}
WORDS |= {"striding"}
"""Names in research/ that are words of every day."""
HAS_SYSTEMS = (PACKAGE / "research").is_dir()
SYSTEMS = {
    name
    for entries in (import_module("torchtitan.research").ENTRIES if HAS_SYSTEMS else {}).values()
    for entry, place in entries.items()
    for name in (entry, place.split(".")[0], place.split(":")[1])
    if name.lower() not in WORDS
}
OLD_KEYS = "legacy_recipes/table.py"
"""The keys of older recipes, some of which named a system."""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_main_road_names_no_system_from_a_paper(path: Path) -> None:
    """So that each folder of research/ can be removed."""
    place = path.relative_to(PACKAGE).as_posix()
    if not HAS_SYSTEMS or place.startswith("research/") or place == OLD_KEYS:
        return
    text = path.read_text()
    assert not re.findall(rf"(?i)\b({'|'.join(SYSTEMS)})\b", text)
    assert place == "config/registry.py" or "torchtitan.research" not in text


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_main_road_knows_no_images(path: Path) -> None:
    """They belong to a system of research/: its data sets, settings, pictures and counts."""
    words = (
        r"images\b|\bvit_|ViT|masked_autoencoder|corrupt_|linear_probe|\bscenes|raster|photograph"
    )
    if "research" not in path.relative_to(PACKAGE).parts:
        assert not re.findall(words, path.read_text())


def modules_of_verbs() -> list[str]:
    return [module for verbs in VERBS.values() for module in verbs.values()]


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_needs_no_accelerator_and_changes_no_logging() -> None:
    code = (
        "import torch\n"
        "def refuse(*args): raise RuntimeError('touched CUDA')\n"
        "torch.cuda._lazy_init = torch.cuda.get_device_name = refuse\n"
        "import logging, torchtitan.tools.check, torchtitan.tools.verify\n"
        "assert not logging.getLogger('torchtitan').handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

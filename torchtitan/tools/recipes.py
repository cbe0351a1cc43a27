"""List the recipes that come with the package, and copy them."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from math import gcd, prod
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from torchtitan.config import (
    ConfigError,
    extended,
    nearest,
    packaged_folder,
    packaged_name,
    packaged_recipes,
    read_file,
    read_recipe,
)
from torchtitan.logging import make_console, on_terminal
from torchtitan.tools.options import Verb, verb

STUDIES = "studies/"
BASES = "base/"
"""Recipes that others extend, and that are not trained by themselves."""

ABOUT = 120
"""Characters about a recipe, at most."""

app = verb(help=__doc__)


@app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    if context.invoked_subcommand:
        return
    from rich.table import Table

    table = Table("recipe or study", "model", "ranks", "", box=None, padding=(0, 2, 0, 0))
    packaged = packaged_recipes()
    for name in sorted(packaged, key=lambda name: name.startswith(STUDIES)):
        if not name.startswith(BASES):
            table.add_row(name, *described(packaged[name]))
    console = make_console(width=None if on_terminal(sys.stdout) else 10_000)
    with console.capture() as capture:
        console.print(table)
    print(*(line.rstrip() for line in capture.get().splitlines()), sep="\n")
    print("\nstart one with `torchtitan train NAME`, a study with `torchtitan compare NAME`")


@app.command(cls=Verb)
def copy(
    name: Annotated[str, typer.Argument(help="Packaged recipe or study: llama3_8b.")],
    to: Annotated[
        Path, typer.Argument(help="Folder, or file that ends with .toml (default: this folder).")
    ] = Path(),
) -> None:
    """Copy a recipe and those that it extends; nothing is overwritten."""
    recipes = packaged_recipes()
    recipe = recipes.get(packaged_name(name))
    if recipe is None:
        near = nearest(packaged_name(name), recipes) or "; see torchtitan recipes"
        raise ConfigError(f"{name}: there is no packaged recipe of that name{near}")
    is_file = to.suffix == ".toml"
    root = to.parent if is_file else to
    start = recipe.parent if is_file else packaged_folder()
    files = {source: root / os.path.relpath(source, start) for source in needed(recipe)}
    if is_file:
        files[recipe] = to
    for source, file in files.items():
        if ".." in file.relative_to(root).parts:
            raise ConfigError(f"{name} extends {source.name}, in another folder; copy to a folder")
        if file.exists() and file.read_bytes() != source.read_bytes():
            raise ConfigError(f"{file} exists, with other content; copy to another folder")
    for source, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())
        print(file)


def described(path: Path) -> tuple[str, str, str]:
    """Return the model and ranks of a recipe or study, and the first sentence of its comment."""
    text = path.read_text(encoding="utf-8")
    lines = re.match(r"(# .*\n)*", text)
    comment = " ".join((lines[0] if lines else "").replace("# ", "").split())
    sentence = shorten(re.split(r"\.(?= [A-Z]|$)", comment)[0], ABOUT, placeholder=" ...")
    sources = read_recipe(path, [])
    found = {".".join(key): each.value for source in sources for key, each in source.items()}
    if "variants" in found:
        return "", str(found.get("ranks", 1)), sentence
    documented = re.search(r"on (\d+) GPUs", sentence)
    ranks = documented[1] if documented else f"{least_ranks(found)}+"
    model = found.get("model.name", "llama3"), found.get("model.flavor", "debugmodel")
    return " ".join(model), ranks, sentence


def least_ranks(recipe: Mapping[str, Any]) -> int:
    """Return `ParallelismConfig.least_ranks` of a recipe, without importing torch.

    Args:
        recipe: values by dotted key.
    """
    kinds = ("data_parallel_replicate", "pipeline_parallel", "tensor_parallel", "context_parallel")
    degree = {kind: recipe.get(f"parallelism.{kind}_degree", 1) for kind in kinds}
    experts, contexts = recipe.get("parallelism.expert_parallel_degree", 1), degree[kinds[-1]]
    shards = recipe.get("parallelism.data_parallel_shard_degree", -1)
    least_shards = experts // gcd(experts, contexts) if shards == -1 else shards
    return int(prod(degree.values()) * max(least_shards, 1))


def needed(path: Path) -> Iterator[Path]:
    """Yield a recipe or study, and all files that it extends or names."""
    yield path
    for key, setting in read_file(path, []).items():
        of_variant = len(key) == 3 and (key[0], key[2]) == ("variants", "recipe")
        if of_variant or key in (("extends",), ("recipe",)):
            yield from needed(extended(path, setting.value))

"""Recipes that come with the package: `train_configs/` of a clone, `torchtitan/recipes` of a wheel.

They are found by name in any folder: `debug_model`, `llama3_8b.toml`, `studies/fsdp_debug`.
"""

import os
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1]
CLONED: Final = "train_configs"


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

"""Provenance of a run, written to its folder: recipe and versions."""

import functools
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan import __version__
from torchtitan.config import show
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS

RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"


def about_run(job: JobConfig) -> dict[str, Any]:
    """Return the facts about a run that its checkpoints store."""
    return {"recipe": job.in_effect(), "seed": job.debug.seed, "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return versions that results may depend on, and the git commit of this code if it has one."""
    return {
        "torchtitan": __version__,
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, with "+changes" if modified."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=10, check=True
        )
        return str(done.stdout.strip())

    try:
        if not git("ls-files", "__init__.py"):
            return None  # installed into a folder that some other repository contains
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def to_toml(job: JobConfig) -> str:
    """Format a recipe as TOML with every key; loading it returns an equal recipe.

    The sizes set by the flavor are in a comment.
    """
    import tomlkit

    tree = job.model_dump(mode="json", exclude_none=True)
    text: str = tomlkit.dumps(tree)
    sizes = MODELS[job.model.name].settings.sizes_of(job.model_args())
    sizes_shown = ", ".join(f"{key} {show(v)}" for key, v in sizes.items() if v is not None)
    return text.replace("[model]\n", f"[model]\n# in effect: {sizes_shown}\n", 1)


def write_provenance(folder: Path, job: JobConfig, ranks: int, device: Device) -> None:
    """Write the resolved recipe and the environment, keeping the files of earlier launches.

    `recipe.toml` and `environment.json` are of the latest launch, `recipe.1.toml` and so on of
    earlier ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "seed": job.debug.seed,
        "ranks": ranks,
        "device": device.name,
        "device_type": device.type,
        "platform": platform.platform(),
        **versions(),
    }
    launches = len(list(folder.glob("environment*.json")))
    for name in (RECIPE_FILE, ENVIRONMENT_FILE):
        if (folder / name).exists():
            path = folder / name
            path.rename(path.with_suffix(f".{launches}{path.suffix}"))
    (folder / RECIPE_FILE).write_text(to_toml(job), encoding="utf-8")
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=1), encoding="utf-8")

"""Provenance of a run, written to its folder: recipe, versions, and the data that it read."""

import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan import __version__
from torchtitan.checkpoint import Checkpointable
from torchtitan.config import local_path, show
from torchtitan.data import BatchStream
from torchtitan.device import Device
from torchtitan.job import RECIPE_FILE, JobConfig, StagesOfTraining
from torchtitan.logging import logger
from torchtitan.metrics import SinkContext
from torchtitan.metrics.data_ledger import DataLedger
from torchtitan.models import MODELS
from torchtitan.parallel import Degrees, World
from torchtitan.tasks import Task

ENVIRONMENT_FILE = "environment.json"


def about_run(job: JobConfig, task: Task) -> dict[str, Any]:
    """Return the facts about a run that its checkpoints store."""
    recipe = {key: value for key, value in job.in_effect().items() if key not in task.unknown}
    return {"recipe": recipe, "seed": job.debug.seed, "versions": versions()}


def sink_context(job: JobConfig, world: World) -> SinkContext:
    """Return the facts about a run that its sinks write."""
    return SinkContext(
        folder=local_path(job.job.dump_folder),
        rank=world.rank,
        total_steps=job.training.steps,
        tensorboard_folder=job.metrics.save_tb_folder,
        color=not job.metrics.disable_color_printing,
        run_name=job.metrics.run_name,
        tags=job.metrics.tags,
        recipe=job.in_effect(),
    )


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
    # The environment is first, as the recipe of a launch must not get the number of another.
    texts = {ENVIRONMENT_FILE: json.dumps(environment, indent=1), RECIPE_FILE: to_toml(job)}
    for name in texts:
        if (folder / name).exists():
            path = folder / name
            path.rename(path.with_suffix(f".{launches}{path.suffix}"))
    for name, text in texts.items():  # half a recipe would be another
        write_whole(folder / name, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it exists completely or not at all."""
    unfinished = path.with_name(f"{path.name}.writing")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


@contextmanager
def record_data(
    stages: StagesOfTraining,
    world: World,
    ledger: DataLedger,
    data: BatchStream,
    contents: Checkpointable,
) -> Iterator[None]:
    """Record the position in the data at the start and, unless training fails, at the end."""
    if not world.rank and (mixture := data.describe()):
        logger.info("data: %s", mixture)
    stages.recorded = stages.now
    record_start(stages.job, world, ledger, contents.position())
    yield
    ledger.record("end", contents.position())


def record_start(
    job: JobConfig, world: World, ledger: DataLedger, position: Mapping[str, Any]
) -> None:
    """Record the start of a process or of a stage of training."""
    degrees = world.degrees
    ledger.record(
        "start",
        position,
        # Of all launches that trained, `described` keeps the recipe.
        launch=len(list(ledger.path.parent.glob("environment*.json"))),
        ranks=world.size,
        layout={axis: size for axis, size in degrees._asdict().items() if size > 1},
        seq_len=job.training.seq_len,
        global_batch=job.global_batch(degrees),
        identity=position["data"]["identity"] if position else {},
        order=data_order(job, degrees, position) if position else "",
    )


def data_order(job: JobConfig, degrees: Degrees, position: Mapping[str, Any]) -> str:
    """Return a digest of all that determines the samples of a run, apart from the files."""
    data = job.data.model_dump(mode="json", exclude={"num_workers", "prefetch_factor", "cache"})
    known = [data, job.debug.seed, job.training.seq_len, len(position["data"].get("lanes", ()))]
    if job.data.sources:
        known += [job.training.steps, job.global_batch(degrees)]
    return xxhash.xxh3_64_hexdigest(json.dumps(known).encode())

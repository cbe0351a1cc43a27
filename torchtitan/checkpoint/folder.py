"""Checkpoints on disk: which are complete, which one a run starts from, which are deleted.

    <dump_folder>/checkpoint/step-500          a complete checkpoint
    <dump_folder>/checkpoint/step-1000.saving  being written, or left by a run that was killed
    <dump_folder>/checkpoint/step-10.deleting  being deleted

A checkpoint is written under the second name and renamed when every byte is on disk; renaming a
folder is atomic, so the first name always means a complete checkpoint.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config import ConfigError

STATE_FILE = "train_state.json"


class Start(NamedTuple):
    """What a run starts from: nothing (`path` is None), its own past, or another run's weights."""

    path: Path | None
    model_only: bool = False
    is_resume: bool = False
    changes: tuple[str, ...] = ()
    """Differences between the recipe of the checkpoint and this one, one line each."""


def saved_steps(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step, in order."""
    if not folder.is_dir():
        return {}
    found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What is not tensors: counters, data position, recipe, versions."""
    path = checkpoint / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{checkpoint}: not a checkpoint: it has no {STATE_FILE}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged: {error}") from None
    return state


def choose_start(
    config: CheckpointConfig, dump_folder: Path, recipe: Mapping[str, Any], same_run: set[str]
) -> Start:
    """Decide what a run starts from; nothing is written.

    Args:
        recipe: the resolved recipe, dotted keys to values.
        same_run: the keys in which a recipe must agree with the checkpoint's to be the same run.

    Raises:
        ConfigError: where going on or starting afresh would surprise the user.
    """
    folder = dump_folder / config.folder
    steps = saved_steps(folder) if config.enable else {}
    if config.resume == "never":
        used = [dump_folder / "metrics.jsonl", *saved_steps(folder).values()]
        if found := [str(path) for path in used if path.exists()]:
            raise ConfigError(
                f'checkpoint.resume: got "never", but {dump_folder} has been used ({found[-1]}); '
                'choose another job.dump_folder, or resume = "auto" to go on with that run'
            )
        return _initial(config)
    full = {n: path for n, path in steps.items() if not read_state(path)["model_only"]}
    if config.load_step >= 0:
        if config.load_step not in full:
            raise ConfigError(
                f"checkpoint.load_step: there is no checkpoint of step {config.load_step} to "
                f"resume in {folder}; {_which(full)}"
            )
        path = full[config.load_step]
    elif full:
        path = full[max(full)]
    elif steps:
        raise ConfigError(
            f"checkpoint.folder: {folder} holds only weights ({_which(steps)}), which cannot be "
            "resumed; choose another job.dump_folder and set checkpoint.initial_load_path"
        )
    elif config.resume == "must":
        raise ConfigError(
            f'checkpoint.resume: got "must", but there is no checkpoint in {folder}; '
            'write resume = "auto" to start afresh'
        )
    else:
        return _initial(config)
    saved = read_state(path)["recipe"]
    changes = {
        key: f"{key}: {json.dumps(saved.get(key))} -> {json.dumps(recipe.get(key))}"
        for key in sorted(saved.keys() | recipe.keys())
        if saved.get(key) != recipe.get(key)
    }
    if config.resume == "auto" and (foreign := [changes[k] for k in changes if k in same_run]):
        raise ConfigError(
            f"checkpoint.resume: {path} is of another run ({'; '.join(foreign)}); choose another "
            'job.dump_folder, or write resume = "must" to go on from it all the same'
        )
    return Start(path, is_resume=True, changes=tuple(changes.values()))


def _initial(config: CheckpointConfig) -> Start:
    if config.initial_load_path is None:
        return Start(None)
    path = Path(config.initial_load_path).expanduser()
    if not (path / STATE_FILE).is_file():
        steps = saved_steps(path)
        if not steps:
            raise ConfigError(
                f"checkpoint.initial_load_path: {path} is neither a checkpoint nor a folder of "
                "checkpoints (step-N)"
            )
        path = steps[max(steps)]
    if read_state(path)["model_only"] and not config.initial_load_model_only:
        raise ConfigError(
            f"checkpoint.initial_load_path: {path} holds only weights; "
            "write initial_load_model_only = true"
        )
    return Start(path, model_only=config.initial_load_model_only)


def _which(steps: Mapping[int, Path]) -> str:
    return f"there are {', '.join(f'step-{step}' for step in steps)}" if steps else "there is none"


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write step `step` into."""
    path = folder / f"step-{step}.saving"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what `read_state` reads, down to the disk."""
    with (path / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def commit(path: Path) -> Path:
    """Turn a finished `.saving` folder into a checkpoint, down to the disk."""
    _sync(path)
    done = path.with_suffix("")
    path.rename(done)
    _sync(done.parent)
    return done


def delete(path: Path) -> None:
    """Delete a checkpoint so that no moment shows half of one."""
    doomed = path.with_name(f"{path.name}.deleting")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> list[str]:
    """Delete what a killed run left unfinished; return the names."""
    left = [p for p in folder.glob("step-*") if p.suffix in (".saving", ".deleting")]
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

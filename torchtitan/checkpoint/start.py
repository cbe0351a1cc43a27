"""What a run starts from: a checkpoint of its own, another run's weights, or nothing."""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.folder import look_at, read_state, saved_steps
from torchtitan.checkpoint.manifest import Damaged, read_manifest
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.weights.opening import FOREIGN, find_format
from torchtitan.config import ConfigError
from torchtitan.models import spec_in_recipe, with_sizes


class ResumePoint(NamedTuple):
    """What a run starts from: nothing (`path` is None), its own past, or another run's weights."""

    path: Path | None
    model_only: bool = False
    is_resume: bool = False
    changes: tuple[str, ...] = ()
    """Differences between the recipe of the checkpoint and this one, one line each."""
    damaged: tuple[tuple[Path, str], ...] = ()
    """Newer checkpoints that are not what was saved, and why; they are to be set aside."""
    format: str = "ours"
    """Of the weights: a key of `weights.opening.OPEN`."""


class ResumePolicy(NamedTuple):
    """What decides on the start of a run."""

    config: CheckpointConfig
    dump_folder: Path
    recipe: Mapping[str, Any]
    """Resolved: dotted keys to values."""
    same_run: Set[str]
    """The keys in which a recipe must agree with the checkpoint's to be the same run."""

    def start(self, damaged: Mapping[Path, str] | None = None) -> ResumePoint:
        """What the run starts from; nothing is written.

        Args:
            damaged: checkpoints known to be so, and why; others are found out by what costs no
                reading.

        Raises:
            ConfigError: where going on or starting afresh would surprise the user.
        """
        return choose_start(*self, damaged=dict(damaged or {}))


def choose_start(
    config: CheckpointConfig,
    dump_folder: Path,
    recipe: Mapping[str, Any],
    same_run: Set[str],
    damaged: dict[Path, str],
) -> ResumePoint:
    """See `ResumePolicy.start`."""
    folder = dump_folder / config.folder
    steps = saved_steps(folder) if config.enable else {}
    if config.resume == "never":
        used = [dump_folder / "metrics.jsonl", *saved_steps(folder).values()]
        if found := [str(path) for path in used if path.exists()]:
            raise ConfigError(
                f'checkpoint.resume: got "never", but {dump_folder} has been used ({found[-1]}); '
                'choose another job.dump_folder, or resume = "auto" to go on with that run'
            )
        return _initial(config, recipe)
    full: dict[int, Path] = {}
    weights: dict[int, Path] = {}
    for step, path in steps.items():
        try:
            manifest = look_at(path)
            if path not in damaged:
                (weights if manifest.model_only else full)[step] = path
        except Damaged as error:
            damaged.setdefault(path, str(error))
    if config.load_step >= 0:
        if config.load_step not in full:
            asked = folder / f"step-{config.load_step}"
            why = f"{damaged[asked]}; " if asked in damaged else ""
            raise ConfigError(
                f"checkpoint.load_step: there is no checkpoint of step {config.load_step} to "
                f"resume in {folder}; {why}{_which(full)}"
            )
        path = full[config.load_step]
    elif full:
        path = full[max(full)]
    elif damaged:
        raise ConfigError(
            f"checkpoint.folder: no checkpoint in {folder} is what was saved; delete them to start "
            f"afresh:\n{_lines(damaged)}"
        )
    elif weights:
        raise ConfigError(
            f"checkpoint.folder: {folder} holds only weights ({_which(weights)}), which cannot be "
            "resumed; choose another job.dump_folder and set checkpoint.initial_load_path"
        )
    elif config.resume == "must":
        raise ConfigError(
            f'checkpoint.resume: got "must", but there is no checkpoint in {folder}; '
            'write resume = "auto" to start afresh'
        )
    else:
        return _initial(config, recipe)
    newer = {p: why for p, why in damaged.items() if _step(p) > _step(path)}
    if newer and config.load_step < 0 and config.resume == "must":
        raise ConfigError(
            f'checkpoint.resume: got "must", but the newest checkpoint is damaged; write '
            f'resume = "auto" or checkpoint.load_step = {_step(path)} to go on from '
            f"{path.name}:\n{_lines(newer)}"
        )
    saved = with_sizes(read_state(path, read_manifest(path))["recipe"])
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
    aside = tuple(newer.items()) if config.load_step < 0 else ()
    return ResumePoint(path, is_resume=True, changes=tuple(changes.values()), damaged=aside)


def _initial(config: CheckpointConfig, recipe: Mapping[str, Any]) -> ResumePoint:
    if config.initial_load_path is None:
        return ResumePoint(None)
    path = Path(config.initial_load_path).expanduser()
    kind = find_format(path)
    if kind != "ours":
        if not config.initial_load_model_only:
            raise ConfigError(
                f"checkpoint.initial_load_path: {path} holds only weights, in the format {kind}; "
                "write initial_load_model_only = true"
            )
        open_weights(path, kind, recipe)
        return ResumePoint(path, model_only=True, format=kind)
    if steps := saved_steps(path):
        path = steps[max(steps)]
    try:
        manifest = look_at(path)
    except Damaged as error:
        raise ConfigError(
            f"checkpoint.initial_load_path: {path} is neither a checkpoint nor a folder of "
            f"checkpoints (step-N): {error}"
        ) from None
    if manifest.model_only and not config.initial_load_model_only:
        raise ConfigError(
            f"checkpoint.initial_load_path: {path} holds only weights; "
            "write initial_load_model_only = true"
        )
    return ResumePoint(path, model_only=config.initial_load_model_only)


def open_weights(path: Path, kind: str, recipe: Mapping[str, Any]) -> TensorSource:
    """Weights of another format, under our names.

    Raises:
        ConfigError: where they are not those of the recipe's model.
    """
    try:
        return FOREIGN[kind](path, [spec_in_recipe(recipe)], recipe["model.flavor"])
    except ConfigError as error:
        raise ConfigError(f"checkpoint.initial_load_path: {error}") from None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _lines(damaged: Mapping[Path, str]) -> str:
    return "\n".join(f"  {why}" for why in damaged.values())


def _which(steps: Mapping[int, Path]) -> str:
    return f"there are {', '.join(f'step-{step}' for step in steps)}" if steps else "there is none"

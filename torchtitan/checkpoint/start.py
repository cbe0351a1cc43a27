"""Choice of the starting point of a run: its own checkpoint, another run's, or nothing."""

import json
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtitan.checkpoint.dcp.reader import saved_by_dcp
from torchtitan.checkpoint.folder import look_at, read_state, saved_steps
from torchtitan.checkpoint.initial import (
    GLOBAL_BATCH,
    ResumePoint,
    global_batch,
    initial_point,
    kept,
    rate_change,
)
from torchtitan.checkpoint.manifest import Damaged, read_manifest
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config import ConfigError
from torchtitan.data import without_idle_sections
from torchtitan.models import with_sizes
from torchtitan.optim import OptimizerConfig, without_idle_keys

NONE: Mapping[int, Path] = MappingProxyType({})


class ResumePolicy(NamedTuple):
    """Policy that chooses the starting point of a run."""

    config: CheckpointConfig
    dump_folder: Path
    recipe: Mapping[str, Any]
    """Resolved recipe: dotted keys to values."""
    same_run: Set[str]
    """Keys in which a recipe must agree with the checkpoint's to be the same run."""
    optimizer: OptimizerConfig
    factor: Callable[[int], float]
    """Fraction of the peak learning rate, by step of the schedule."""

    def start(
        self, damaged: Mapping[Path, str] | None = None, frequent: Mapping[int, Path] = NONE
    ) -> ResumePoint:
        """Choose the starting point of the run, without writing anything.

        Args:
            damaged: checkpoints known to be damaged, with the reasons; others are detected as far
                as possible without reading files.
            frequent: whole checkpoints by step, also to choose from, of which this node may not
                have all files.

        Raises:
            ConfigError: if resuming or starting afresh would surprise the user.
        """
        own = choose_own(
            *(self.config, self.dump_folder, self.recipe, self.same_run, damaged or {}),
            *(frequent, self.rate_change),
        )
        try:
            return own or self.initial()
        except ConfigError as error:
            raise ConfigError(f"checkpoint.initial_load_path: {error}") from None

    def rate_change(self, state: Mapping[str, Any]) -> str:
        """Tell what the recipe changes in the learning rate of a saved run's next step."""
        return rate_change(state, self.optimizer, self.factor, self.config.exclude_from_loading)

    def initial(self) -> ResumePoint:
        """Return the starting point of a run without a checkpoint of its own."""
        return initial_point(self.config, self.recipe, self.optimizer, self.factor)


def choose_own(
    config: CheckpointConfig,
    dump_folder: Path,
    recipe: Mapping[str, Any],
    same_run: Set[str],
    known_damaged: Mapping[Path, str],
    frequent: Mapping[int, Path] = NONE,
    rate: Callable[[Mapping[str, Any]], str] = lambda state: "",
) -> ResumePoint | None:
    """Choose the run's own checkpoint to resume, or None; see `ResumePolicy.start`."""
    folder = config.path_in(dump_folder)
    steps = saved_steps(folder) if config.enable else {}
    _refuse_others(config, dump_folder, folder, steps)
    if config.resume == "never":
        return None
    own = _sorted_out(steps, known_damaged)
    own = own._replace(full={**frequent, **own.full})
    path = _chosen(config, folder, own)
    if path is None:
        return None
    if config.load_step >= 0:
        last, newer = recipe["training.steps"], {}
        for step in (n for n in steps if config.load_step < n <= last):
            if config.saves_at(step, is_final=step == last):
                raise taken(steps[step])
    else:
        newer = {p: why for p, why in own.damaged.items() if _step(p) > _step(path)}
    if newer and config.resume == "must":
        raise ConfigError(
            'checkpoint.resume: got "must", but the newest checkpoint is damaged; resume from '
            f"{path.name} with --checkpoint.resume auto, or with --checkpoint.load_step "
            f"{_step(path)}\n{_lines(newer)}"
        )
    state = read_state(path, read_manifest(path))
    saved = with_sizes(without_idle_keys(without_idle_sections(state["recipe"])))
    if recipe[GLOBAL_BATCH] == -1:  # no change: the batch is kept
        recipe = {**recipe, GLOBAL_BATCH: saved.get(GLOBAL_BATCH)}
    keeps = kept(recipe, saved)
    recipe = {**recipe, **dict(keeps)}
    changes = {
        key: f"{key}: {json.dumps(saved.get(key))} -> {json.dumps(recipe.get(key))}"
        for key in sorted(saved.keys() | recipe.keys())
        if saved.get(key) != recipe.get(key)
    }
    if config.resume == "auto" and (foreign := [key for key in changes if key in same_run]):
        # Weights of other sizes cannot be loaded.
        fits = not any(key.startswith("model.") for key in foreign)
        raise ConfigError(
            f"checkpoint.resume: {path} belongs to another run "
            f"({'; '.join(changes[key] for key in foreign)}); choose another job.dump_folder"
            + ", or resume from it anyway with --checkpoint.resume must"
            * fits
        )
    return ResumePoint(
        path,
        is_resume=True,
        changes=tuple(changes.values()),
        damaged=tuple(newer.items()),
        global_batch=global_batch(state),
        rate=rate(state),
        kept=keeps,
    )


class _Own(NamedTuple):
    """Checkpoints of a folder, by usability."""

    full: Mapping[int, Path]
    weights: Mapping[int, Path]
    damaged: Mapping[Path, str]


def _sorted_out(steps: Mapping[int, Path], known_damaged: Mapping[Path, str]) -> _Own:
    full: dict[int, Path] = {}
    weights: dict[int, Path] = {}
    damaged = dict(known_damaged)
    for step, path in steps.items():
        try:
            manifest = look_at(path)
            if path not in damaged:
                (weights if manifest.model_only else full)[step] = path
        except Damaged as error:
            damaged.setdefault(path, str(error))
    return _Own(full, weights, damaged)


def _refuse_others(
    config: CheckpointConfig, dump_folder: Path, folder: Path, steps: Mapping[int, Path]
) -> None:
    """Refuse a folder of another run, or, with "never", one that has been used."""
    if theirs := [path for path in steps.values() if saved_by_dcp(path)]:
        raise ConfigError(
            f"checkpoint.folder: {theirs[-1]} was saved by torch's distributed checkpoint, not "
            "by a run of this recipe; choose another job.dump_folder, and to start from it set "
            f'checkpoint.initial_load_path = "{folder}" and initial_load_model_only = false'
        )
    if config.resume == "never":
        used = [dump_folder / "metrics.jsonl", *saved_steps(folder).values()]
        if found := [str(path) for path in used if path.exists()]:
            raise ConfigError(
                f'checkpoint.resume: got "never", but {dump_folder} has been used ({found[-1]}); '
                "choose another job.dump_folder, or resume that run with --checkpoint.resume auto"
            )


def _chosen(config: CheckpointConfig, folder: Path, own: _Own) -> Path | None:
    """Return the checkpoint to resume; None if there is none and the recipe allows that."""
    if config.load_step >= 0:
        if config.load_step in own.full:
            return own.full[config.load_step]
        asked = folder / f"step-{config.load_step}"
        why = f"{own.damaged[asked]}; " if asked in own.damaged else ""
        raise ConfigError(
            f"checkpoint.load_step: there is no checkpoint of step {config.load_step} to "
            f"resume in {folder}; {why}{_which(own.full)}"
        )
    if own.full:
        return own.full[max(own.full)]
    if own.damaged:
        raise ConfigError(
            f"checkpoint.folder: all checkpoints in {folder} are damaged; delete them to start "
            f"from scratch\n{_lines(own.damaged)}"
        )
    if own.weights:
        raise ConfigError(
            f"checkpoint.folder: {folder} holds only weights ({_which(own.weights)}), which cannot "
            "be resumed; choose another job.dump_folder and set checkpoint.initial_load_path"
        )
    if config.resume == "must":
        raise ConfigError(
            f'checkpoint.resume: got "must", but there is no checkpoint in {folder}; start from '
            "scratch with --checkpoint.resume auto"
        )
    return None


def taken(path: Path) -> ConfigError:
    """Return the error that a save would overwrite the checkpoint of a run that went further."""
    return ConfigError(
        f"checkpoint.load_step: {path}: already exists, from a run that continued after "
        "checkpoint.load_step, and this run would save the same step. Delete it; or, to keep it, "
        "choose another job.dump_folder, remove checkpoint.load_step, and set "
        "checkpoint.initial_load_path to the checkpoint to load and "
        "checkpoint.initial_load_model_only = false"
    )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _lines(damaged: Mapping[Path, str]) -> str:
    return "\n".join(f"  {why}" for why in damaged.values())


def _which(steps: Mapping[int, Path]) -> str:
    return f"there are {', '.join(f'step-{step}' for step in steps)}" if steps else "there is none"

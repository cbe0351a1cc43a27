"""Starting point of a run that has no checkpoint of its own: `initial_load_path`, if any."""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.contents import SavedRun, open_run
from torchtitan.checkpoint.dcp.optimizer import changes, check_states
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.dcp.torchtitan import TorchTitanCheckpoint
from torchtitan.checkpoint.folder import look_at, read_state
from torchtitan.checkpoint.manifest import Damaged, Manifest
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import SavedTensors, TensorSource
from torchtitan.checkpoint.weights.hugging_face_files import CONFIG, HuggingFaceShards
from torchtitan.checkpoint.weights.network import in_recipe
from torchtitan.checkpoint.weights.opening import FOREIGN, find_format, newest
from torchtitan.config import ConfigError
from torchtitan.models import spec_in_recipe
from torchtitan.optim import OptimizerConfig, rate_in_recipe
from torchtitan.remote import location

GLOBAL_BATCH = "training.global_batch_size"


class ResumePoint(NamedTuple):
    """Starting point of a run: nothing (`path` is None), its own checkpoint, or another run's."""

    path: Path | None
    model_only: bool = False
    is_resume: bool = False
    changes: tuple[str, ...] = ()
    """Differences between the recipe of the checkpoint and this one, one line each."""
    damaged: tuple[tuple[Path, str], ...] = ()
    """Newer checkpoints that are damaged and will be renamed, with the reasons."""
    format: str = "ours"
    """Format of the checkpoint: a key of `weights.opening.OPEN`, or "dcp" as TorchTitan saves."""
    skip_samples: int = 0
    """Number of samples to skip, if the checkpoint lacks the data position."""
    global_batch: int | None = None
    """Sequences per step of the run that is resumed, if known."""
    rate: str = ""
    """Change of the learning rate of the next step from that by the recipe of a checkpoint of ours;
    empty: none is known."""
    kept: tuple[tuple[str, Any], ...] = ()
    """Values of the run that is resumed for keys that the recipe leaves open."""


def initial_point(
    config: CheckpointConfig,
    recipe: Mapping[str, Any],
    optimizer: OptimizerConfig,
    factor: Callable[[int], float],
) -> ResumePoint:
    """Return the starting point of a run, verified to have all tensors in the right shapes.

    Args:
        factor: fraction of the peak learning rate, by step of the schedule.

    Raises:
        ConfigError: if the recipe cannot start from `initial_load_path`.
    """
    if config.initial_load_path is None:
        return ResumePoint(None, skip_samples=recipe["data.skip_samples"])
    path = newest(location(config.initial_load_path))
    kind, model_only = find_format(path), config.initial_load_model_only
    start, samples = ResumePoint(path, model_only, format=kind), None
    holds_run = has_position = False
    if kind == "ours":
        manifest = _look_at(path)
        holds_run = not manifest.model_only
        state = read_state(path, manifest)
        skips = model_only or "data" in config.exclude_from_loading
        has_position = "data" in state and not skips
        # A checkpoint converted from TorchTitan has only the number of tokens.
        tokens = state["train_state"]["tokens"] if holds_run else None
        samples = state["data"]["samples"] if "data" in state else _samples(recipe, tokens)
        if not model_only:
            skipped = config.exclude_from_loading
            rate = rate_change(state, optimizer, factor, skipped) if holds_run else ""
            start = start._replace(global_batch=global_batch(state), rate=rate)
    elif kind == "dcp":
        theirs = TorchTitanCheckpoint(path, in_recipe(recipe))
        holds_run = theirs.holds_run
        samples = _samples(recipe, theirs.tokens)
    else:
        open_weights(path, kind, recipe)
    if not holds_run and not model_only:
        which = f", in the format {kind}" if kind in FOREIGN else ""
        raise ConfigError(f"{path} has only weights{which}; set initial_load_model_only = true")
    if kind == "dcp" and not model_only:
        if "optimizer" not in config.exclude_from_loading:
            check_states(theirs, optimizer)
        told = changes(theirs, optimizer, factor)
        if theirs.dtype != (dtype := recipe["training.dtype"]):
            told.append(f"training.dtype: {theirs.dtype} -> {dtype}")
        start = start._replace(changes=tuple(told))
    if has_position:
        start = start._replace(kept=kept(recipe, state["recipe"]))
    else:
        return start._replace(skip_samples=_to_skip(recipe, path, samples))
    if (skip := recipe["data.skip_samples"]) > 0:
        raise ConfigError(
            f"{path} contains the position of its data, at which the run continues, so "
            f'data.skip_samples = {skip} would have no effect; set it to 0, or add "data" to '
            "checkpoint.exclude_from_loading"
        )
    return start


def rate_change(
    state: Mapping[str, Any],
    optimizer: OptimizerConfig,
    factor: Callable[[int], float],
    skipped: Collection[str],
) -> str:
    """Tell in a line what this recipe does to the learning rate of a saved run's next step.

    Args:
        skipped: parts of the checkpoint that are not loaded.
    """
    counters = state["train_state"]
    done = counters["step"] - counters.get("schedule_start", 0)
    there = rate_in_recipe(state.get("recipe", {}), done + 1)
    starts_over = "lr_scheduler" in skipped or "train_state" in skipped
    here = optimizer.lr * factor(1 if starts_over else done + 1)
    if there is None or math.isclose(there, here, rel_tol=1e-6):
        return ""
    step = 1 if "train_state" in skipped else counters["step"] + 1
    return f"learning rate of step {step}: {there:g} -> {here:g}"


def kept(recipe: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the values of a saved recipe that a run which resumes keeps where its own has none.

    Before these followed the tokenizer, they were true.
    """
    keys = [key for key in ("data.add_bos", "data.add_eos") if recipe.get(key) is None]
    return tuple((key, saved[key]) for key in keys if saved.get(key) is not None)


def global_batch(state: Mapping[str, Any]) -> int | None:
    """Return the number of sequences per step of a saved run; None if unknown.

    Runs recorded -1 once; their lanes were as many as the sequences, unless the recipe set them.
    """
    recipe = state.get("recipe", {})
    batch: int = recipe.get(GLOBAL_BATCH, -1)
    if batch == -1 and recipe.get("data.lanes") == -1 and "data" in state:
        batch = len(state["data"].get("lanes", ())) or -1
    return None if batch == -1 else batch


def _samples(recipe: Mapping[str, Any], tokens: int | None) -> int | None:
    """Return the number of samples with this many tokens; None if unknown."""
    return None if tokens is None else math.ceil(tokens / recipe["training.seq_len"])


def _to_skip(recipe: Mapping[str, Any], path: Path, samples: int | None) -> int:
    """Return the samples to skip, given the number that the checkpoint was trained on, if known."""
    wanted: int = recipe["data.skip_samples"]
    if wanted >= 0:
        return wanted
    if samples is None:
        raise ConfigError(
            f"{path} does not record on how much data it was trained; set data.skip_samples to "
            "the number of its samples, instead of -1"
        )
    return samples


def open_initial(start: ResumePoint, recipe: Mapping[str, Any]) -> SavedRun:
    """Open the full checkpoint that a run resumes or starts from."""
    assert start.path is not None, "there is something to begin with"
    if start.format == "dcp":
        return TorchTitanCheckpoint(start.path, in_recipe(recipe)).run()
    return open_run(start.path)


def _look_at(path: Path) -> Manifest:
    try:
        return look_at(path)
    except Damaged as error:
        raise ConfigError(
            f"{path} is neither a checkpoint nor a folder of checkpoints (step-N): {error}"
        ) from None


def open_weights(path: Path, kind: str, recipe: Mapping[str, Any]) -> TensorSource:
    """Open weights of any format, under our names.

    Raises:
        ConfigError: if they do not match the recipe's model.
    """
    if kind == "ours":
        return SavedTensors(path)
    if kind == "dcp":
        return TorchTitanCheckpoint(path, in_recipe(recipe))
    if kind == "hf" and not (path / CONFIG).exists():
        # Without config.json: DCP wrote them, under either naming.
        network = in_recipe(recipe)
        if DcpCheckpoint(path).shapes().keys() & network.parameters().keys():
            return TorchTitanCheckpoint(path, network)
        return HuggingFaceShards(path, network)
    return FOREIGN[kind](path, [spec_in_recipe(recipe)], recipe["model.flavor"])

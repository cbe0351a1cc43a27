"""Choice of the starting point of a run: its own checkpoint, another run's, or nothing."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.contents import SavedRun, open_run
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint, saved_by_dcp
from torchtitan.checkpoint.dcp.torchtitan import TorchTitanCheckpoint
from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import SavedTensors, TensorSource
from torchtitan.checkpoint.store import step_of
from torchtitan.checkpoint.weights.hugging_face_files import CONFIG, HuggingFaceShards
from torchtitan.checkpoint.weights.network import in_recipe
from torchtitan.checkpoint.weights.opening import FOREIGN, find_format, newest
from torchtitan.config import ConfigError
from torchtitan.data import without_idle_sections
from torchtitan.models import spec_in_recipe, with_sizes
from torchtitan.optim import OptimizerConfig, rate_in_recipe, without_idle_keys
from torchtitan.remote import path_to_read

GLOBAL_BATCH = "training.global_batch_size"
NONE: Mapping[Any, Any] = MappingProxyType({})


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
    """Change of the learning rate of the next step; empty: none is known."""
    kept: tuple[tuple[str, Any], ...] = ()
    """Values of the run that is resumed for keys that the recipe leaves open."""
    excluded: tuple[str, ...] = ()
    """Parts of the checkpoint that are not loaded."""


class ResumePolicy(NamedTuple):
    """Policy that chooses the starting point of a run."""

    config: CheckpointConfig
    dump_folder: Path
    recipe: Mapping[str, Any]
    """Resolved recipe: dotted keys to values."""
    same_run: Set[str]
    """Keys in which a recipe must agree with the checkpoint's to be the same run."""
    optimizer: OptimizerConfig
    factor: Callable[..., float]
    """Fraction of the peak learning rate, by step of the schedule, tokens before, and optionally
    `batch`, the sequences per step of the run that is resumed."""

    def start(
        self, damaged: Mapping[Path, str] = NONE, frequent: Mapping[int, Path] = NONE
    ) -> ResumePoint:
        """Choose the starting point of the run, without writing anything.

        Checkpoints are detected as damaged as far as possible without reading files, if they are
        not among the `damaged`, with reasons. `frequent` has whole ones by step, also to choose
        from, of which this node may not have all files. Raises ConfigError if the start would
        surprise the user.
        """
        own = self._own(dict(damaged), frequent)
        try:
            return own or self.initial()
        except ConfigError as error:
            raise ConfigError(f"checkpoint.initial_load_path: {error}") from None

    # --- without a checkpoint of its own ---

    def initial(self) -> ResumePoint:
        """Return the start without a checkpoint of its own, or raise ConfigError."""
        recipe, model_only = self.recipe, self.config.initial_load_model_only
        if self.config.initial_load_path is None:
            return ResumePoint(None, skip_samples=recipe["data.skip_samples"])
        path = newest(path_to_read(self.config.initial_load_path))
        kind, excluded = find_format(path), self.config.exclude_from_loading
        start, samples = ResumePoint(path, model_only, format=kind, excluded=excluded), None
        holds_run = has_position = False
        if kind == "ours":
            try:
                holds_run = not disk.read_verified_manifest(path).model_only
            except Damaged as error:
                raise ConfigError(
                    f"{path} is neither a checkpoint nor a folder of checkpoints (step-N): {error}"
                ) from None
            state = disk.read_state(path)
            has_position = "data" in state and not model_only and "data" not in excluded
            # A checkpoint converted from TorchTitan has only the number of tokens.
            is_known = holds_run or "data" in state
            samples = self._samples(state["train_state"]["tokens"] if is_known else None)
            length = "training.seq_len"
            if "data" in state and state["recipe"].get(length) == recipe[length]:
                samples = state["data"]["samples"]
            if holds_run and not model_only:
                rate = self._own_rate_change(state, excluded)
                start = start._replace(global_batch=global_batch(state), rate=rate)
        elif kind == "dcp":
            theirs = TorchTitanCheckpoint(path, in_recipe(recipe))
            holds_run = theirs.holds_run
            samples = self._samples(theirs.tokens)
            if holds_run and not model_only:
                if "optimizer" not in excluded:
                    theirs.check_states(self.optimizer)
                told = theirs.changes(self.optimizer)
                if theirs.dtype != (dtype := recipe["training.dtype"]):
                    told.append(f"training.dtype: {theirs.dtype} -> {dtype}")
                rate = self._rate_change(theirs.counters(), theirs.rate, excluded)
                start = start._replace(changes=tuple(told), rate=rate)
        else:
            open_weights(path, kind, recipe)
        if not holds_run and not model_only:
            which = f", in the format {kind}" if kind in FOREIGN else ""
            raise ConfigError(f"{path} has only weights{which}; set initial_load_model_only = true")
        skip: int = recipe["data.skip_samples"]
        if has_position and skip > 0:
            raise ConfigError(
                f"{path} contains the position of its data, at which the run continues, so "
                f"data.skip_samples = {skip} would have no effect; set it to 0, or add "
                '"data" to checkpoint.exclude_from_loading'
            )
        if has_position:
            return start._replace(kept=kept(recipe, state["recipe"]))
        if skip < 0 and samples is None:
            raise ConfigError(
                f"{path} does not record on how much data it was trained; set data.skip_samples "
                "to the number of its samples, instead of -1"
            )
        return start._replace(skip_samples=samples if skip < 0 and samples is not None else skip)

    def _samples(self, tokens: int | None) -> int | None:
        """Return the number of samples with this many tokens; None if unknown."""
        return None if tokens is None else math.ceil(tokens / self.recipe["training.seq_len"])

    def _own_rate_change(self, state: Mapping[str, Any], excluded: Collection[str]) -> str:
        counters = state["train_state"]
        there = rate_in_recipe(state.get("recipe", {}), *disk.place_in_schedule(counters))
        own = self._replace(factor=partial(self.factor, batch=global_batch(state)))
        return own._rate_change(counters, there, excluded)

    def _rate_change(
        self, counters: Mapping[str, int], there: float | None, excluded: Collection[str]
    ) -> str:
        """Tell what this recipe does to a run's learning rate of the next step, by its counters.

        `there` is that rate by the checkpoint, of which the parts `excluded` are not loaded.
        """
        starts_over = "lr_scheduler" in excluded or "train_state" in excluded
        factor = self.factor(*((1, 0) if starts_over else disk.place_in_schedule(counters)))
        here = self.optimizer.lr * factor
        if there is None or math.isclose(there, here, rel_tol=1e-6):
            return ""
        step = 1 if "train_state" in excluded else counters["step"] + 1
        return f"learning rate of step {step}: {there:g} -> {here:g}"

    # --- with its own ---

    def _own(self, damaged: dict[Path, str], frequent: Mapping[int, Path]) -> ResumePoint | None:
        """Choose the run's own checkpoint to resume, or None; see `start`."""
        config, folder = self.config, self.config.path_in(self.dump_folder)
        steps = disk.saved_steps(folder) if config.enable else {}
        self._refuse_others(folder, steps)
        if config.resume == "never":
            return None
        path = self._path(folder, steps, damaged, frequent)
        if path is None:
            return None
        newer: dict[Path, str] = {}
        if config.load_step < 0:
            newer = {p: why for p, why in damaged.items() if step_of(p) > step_of(path)}
        if newer and config.resume == "must":
            raise ConfigError(
                'checkpoint.resume: got "must", but the newest checkpoint is damaged; resume from '
                f"{path.name} with --checkpoint.resume auto, or with --checkpoint.load_step "
                f"{step_of(path)}\n{_lines(newer)}"
            )
        state = disk.read_state(path)
        # A part is left out once: a checkpoint saved with it in the recipe is from after that.
        before = state["recipe"].get("checkpoint.exclude_from_loading", ())
        excluded = tuple(part for part in config.exclude_from_loading if part not in before)
        starts_over = "train_state" in excluded
        begin, last = 0 if starts_over else config.load_step, self.recipe["training.steps"]
        for step in (n for n in steps if 0 <= begin < n <= last and steps[n] not in newer):
            if config.saves_at(step, is_final=step == last):
                raise step_already_saved_error(steps[step], starts_over=starts_over)
        saved = with_sizes(without_idle_keys(without_idle_sections(state["recipe"])))
        recipe = dict(self.recipe)
        if recipe[GLOBAL_BATCH] == -1:  # no change: the batch is kept
            recipe[GLOBAL_BATCH] = saved.get(GLOBAL_BATCH)
        keeps = kept(recipe, saved)
        recipe |= dict(keeps)
        changed = {
            key: f"{key}: {json.dumps(saved.get(key))} -> {json.dumps(recipe.get(key))}"
            for key in sorted(saved.keys() | recipe.keys())
            if saved.get(key) != recipe.get(key)
        }
        if config.resume == "auto" and (foreign := [k for k in changed if k in self.same_run]):
            # Weights of other sizes cannot be loaded.
            fits = not any(key.startswith("model.") for key in foreign)
            raise ConfigError(
                f"checkpoint.resume: {path} belongs to another run "
                f"({'; '.join(changed[key] for key in foreign)}); choose another job.dump_folder"
                + ", or resume from it anyway with --checkpoint.resume must"
                * fits
            )
        return ResumePoint(
            path,
            is_resume=True,
            changes=tuple(changed.values()),
            damaged=tuple(newer.items()),
            global_batch=global_batch(state),
            rate=self._own_rate_change(state, excluded),
            kept=keeps,
            excluded=excluded,
        )

    def _refuse_others(self, folder: Path, steps: Mapping[int, Path]) -> None:
        """Refuse a folder of another run, or, with "never", one that has been used."""
        if theirs := [path for path in steps.values() if saved_by_dcp(path)]:
            raise ConfigError(
                f"checkpoint.folder: {theirs[-1]} was saved by torch's distributed checkpoint, not "
                "by a run of this recipe; choose another job.dump_folder, and to start from it set "
                f'checkpoint.initial_load_path = "{folder}" and initial_load_model_only = false'
            )
        if self.config.resume == "never":
            used = [self.dump_folder / "metrics.jsonl", *disk.saved_steps(folder).values()]
            if found := [str(path) for path in used if path.exists()]:
                raise ConfigError(
                    f'checkpoint.resume: got "never", but {self.dump_folder} has been used '
                    f"({found[-1]}); choose another job.dump_folder, or resume that run with "
                    "--checkpoint.resume auto"
                )

    def _path(
        self,
        folder: Path,
        steps: Mapping[int, Path],
        damaged: dict[Path, str],
        frequent: Mapping[int, Path],
    ) -> Path | None:
        """Return the checkpoint to resume, if any; those found to be `damaged` are added."""
        full, weights = dict(frequent), dict[int, Path]()
        for step, path in steps.items():
            try:
                manifest = disk.read_verified_manifest(path)
                if path not in damaged:
                    (weights if manifest.model_only else full)[step] = path
            except Damaged as error:
                damaged.setdefault(path, str(error))
        if (asked := self.config.load_step) >= 0:
            if asked in full:
                return full[asked]
            why = damaged.get(folder / f"step-{asked}")
            raise ConfigError(
                f"checkpoint.load_step: there is no checkpoint of step {asked} to "
                f"resume in {folder}; {f'{why}; ' if why else ''}{_which(full)}"
            )
        if full:
            return full[max(full)]
        if damaged:
            raise ConfigError(
                f"checkpoint.folder: all checkpoints in {folder} are damaged; delete them to start "
                f"from scratch\n{_lines(damaged)}"
            )
        if weights:
            raise ConfigError(
                f"checkpoint.folder: {folder} holds only weights ({_which(weights)}), which cannot "
                "be resumed; choose another job.dump_folder and set checkpoint.initial_load_path"
            )
        if self.config.resume == "must":
            raise ConfigError(
                f'checkpoint.resume: got "must", but there is no checkpoint in {folder}; start '
                "from scratch with --checkpoint.resume auto"
            )
        return None


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


def open_initial(start: ResumePoint, recipe: Mapping[str, Any]) -> SavedRun:
    """Open the full checkpoint that a run resumes or starts from."""
    assert start.path is not None, "there is something to begin with"
    if start.format == "dcp":
        return TorchTitanCheckpoint(start.path, in_recipe(recipe)).run()
    return open_run(start.path)


def open_weights(path: Path, kind: str, recipe: Mapping[str, Any]) -> TensorSource:
    """Open weights of any format; raise ConfigError unless they match the recipe's model."""
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


def step_already_saved_error(path: Path, *, starts_over: bool = False) -> ConfigError:
    """Return the error that a save would overwrite the checkpoint of a run that went further.

    `starts_over`: whether the run counts its steps from 0 again.
    """
    key, why = "load_step", "from a run that continued after checkpoint.load_step, and this run"
    also = ", remove checkpoint.load_step"
    if starts_over:
        key, why = "exclude_from_loading", "and a run without train_state starts at step 0, so it"
        also = ""
    return ConfigError(
        f"checkpoint.{key}: {path}: already exists, {why} would save the same step. Delete it; or, "
        f"to keep it, choose another job.dump_folder{also}, and set checkpoint.initial_load_path "
        "to the checkpoint to load and checkpoint.initial_load_model_only = false"
    )


def _lines(damaged: Mapping[Path, str]) -> str:
    return "\n".join(f"  {why}" for why in damaged.values())


def _which(steps: Mapping[int, Path]) -> str:
    return f"there are {', '.join(f'step-{step}' for step in steps)}" if steps else "there is none"

"""When a run is saved, and what it goes on from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.contents import Checkpointable
from torchtitan.checkpoint.manifest import Damaged, problems_of_files, read_manifest
from torchtitan.checkpoint.saver import Saver
from torchtitan.checkpoint.start import ResumePoint, ResumePolicy, open_weights
from torchtitan.checkpoint.storage import SavedTensors, TensorSource
from torchtitan.checkpoint.weights.convert import ConvertOptions, convert
from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.parallel import World


class SaveFailed(RuntimeError):
    """The last state of a run could not be saved."""


class Checkpointer:
    """Saves when due and loads at the start; all its methods are called by every rank."""

    def __init__(
        self, choice: ResumePolicy, contents: Checkpointable, world: World, about: Mapping[str, Any]
    ) -> None:
        """`about` is what rank 0 writes of the run; the other ranks need not know it."""
        self.choice, self.config, self.world = choice, choice.config, world
        self.folder = choice.dump_folder / self.config.folder
        self.contents, self.state, self.about = contents, contents.state, dict(about)
        self.saver = Saver(self.config, self.folder, world)
        self.foreign: set[int] = set()
        """Checkpoints of a run that went further than the step this one was told to load."""
        self.exports = False
        """Whether the last save is to be written for Hugging Face transformers, too."""

    # --- loading ---

    def load(self, start: ResumePoint) -> None:
        """Bring the run to where `start` says; without a path it stays as it is.

        Raises:
            ConfigError: where the checkpoint does not fit the model, the optimizer or the data, or
                is damaged and nothing else can be used.
        """
        if self.config.enable and not self.config.load_only:
            self._make_folder()
        start = self._verified(start)
        if start.path is None:
            return
        if start.model_only:
            source: TensorSource = (
                SavedTensors(start.path)
                if start.format == "ours"
                else open_weights(start.path, start.format, self.choice.recipe)
            )
            self.contents.load_weights(start.path, source)
            logger.info("starting from the weights of %s (format %s)", start.path, start.format)
            return
        self._restore(start.path, self.config.exclude_from_loading)
        if start.is_resume:
            self.saver.saved_step = self.state.step
            self.foreign = {n for n in disk.saved_steps(self.folder) if n > self.state.step}
        for change in start.changes:
            logger.info("changed since the checkpoint: %s", change)

    def _make_folder(self) -> None:
        """Know that every rank can write where checkpoints go, and clear what was unfinished."""
        problem: str | None = None
        if self.world.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for name in disk.sweep(self.folder):
                    logger.info("deleted %s: a save that never finished", self.folder / name)
            except OSError as error:
                problem = f"checkpoint.folder: {error}"
        if problem := self.world.share(problem):
            raise ConfigError(problem)
        seen = self.world.gather(os.access(self.folder, os.W_OK))
        if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
            raise ConfigError(
                f"job.dump_folder: rank {', '.join(blind)} cannot write into {self.folder}, which "
                "rank 0 has made; all nodes have to share the folder"
            )

    def _verified(self, start: ResumePoint) -> ResumePoint:
        """`start`, or an older one, whose every file is known to be what was saved."""
        damaged: dict[Path, str] = {}
        while start.path and start.format == "ours" and (found := self._problems_of(start.path)):
            damaged[start.path] = found[0]
            if not start.is_resume:
                raise ConfigError(f"checkpoint.initial_load_path: {found[0]}")
            start = self.world.share(self._choose_again(damaged))
            if isinstance(start, ConfigError):
                raise start
        for path, why in start.damaged:
            if self.config.load_only:
                logger.error("%s", why)
            elif self.world.rank == 0:
                logger.error("%s; set aside as %s", why, disk.set_aside(path).name)
        return start

    def _choose_again(self, damaged: Mapping[Path, str]) -> "ResumePoint | ConfigError | None":
        """On rank 0 what to start from instead, or why there is nothing."""
        try:
            return self.choice.start(damaged) if self.world.rank == 0 else None
        except ConfigError as error:
            return error

    def _problems_of(self, path: Path) -> list[str]:
        """What is damaged in a checkpoint; each rank reads a part of its files."""
        manifest = read_manifest(path)
        mine = sorted(manifest.files)[self.world.rank :: self.world.size]
        found = self.world.gather(list(problems_of_files(path, manifest, mine)))
        return [problem for own in found for problem in own]

    def _restore(self, path: Path, skip: tuple[str, ...] = ()) -> None:
        self.contents.restore(path, skip)
        excluded = f" without {', '.join(skip)}" if skip else ""
        logger.info("resumed from %s%s at step %d", path, excluded, self.state.step)

    # --- going back ---

    def roll_back(self, before_step: int) -> bool:
        """Go back to the newest checkpoint before a step, but not to its data, which goes on.

        From now on the checkpoint says so too, and a run that is killed and resumes from it does
        not meet that data again. Returns False if there is no such checkpoint.
        """
        self.saver.wait_until_idle()
        data = self.contents.position()["data"]
        path = self._newest_before(before_step)
        if path is None:
            return False
        if self.world.rank == 0:
            saved = disk.read_state(path, read_manifest(path))
            state, samples = saved["train_state"], data["samples"] - saved["data"]["samples"]
            state["rollbacks"] = self.state.rollbacks + 1
            state["skipped_samples"] = state.get("skipped_samples", 0) + samples
            disk.replace_state(path, saved | {"data": data})
            for step, later in self._own_steps().items():
                if before_step <= step <= self.state.step:
                    disk.delete(later)
                    logger.info("deleted %s: it is of steps that were skipped", later)
        self.world.share(None)
        self._restore(path)
        self.saver.saved_step = self.state.step
        return True

    def _newest_before(self, step: int) -> Path | None:
        """The newest checkpoint before a step that is known to be what was saved."""
        saved = self._own_steps()
        earlier = self.world.share([saved[n] for n in reversed(saved) if n < step])
        for path in map(Path, earlier):
            try:
                problems = self._problems_of(path)
            except Damaged as error:
                problems = [str(error)]
            if not problems and not read_manifest(path).model_only:
                return path
            if self.world.rank == 0 and problems:
                logger.error("%s; set aside as %s", problems[0], disk.set_aside(path).name)
        return None

    def _own_steps(self) -> dict[int, Path]:
        steps = disk.saved_steps(self.folder)
        return {step: path for step, path in steps.items() if step not in self.foreign}

    # --- saving ---

    def is_due(self, final: bool) -> bool:
        """Whether the current step is to be saved; `final` says that no step will follow."""
        step, config = self.state.step, self.config
        first = config.enable_first_step_checkpoint and step == 1
        wanted = final or first or step % config.interval == 0
        is_new = step != self.saver.saved_step
        return config.enable and not config.load_only and wanted and is_new

    def save(self, finished: bool) -> None:
        """Save the current step; unless it is asynchronous, every byte is then on disk.

        `finished` says that the run is complete, which a run that was only stopped is not.
        """
        self.saver.wait_until_idle()
        step = self.state.step
        path = self.folder / f"step-{step}"
        # Not `Path.exists`, which fails where a disk does; a save that fails has its own words.
        if self.world.share(os.path.exists(path)):
            raise ConfigError(
                f"{path}: exists already, from a run that went further "
                "than the step this one was told to load; delete it or choose another "
                "job.dump_folder"
            )
        self.exports = finished and self.config.last_save_in_hf
        model_only = finished and self.config.last_save_model_only
        tensors = self.contents.weights() if model_only else self.contents.tensors()
        if model_only:
            dtype = getattr(torch, self.config.export_dtype)
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.saver.save(step, tensors, self.contents.position() | self.about, model_only)

    @property
    def is_staging(self) -> bool:
        """Whether weights must not change yet; see `wait_staging`."""
        return self.saver.staging.is_under_way

    def wait_staging(self) -> None:
        """Return when weights may change."""
        self.saver.staging.wait()

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes or reads what all ranks wait for."""
        return self.saver.is_busy

    def advance(self) -> None:
        """Go on to the next stage of a save; to be called when no rank is busy."""
        self.saver.advance()

    def finish(self) -> None:
        """Return when all that was saved is on disk and was read back.

        Raises:
            SaveFailed: where the state the run ends with could not be saved.
        """
        self.saver.wait_until_idle()
        if self.saver.failed_step == self.state.step:
            raise SaveFailed(
                f"step {self.state.step} could not be saved (see above); the run's work since "
                f"step {self.saver.saved_step or 0} is lost"
            )
        if self.exports and (problem := self.world.share(self._export())):
            raise SaveFailed(f"the weights could not be written for Hugging Face: {problem}")

    def _export(self) -> str | None:
        """On rank 0 write the weights of the last save; what went wrong, if so."""
        path = self.folder / f"step-{self.state.step}"
        target = path.with_name(f"{path.name}-hf")
        if self.world.rank == 0 and not target.exists():
            options = ConvertOptions(target_format="hf", dtype=self.config.export_dtype)
            try:
                convert(path, target, options, self.about)
            except (OSError, ConfigError) as error:
                return str(error)
            logger.info("saved %s, for Hugging Face transformers", target)
        return None

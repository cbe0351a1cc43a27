"""Coordinates saving and resuming a run."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.contents import Checkpointable, SavedRun, open_run
from torchtitan.checkpoint.manifest import Damaged, problems_of_files, read_manifest
from torchtitan.checkpoint.placement import Nodes, on_all_ranks, on_rank_0
from torchtitan.checkpoint.saver import Retention, Saver, told
from torchtitan.checkpoint.start import (
    ResumePoint,
    ResumePolicy,
    open_initial,
    open_weights,
    step_already_saved_error,
)
from torchtitan.checkpoint.store import step_of, store_of
from torchtitan.checkpoint.tiers import choose, open_tier
from torchtitan.checkpoint.weights.conversion import ConvertOptions, convert
from torchtitan.checkpoint.weights.hugging_face_files import CONFIG
from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.remote import dangling, is_url
from torchtitan.step import Hooks
from torchtitan.timeline import Timeline


class SaveFailed(RuntimeError):
    """Error that the final state of a run could not be saved."""


class Checkpointer:
    """Saves when due and loads at the start; all its methods are called by every rank."""

    def __init__(
        self,
        choice: ResumePolicy,
        contents: Checkpointable,
        about: Mapping[str, Any],
        record: Callable[[str, Mapping[str, Any]], None] = lambda event, position: None,
    ) -> None:
        """
        Args:
            about: the description of the run that rank 0 writes; other ranks may omit it.
            record: called with `checkpoint` or `rollback`, and the position of the run, before a
                checkpoint with that position is there.
        """
        self.choice, self.config = choice, choice.config
        self.world = world = contents.world
        self.folder = self.config.path_in(choice.dump_folder)
        self.store = store_of(self.folder)
        self.contents, self.state, self.about = contents, contents.state, dict(about)
        self.record = record
        keep = Retention(self.config.keep_latest_k, self.config.keep_every)
        self.saver = Saver(self.config, self.folder, world, keep)
        self.savers = [self.saver]
        """Savers of the checkpoints that are kept for good, and of the frequent ones, if any."""
        self.frequent = open_tier(self.config, choice.dump_folder, world)
        if tier := self.frequent:
            keep = Retention(tier.config.keep_latest_k)
            self.savers.append(Saver(self.config, tier.folder, world, keep, tier.nodes))
        self.foreign: set[int] = set()
        """Steps of checkpoints of a run that went further than `load_step`; known to rank 0."""
        self.exports = False
        """Whether the last save is also exported for Hugging Face transformers."""

    # --- in a step ---

    def unfinished(self, timeline: Timeline) -> Hooks:
        """Return hooks that wait for the copies of saves before weights change."""

        def wait_until_writable() -> None:
            if any(saver.staging.is_under_way for saver in self.savers):
                with timeline.pause("checkpoint"):
                    self.wait_staging()

        return Hooks(before_update=wait_until_writable)

    def saving(self, timeline: Timeline, last: int, is_finished: Callable[[], bool]) -> Hooks:
        """Return the hooks that save a step if it is due; `last` is that of the recipe."""

        def save_if_due(step: int) -> None:
            is_final = is_finished()
            if self.is_due(is_final):
                with timeline.pause("checkpoint"):
                    self.save(step == last, is_final)

        return Hooks(after_step=save_if_due)

    # --- loading ---

    def load(self, start: ResumePoint) -> None:
        """Load the state that `start` specifies, then set damaged checkpoints aside.

        If the state is refused, every checkpoint is where it was. Raises ConfigError if it does not
        match the model, the optimizer or the data, or is damaged without a usable alternative.
        """
        if self.frequent:
            self.frequent.survey()
        start = self._verified(start)
        if start.path is not None and start.model_only:
            path, kind, recipe = start.path, start.format, self.choice.recipe
            source = on_all_ranks(self.world, lambda: open_weights(path, kind, recipe))
            self.contents.load_weights(path, source)
            logger.info("starting from the weights of %s (format %s)", start.path, start.format)
        elif start.path is not None:
            saved = on_all_ranks(self.world, lambda: open_initial(start, self.choice.recipe))
            self._restore(saved, start.excluded)
            if saved.data is None:
                advice = "data.skip_samples = -1 skips the samples that it was trained on"
                message = "data: the position of TorchTitan's data loader is not loaded%s"
                logger.info(message, "" if start.skip_samples else f"; {advice}")
        if self.frequent:
            self.frequent.report(self.state.step)
        if start.is_resume or self.config.saves:
            self._open_folder(start)
        self._begin(start.is_resume)
        for path, why in start.damaged:
            self._set_aside(path, why)
        for change in filter(None, (*start.changes, start.rate)):
            logger.info("changed since the checkpoint: %s", change)
        loaded = [part for part in self.config.exclude_from_loading if part not in start.excluded]
        if start.is_resume and loaded:
            message = "checkpoint.exclude_from_loading applies once; this resume also loads: %s"
            logger.info(message, ", ".join(loaded))
        if start.skip_samples:
            logger.info("data: skipping %d samples", start.skip_samples)
            began = time.monotonic()
            self.contents.data.skip(start.skip_samples, self.state.step)
            logger.info("data: skipped them in %.1f s", time.monotonic() - began)

    def _begin(self, is_saved: bool) -> None:
        """Let saves be of a start of the run at this step; `is_saved`: it was loaded."""
        if self.frequent and self.config.saves:
            self.savers[-1].start = self.frequent.begin(self.state.step)
        if is_saved:
            for saver in self.savers:
                saver.saved_step = self.state.step

    def _open_folder(self, start: ResumePoint) -> None:
        """Note checkpoints to leave alone, clear unfinished ones, and verify that every rank can
        write into the folder."""

        def open_it() -> bool:
            if start.is_resume:
                steps, aside = disk.saved_steps(self.folder), dict(start.damaged)
                own = self.state.step
                self.foreign = {n for n, at in steps.items() if n > own and at not in aside}
            if self.foreign and not self.config.load_only:
                message = (
                    "checkpoint.load_step: keeping later checkpoints: %s; if the run stops at "
                    "one of these steps, it cannot be saved"
                )
                logger.warning(message, ", ".join(f"step-{n}" for n in sorted(self.foreign)))
            if not self.config.saves:
                return False
            try:
                is_new = not self.folder.exists()
                self.store.make_shared(self.folder)
            except OSError as error:
                link = dangling(error.filename or self.folder)
                raise ConfigError(f"checkpoint.folder: {link or error}") from None
            disk.delete_unfinished(self.folder)
            return is_new

        is_first = self.world.rank == 0
        is_new = on_all_ranks(self.world, lambda: is_first and open_it())
        sees = not self.config.saves or self.store.is_shared(self.folder, self.world.rank)
        if blind := self.world.gather_found([] if sees else [str(self.world.rank)]):
            key = "checkpoint.folder" if is_url(self.config.folder) else "job.dump_folder"
            if is_new:
                self.store.discard(self.folder)
            raise ConfigError(
                f"{key}: rank {', '.join(blind)} cannot write into {self.folder}, which rank 0 "
                "created; use a folder that all nodes share"
            )

    def _verified(self, start: ResumePoint) -> ResumePoint:
        """Return `start`, or an older checkpoint, with every file verified."""
        damaged: dict[Path, str] = {}
        tier = self.frequent
        while start.path and start.format == "ours" and (found := self._problems_of(start.path)):
            if tier and tier.holds(start.path):
                tier.damaged[step_of(start.path)] = found[0]
            else:
                damaged[start.path] = found[0]
            if not start.is_resume:
                raise ConfigError(f"checkpoint.initial_load_path: {found[0]}")
            start = choose(self.choice, self.world, tier, damaged)
        return start

    def _nodes_of(self, path: Path) -> Nodes:
        """Return the nodes that have a checkpoint each; one, if all ranks share it."""
        tier = self.frequent
        return tier.nodes if tier and tier.holds(path) else self.saver.nodes

    def _set_aside(self, path: Path, why: str) -> None:
        if self.config.load_only:
            logger.error("%s", why)
            return
        message = "%s; renamed to %s"
        on_rank_0(self.world, lambda: logger.error(message, why, self.store.set_aside(path)))

    def _problems_of(self, path: Path) -> list[str]:
        """Return the damages of a checkpoint; each rank verifies a part of its files."""

        def read() -> list[str]:
            manifest = read_manifest(path)
            mine = self._nodes_of(path).part(manifest.files)
            return list(problems_of_files(path, manifest, mine))

        return self.world.gather_found(on_all_ranks(self.world, read))

    def _restore(self, saved: SavedRun, skip: tuple[str, ...] = ()) -> None:
        self.contents.restore(saved, skip)
        excluded = f" without {', '.join(skip)}" if skip else ""
        logger.info("resumed from %s%s at step %d", saved.path, excluded, self.state.step)

    # --- going back ---

    def roll_back(self, before_step: int) -> bool:
        """Roll back to the newest checkpoint before a step, but not to its position in the data.

        The checkpoint records this, so that a run that is killed and resumes from it does not see
        that data again. Returns False if there is no such checkpoint.
        """
        self.wait_until_idle()
        position = self.contents.position()
        path = self._newest_before(before_step)
        if path is None:
            return False
        nodes = self._nodes_of(path)
        data = nodes.share(position.get("data", {}))
        nodes.lead(lambda: self._record_rollback(path, data))

        def delete_skipped() -> None:
            for step, later in self._own_steps().items():
                if before_step <= step <= self.state.step:
                    self.store.delete(later)
                    logger.info("deleted %s, saved during skipped steps", later)

        on_rank_0(self.world, delete_skipped)
        saved = on_all_ranks(self.world, lambda: open_run(path))
        self._restore(saved)
        self._begin(is_saved=True)
        return True

    def _record_rollback(self, path: Path, data: Mapping[str, Any]) -> None:
        saved = disk.read_state(path)
        state, before = saved["train_state"], saved.get("data", {"samples": 0})["samples"]
        state["rollbacks"] = self.state.rollbacks + 1
        state["skipped_samples"] = state.get("skipped_samples", 0) + data["samples"] - before
        if self.world.rank == 0:
            self.record("rollback", {"train_state": state, "data": data})
        disk.replace_state(path, saved | {"data": data})

    def _newest_before(self, step: int) -> Path | None:
        """Return the newest verified checkpoint before a step."""
        saved = on_rank_0(self.world, self._own_steps)
        if tier := self.frequent:
            tier.survey()
            saved = {n: tier.path(n) for n in tier.steps()} | saved
        for path in [saved[n] for n in sorted(saved, reverse=True) if n < step]:
            try:
                problems = self._problems_of(path)
            except Damaged as error:
                problems = [str(error)]
            if not problems and not read_manifest(path).model_only:
                return path
            if problems and tier and tier.holds(path):
                tier.damaged[step_of(path)] = problems[0]
            elif problems:
                self._set_aside(path, problems[0])
        return None

    def _own_steps(self) -> dict[int, Path]:
        steps = disk.saved_steps(self.folder)
        return {step: path for step, path in steps.items() if step not in self.foreign}

    # --- saving ---

    def is_due(self, final: bool) -> bool:
        """Whether the current step must be saved; `final`: no step will follow."""
        step = self.state.step
        is_due = self.config.saves_at(step, is_final=final) or self.config.saves_often_at(step)
        return is_due and step != self.saver.saved_step

    def save(self, finished: bool, final: bool = True) -> None:
        """Save the current step; on return every byte is on disk, unless it is asynchronous.

        Args:
            finished: whether the run is complete rather than only stopped.
            final: whether no step will follow; unless one does, it is kept for good.
        """
        step, saver, model_only = self.state.step, self.savers[-1], False
        if self.config.saves_at(step, is_final=final):
            saver = self.saver
            saver.wait_until_idle()
            path = self.folder / f"step-{step}"
            if on_rank_0(self.world, lambda: self.store.is_taken(path)):
                raise step_already_saved_error(path)
            self.exports = finished and self.config.last_save_in_hf
            model_only = finished and self.config.last_save_model_only
        if model_only:
            dtype = getattr(torch, self.config.export_dtype)
            weights = {} if self.contents.copy else self.contents.weights()  # of the first replica
            tensors = {name: weight.to(dtype) for name, weight in weights.items()}
        else:
            tensors = self.contents.tensors()
        position = self.contents.position()
        self.record("checkpoint", position)
        saver.save(step, tensors, position | self.about, model_only)

    def wait_staging(self) -> None:
        """Return when weights may change."""
        for saver in self.savers:
            saver.staging.wait()

    @property
    def saved_step(self) -> int | None:
        """Newest step on disk."""
        return max(saver.saved_step or 0 for saver in self.savers) or None

    def wait_until_idle(self) -> None:
        """Wait until no save is in any stage."""
        for saver in self.savers:
            saver.wait_until_idle()

    def finish(self) -> None:
        """Wait until saves are on disk and were read back; raise SaveFailed if the last failed."""
        self.wait_until_idle()
        if self.saver.failed_step == self.state.step:
            raise SaveFailed(
                f"step {self.state.step} could not be saved (see above); the run's work since "
                f"step {self.saved_step or 0} is lost"
            )
        if self.exports and (problem := on_rank_0(self.world, lambda: told(self._export))):
            raise SaveFailed(f"the weights could not be written for Hugging Face: {problem}")

    def _export(self) -> None:
        """Export the weights of the last save, unless that is done."""
        path = self.folder / f"step-{self.state.step}"
        target = path.with_name(f"{path.name}-hf")
        options = ConvertOptions(target_format="hf", dtype=self.config.export_dtype)
        if not self.store.is_exported(target, CONFIG):
            convert(path, target, options, self.about)
            logger.info("saved %s, for Hugging Face transformers", target)

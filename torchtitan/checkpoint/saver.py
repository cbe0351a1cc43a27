"""Writes checkpoints, and deletes old ones.

A save has stages. Each rank copies its pieces (`Staging`; not with `async_mode = "disabled"`), then
writes and hashes its own file. When all are done the save is committed (see `store`): rank 0 writes
index, state and manifest, and renames the folder; in a folder that each node has for itself, a rank
of each node does. Then each rank reads its file back from the disk; when all files are verified,
older checkpoints may be deleted.

Copying, writing and reading back run in threads, which never communicate: training continues in the
meantime, asks all ranks once per step whether any is busy, and lets a save advance when none is.

The weights of a step do not change until the next step's update, so they are copied during its
forward and backward; only the update has to wait, and only if it comes first. On CUDA the device
copies, on a stream of its own; on a CPU a thread does. Tensors are released when they are copied,
and copies when they are written. Pinned memory returns to torch's cache, from which the next save
takes it: pinning memory takes longer than copying into it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.manifest import (
    STATE_FILE,
    Damaged,
    hash_file,
    problems_of_files,
    read_manifest,
)
from torchtitan.checkpoint.placement import Nodes, Writers, on_all_ranks
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import INDEX, Piece, Written, write_file, write_manifest_of
from torchtitan.checkpoint.store import MANIFEST, store_of
from torchtitan.config import ConfigError
from torchtitan.device import Device
from torchtitan.digest import digest, unsigned
from torchtitan.logging import logger
from torchtitan.parallel import World
from torchtitan.remote import StoreError

T = TypeVar("T")
Pieces = list[tuple[Piece, Tensor]]
Copies = list[tuple[Piece, Tensor, Tensor]]
"""Pieces with their copies and digests."""


class SaveThread(Generic[T]):
    """Work on a thread of its own, which does not keep a failing process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.seconds = 0.0
        pool = ThreadPool(1)
        # Not an attribute: the work's references are released when it has ended.
        self._result = pool.apply_async(self._run, (work,))
        pool.close()

    def _run(self, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        value = work()
        self.seconds = time.perf_counter() - began
        return value

    def wait(self) -> None:
        """Wait until the work has ended, with a result or an error."""
        self._result.wait()

    @property
    def is_done(self) -> bool:
        return self._result.ready()

    def result(self) -> T:
        """Wait for the work; return its result, or raise its error."""
        return self._result.get()


class Staging:
    """Copies of this rank's pieces in host memory; one save at a time."""

    def __init__(self, pinned: bool, device: Device) -> None:
        self.device = device
        self.pinned = pinned and device.type == "cuda"
        self._release: Callable[[], None] | None = None
        self.waited = 0.0
        """Seconds spent waiting, over all saves."""

    def begin(self, pieces: Pieces) -> Callable[[], Pieces]:
        """Start copying the pieces' current values; return a function that waits for the copies."""
        if self.device.type == "cpu":
            copying = SaveThread(lambda: self._copy(pieces))
            self._release = copying.wait
        else:
            with self.device.side_stream() as copied:
                copies = self._copy(pieces)
            # The memory of the pieces must not be reused before they are copied.
            copying = SaveThread(lambda: after(copied, copies, self.device, pieces))
            self._release = copied.wait

        def collect() -> Pieces:
            # A new thread uses the first device, and would create a context there.
            self.device.make_current()
            return [
                (piece._replace(digest=unsigned(int(found.item()))), copy)
                for piece, copy, found in copying.result()
            ]

        return collect

    def _copy(self, pieces: Pieces) -> Copies:
        copies = []
        for piece, tensor in pieces:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
            found = digest(tensor, piece.offsets)
            copies.append((piece, memory.copy_(tensor, non_blocking=self.pinned), found))
        return copies

    @property
    def is_under_way(self) -> bool:
        """Whether `wait` was not called since `begin`."""
        return self._release is not None

    def wait(self) -> None:
        """Wait until weights may change again; a device waits without blocking its host."""
        if self._release is not None:
            began = time.perf_counter()
            self._release()
            self._release = None
            self.waited += time.perf_counter() - began


def after(event: torch.Event, copies: Copies, device: Device, _copied: Pieces) -> Copies:
    """Wait in a thread, on this rank's device, for an event; return the copies."""
    device.make_current()
    event.synchronize()
    return copies


RETRY_SECONDS = 1.0
"""Delay before the first retry of a save; doubled for each further one."""


@dataclass(frozen=True)
class Save:
    """Save whose files are being written."""

    step: int
    path: Path
    model_only: bool
    state: Mapping[str, Any]
    """Content of train_state.json; only rank 0's is used."""
    writing: SaveThread[Written | None]
    began: float


@dataclass(frozen=True)
class Check:
    """Checkpoint that is being read back."""

    step: int
    path: Path
    reading: SaveThread[tuple[list[str], str | None]]


class Retention(NamedTuple):
    """Rule by which checkpoints of a folder are kept."""

    latest: int
    """Number of most recent ones; 0: all."""
    every: int = 0
    """Also those of steps that are multiples of this; 0: none."""


class Saver:
    """Saver of one checkpoint at a time; all methods are called by every rank."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        world: World,
        retention: Retention,
        nodes: Nodes | None = None,
    ) -> None:
        """`nodes`: those that have a `folder` each, in which one of their ranks commits and deletes
        checkpoints; by default all ranks share it.
        """
        self.config, self.folder, self.world = config, folder, world
        self.retention, self.nodes = retention, nodes or Nodes(world, [range(world.size)])
        self.start = ""
        """Name of the start of the run, for the manifests of frequent checkpoints."""
        self.store = store_of(folder)
        self.writers = Writers(self.nodes)
        self.is_async = config.async_mode != "disabled"
        pinned = config.async_mode == "async_with_pinned_mem"
        self.staging = Staging(pinned, world.device)
        if pinned and not self.staging.pinned:
            message = "checkpoint.async_mode: a %s has no pinned memory; the same as async"
            logger.info(message, world.device.type)
        self.saved_step: int | None = None
        """Newest step on disk."""
        self.failed_step: int | None = None
        """Newest step, if it could not be saved."""
        self.seconds: float | None = None
        """Seconds that the last save took, while training waited or not; None: there was none."""
        self._stage: Save | Check | None = None
        self._waits: Callable[[], float] = lambda: 0.0
        self._committed = 0.0

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], model_only: bool
    ) -> None:
        """Save a step; on return every byte is on disk, unless it is asynchronous."""
        began = time.perf_counter()
        self.wait_until_idle()
        # What this has waited for the last save, the message of that has counted.
        began, waited = max(began, self._committed), self.staging.waited
        path = self.store.saving(self.folder / f"step-{step}")
        begun = self.nodes.lead(lambda: self._begin(path))
        if problems := [problem for problem in begun if problem]:
            self._failed(step, path, problems)
            return
        pieces = self.writers.pieces("weights" if model_only else "all", tensors)
        copies = self.staging.begin(pieces) if self.is_async else lambda: pieces
        writing = SaveThread(lambda: self._write(path, copies))
        self._stage = Save(step, path, model_only, state, writing, time.perf_counter())
        if not self.is_async:
            self.advance()
        called = time.perf_counter() - began
        self._waits = lambda: called + self.staging.waited - waited

    @property
    def is_idle(self) -> bool:
        """Whether no save is in any stage; the same on all ranks."""
        return self._stage is None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still in a stage that all ranks wait for."""
        match self._stage:
            case Save(writing=task) | Check(reading=task):
                return not task.is_done
        return False

    def advance(self) -> None:
        """Wait for the current stage of a save and start the next; free when no rank is busy."""
        match self._stage:
            case Save() as save:
                self._commit(save)
            case Check() as check:
                self._delete_old_checkpoints(check)

    def wait_until_idle(self) -> None:
        """Wait until no save is in any stage."""
        self.staging.wait()
        while not self.is_idle:
            self.advance()

    def _begin(self, path: Path) -> str | None:
        """Create the folder of a save; return the error, if any."""
        try:
            self.store.begin(path)
        except OSError as error:
            return str(error)
        return None

    def _write(self, path: Path, copies: Callable[[], Pieces]) -> Written | None:
        """Write this rank's pieces on a thread, with retries; return None if it has none."""
        pieces = copies()
        if not pieces:
            return None
        file = path / f"rank-{self.world.rank}.safetensors"
        for attempt in range(1, self.config.save_attempts):
            try:
                return write_file(file, pieces)
            except OSError as error:
                delay = RETRY_SECONDS * 2 ** (attempt - 1)
                logger.warning(
                    "%s: attempt %d of %d failed (%s); retrying in %g s",
                    file,
                    attempt,
                    self.config.save_attempts,
                    error.strerror or error,
                    delay,
                )
                time.sleep(delay)
        return write_file(file, pieces)

    def _commit(self, save: Save) -> None:
        """Commit the checkpoint after all ranks have written, or abandon it if one failed."""
        self._stage, began = None, time.perf_counter()
        mine = on_all_ranks(self.world, lambda: _outcome(save.writing))
        everyones = self.world.gather_object(mine) or ()
        everyones, state = self.nodes.share((everyones, save.state))
        done = self.nodes.lead(lambda: self._complete(save, everyones, state))
        size = sum(each for each, _ in done)
        if problems := [problem for _, found in done for problem in found]:
            self._failed(save.step, save.path, problems)
            return
        path = self.folder / f"step-{save.step}"
        self.saved_step, self.failed_step = save.step, None
        # An asynchronous save is committed after a step, which may be long after it was written.
        self._committed = time.perf_counter()
        whole, waited = self._committed - save.began, self._waits() + self._committed - began
        self.seconds = save.writing.seconds if self.is_async else whole
        waits = f"; training waited {waited:.2f} s" if self.is_async else ""
        message = "saved %s: %s MB, written in %.2f s%s"
        logger.info(message, path, f"{size / 1e6:,.1f}", save.writing.seconds, waits)
        names = [mine.name] if isinstance(mine, Written) else []
        if self.nodes.is_leader:
            names += [INDEX, STATE_FILE]
        self._stage = Check(save.step, path, SaveThread(lambda: _read_back(path, names)))

    def _complete(
        self, save: Save, everyones: Sequence[Written | str | None], state: Mapping[str, Any]
    ) -> tuple[int, list[str]]:
        """Complete the checkpoint on a leader; return its bytes, and the errors, if any."""
        if problems := [one for one in everyones if isinstance(one, str)]:
            return 0, problems
        written = {rank: one for rank, one in enumerate(everyones) if isinstance(one, Written)}
        try:
            manifest = write_manifest_of(
                save.path,
                written.values(),
                [one for rank, one in written.items() if rank in self.nodes.here],
                state,
                step=save.step,
                model_only=save.model_only,
                ranks=self.world.size,
                layout=self.world.degrees._asdict(),
                start=self.start,
            )
            self.store.commit(save.path)
        except OSError as error:
            return 0, [str(error)]
        return manifest.bytes, []

    def _failed(self, step: int, path: Path, problems: Sequence[str]) -> None:
        """Log the failure and delete the partial save; existing checkpoints stay."""
        self.failed_step = step
        if self.nodes.is_leader:
            self.store.discard(path)
            if len(self.nodes.ranks) > 1:  # one may have committed it
                self.store.discard(self.folder / f"step-{step}")
        last = f"step-{self.saved_step}" if self.saved_step else "none"
        logger.error(
            "step %d could NOT be saved: %s. Training continues; the last checkpoint is %s",
            step,
            "; ".join(dict.fromkeys(problems)),
            last,
        )

    def _delete_old_checkpoints(self, check: Check) -> None:
        """After the newest checkpoint was read back, delete those it replaces, or set it aside."""
        self._stage = None
        own, why = on_all_ranks(self.world, check.reading.result)
        problems = self.world.gather_found(own)
        if unread := self.world.gather_found([why] if why else []):
            message = "%s; %s could not be read back, so older checkpoints are kept"
            logger.error(message, unread[0], check.path)
        elif problems:
            self.failed_step = check.step
            self.saved_step = self.nodes.lead(lambda: self._set_aside(check, problems))[0]
        elif self.nodes.is_leader and self.retention.latest:
            disk.delete_old_checkpoints(self.folder, check.step, *self.retention)

    def _set_aside(self, check: Check, problems: Sequence[str]) -> int | None:
        """Set a damaged checkpoint aside; return the newest remaining step."""
        try:
            logger.error("%s; renamed to %s", problems[0], self.store.set_aside(check.path))
            return max((n for n in disk.saved_steps(self.folder) if n < check.step), default=None)
        except OSError as error:
            logger.error("%s; it could not be renamed: %s", problems[0], error)
            return None


def _outcome(writing: SaveThread[Written | None]) -> Written | str | None:
    """Return the written file, or the error if it need not end the run."""
    try:
        return writing.result()
    except (OSError, ConfigError) as error:
        return str(error)


def _read_back(path: Path, names: Sequence[str]) -> tuple[list[str], str | None]:
    """Verify files of a checkpoint on disk; return their problems, or why they are unknown."""
    try:
        hash_file(path / MANIFEST, cached=False)  # so that it too is read from disk
        return list(problems_of_files(path, read_manifest(path), names, cached=False)), None
    except StoreError as error:
        return [], str(error)
    except (OSError, Damaged) as error:
        return [str(error)], None

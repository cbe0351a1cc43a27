"""Writes checkpoints, and deletes old ones.

The main thread decides what each rank writes (`WritePlan`, kept while nothing changes), and starts
the copy of its blocks (`Staging`; not with `async_mode = "disabled"`). The rest runs on a thread of
the save, whose collectives have a process group of their own. Each rank writes and hashes its file.
When all are done the save is committed (see `store`): rank 0 writes state and manifest, and renames
the folder; in a folder that each node has for itself, a rank of each node does. Then each rank
reads its file back from the disk; when all files are verified, older checkpoints may be deleted.

So a synchronous save is one whose commit the main thread waits for, and both write the same bytes.
A rank that does not respond ends the save, not the step that others are in.

The weights of a step do not change until the next step's update, so they are copied during its
forward and backward; only the update has to wait, and only if it comes first. On CUDA the device
copies, on a stream of its own; on a CPU a thread does. Tensors are released when they are copied,
and copies when they are written. Pinned memory returns to torch's cache, from which the next save
takes it: pinning memory takes longer than copying into it.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.layout import WritePlan, ranges_of
from torchtitan.checkpoint.manifest import (
    STATE_FILE,
    Damaged,
    hash_file,
    problems_of_files,
    read_manifest,
)
from torchtitan.checkpoint.placement import Nodes, attempt, on_all_ranks
from torchtitan.checkpoint.ranges import Piece
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import Written, write_file, write_manifest_of
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


def in_thread(work: Callable[[], T]) -> "AsyncResult[T]":
    """Start work on a thread of its own, which does not keep a failing process alive."""
    pool = ThreadPool(1)
    result = pool.apply_async(work)
    pool.close()
    return result


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
            copying = in_thread(lambda: self._copy(pieces))
            self._release = copying.wait
        else:
            with self.device.side_stream() as copied:
                copies = self._copy(pieces)
            # The memory of the pieces must not be reused before they are copied.
            copying = in_thread(lambda: after(copied, copies, self.device, pieces))
            self._release = copied.wait

        def collect() -> Pieces:
            # A new thread uses the first device, and would create a context there.
            self.device.make_current()
            return [
                (piece._replace(digest=unsigned(int(found.item()))), copy)
                for piece, copy, found in copying.get()
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
PATIENCE = timedelta(minutes=30)
"""Time in which all ranks have to finish a stage of a save, above all to write their files."""


@dataclass
class Save:
    """Save that is under way."""

    step: int
    path: Path
    """Folder that is written into."""
    model_only: bool
    state: Mapping[str, Any]
    """Content of train_state.json; only rank 0's is used."""
    layout: WritePlan
    copies: Callable[[], Pieces] | None
    """Returns what to write; None afterwards, so that it is released."""
    waited: Callable[[], float]
    """Returns the seconds that training has waited for it."""
    began: float
    is_saved: bool = False
    committed: threading.Event = field(default_factory=threading.Event)
    """Set when it `is_saved`, or has failed."""


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
        self.layouts: dict[str, WritePlan] = {}
        """By kind of save, since a run's tensors keep their layout."""
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
        self._thread: AsyncResult[None] | None = None
        self._is_apart = False
        """Whether all ranks of `_apart` respond, as far as this one knows."""
        if config.saves:
            self._set_apart()

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], model_only: bool
    ) -> None:
        """Save a step; on return every byte is on disk, unless it is asynchronous."""
        began = time.perf_counter()
        self.wait_until_idle()
        if self.world.any([not self._is_apart])[0]:
            self._set_apart()
        waited, called = self.staging.waited, 0.0
        kind = "weights" if model_only else "all"
        if kind not in self.layouts:
            self.layouts[kind] = WritePlan(self.nodes, tensors)
        layout = self.layouts[kind]
        pieces = layout.pieces(tensors)
        save = Save(
            step=step,
            path=self.store.saving(self.folder / f"step-{step}"),
            model_only=model_only,
            state=state,
            layout=layout,
            copies=self.staging.begin(pieces) if self.is_async else lambda: pieces,
            waited=lambda: called + self.staging.waited - waited,
            began=time.perf_counter(),
        )
        self._thread = in_thread(lambda: self._run(save))
        if not self.is_async:
            save.committed.wait()
            if not save.is_saved:
                self.wait_until_idle()  # and raise what the thread has raised
        called = time.perf_counter() - began

    def _set_apart(self) -> None:
        """Give saves a group, so that their collectives do not meet those of training.

        After a timeout a group of gloo cannot be used any more.
        """
        group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="save")
        world = SavingWorld(**vars(self.world) | {"slow_group": group})
        self._apart = Nodes(world, self.nodes.ranks, self.nodes.names)
        self._is_apart = True

    def wait_until_idle(self) -> None:
        """Wait until no save is in any stage."""
        self.staging.wait()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.get()

    # --- on the thread of a save ---

    def _run(self, save: Save) -> None:
        """Write, commit and read back; give up if a rank does not respond."""
        try:
            if self._write_and_commit(save):
                save.is_saved = True
                save.committed.set()
                self._read_back(save)
        except RankLost as error:
            self._is_apart = False
            if not save.is_saved:
                self.failed_step = save.step
            logger.error("step %d: %s. The last checkpoint is %s", save.step, error, self._last)
        finally:
            save.committed.set()

    @property
    def _last(self) -> str:
        return f"step-{self.saved_step}" if self.saved_step else "none"

    def _write(self, save: Save) -> Written | None:
        """Write this rank's pieces, with retries; return None if it has none."""
        collect, save.copies = save.copies, None
        assert collect is not None, "a save is written once"
        pieces = collect()
        if not pieces:
            return None
        file = save.path / f"rank-{self.world.rank}.safetensors"
        most = self.config.save_attempts
        for number in range(1, most):
            try:
                return write_file(file, pieces)
            except OSError as error:
                delay = RETRY_SECONDS * 2 ** (number - 1)
                message = "%s: attempt %d of %d failed (%s); retrying in %g s"
                logger.warning(message, file, number, most, error.strerror or error, delay)
                time.sleep(delay)
        return write_file(file, pieces)

    def _write_and_commit(self, save: Save) -> bool:
        """Write this rank's file, and commit when all have; return whether it is a checkpoint."""
        world, nodes = self._apart.world, self._apart
        meet(world)
        if self._failed(save, nodes.lead(lambda: told(lambda: self.store.begin(save.path)))):
            return False
        began = time.perf_counter()
        outcome = attempt(lambda: told(lambda: self._write(save)))
        written = time.perf_counter() - began
        meet(world)
        mine = on_all_ranks(world, outcome)
        if self._failed(save, world.gather_found([mine] if isinstance(mine, str) else [])):
            return False
        assert not isinstance(mine, str), "a problem, which all ranks know"
        digests = mine.digests if mine else {}
        row = mine and replace(mine, digests=save.layout.own_digests(digests))
        rows, sums = world.gather_object(row) or (), save.layout.sum_digests(digests)
        with responding():
            dist.all_reduce(sums, group=world.slow_group)
        rows, state = nodes.share((rows, save.state))
        done = nodes.lead(lambda: told(lambda: self._complete(save, rows, sums, state)))
        if self._failed(save, done):
            return False
        self.saved_step, self.failed_step = save.step, None
        self.seconds = time.perf_counter() - save.began
        waits = f"; training waited {save.waited():.2f} s" if self.is_async else ""
        message = "saved %s: %s MB, written in %.2f s%s"
        size = sum(found for found in done if isinstance(found, int))
        path = self.folder / f"step-{save.step}"
        logger.info(message, path, f"{size / 1e6:,.1f}", written, waits)
        return True

    def _complete(
        self, save: Save, rows: Sequence[Written | None], sums: Tensor, state: Mapping[str, Any]
    ) -> int:
        """Complete the checkpoint on a leader; return its bytes."""
        here = self.nodes.here if len(self.nodes.ranks) > 1 else ()
        files = {
            row.name: row.file for n, row in enumerate(rows) if row and (not here or n in here)
        }
        digests = save.layout.digests(sums, [row.digests if row else {} for row in rows])
        manifest = write_manifest_of(
            save.path,
            files,
            state,
            save.layout.groups,
            digests,
            step=save.step,
            model_only=save.model_only,
            ranks=self.world.size,
            layout=self.world.degrees._asdict(),
            here=ranges_of(here),
            start=self.start,
        )
        self.store.commit(save.path)
        return manifest.bytes

    def _failed(self, save: Save, found: Sequence[object]) -> bool:
        """Whether there are problems, which are text, among what ranks have `found`.

        If so, log them and delete the partial save; existing checkpoints stay.
        """
        problems = [each for each in found if isinstance(each, str)]
        if not problems:
            return False
        self.failed_step = save.step
        if self.nodes.is_leader:
            self.store.discard(save.path)
            if len(self.nodes.ranks) > 1:  # one may have committed it
                self.store.discard(self.folder / f"step-{save.step}")
        message = "step %d could NOT be saved: %s. Training continues; the last checkpoint is %s"
        logger.error(message, save.step, "; ".join(dict.fromkeys(problems)), self._last)
        return True

    def _read_back(self, save: Save) -> None:
        """Verify what this rank wrote; then delete older checkpoints, or set this one aside."""
        world, path = self._apart.world, self.folder / f"step-{save.step}"
        names = [f"rank-{self.world.rank}.safetensors"] if save.layout.chosen else []
        names += [STATE_FILE] * self.nodes.is_leader
        outcome = attempt(lambda: _read_back(path, names))
        meet(world)
        own, why = on_all_ranks(world, outcome)
        problems = world.gather_found(own)
        if unread := world.gather_found([why] if why else []):
            message = "%s; %s could not be read back, so older checkpoints are kept"
            logger.error(message, unread[0], path)
        elif problems:
            self.failed_step = save.step
            aside = self._apart.lead(lambda: self._set_aside(path, save.step, problems[0]))
            self.saved_step = aside[0]
        elif self.nodes.is_leader and self.retention.latest:
            disk.delete_old_checkpoints(self.folder, save.step, *self.retention)

    def _set_aside(self, path: Path, step: int, problem: str) -> int | None:
        """Set a damaged checkpoint aside; return the newest remaining step."""
        try:
            logger.error("%s; renamed to %s", problem, self.store.set_aside(path))
            return max((n for n in disk.saved_steps(self.folder) if n < step), default=None)
        except OSError as error:
            logger.error("%s; it could not be renamed: %s", problem, error)
            return None


def told(work: Callable[[], T]) -> T | str:
    """Do `work`; return its error as text instead, if it need not end the run."""
    try:
        return work()
    except (OSError, ConfigError) as error:
        return str(error)


class RankLost(RuntimeError):
    """Error that a rank did not take part in a save."""


@contextmanager
def responding() -> Iterator[None]:
    """Raise `RankLost` if a collective fails."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Rank (\d+) failed to pass", str(error))
        who = f"rank {found[1]} does not respond" if found else f"a rank does not respond: {error}"
        raise RankLost(f"the save is given up, as {who}") from error


def meet(world: World) -> None:
    """Wait for all ranks, which may still write."""
    with responding():
        dist.monitored_barrier(world.slow_group, PATIENCE)


class SavingWorld(World):
    """Ranks of a save, whose collectives raise `RankLost`."""

    any = responding()(World.any)
    gather = responding()(World.gather)
    gather_object = responding()(World.gather_object)
    broadcast_object = responding()(World.broadcast_object)


def _read_back(path: Path, names: Sequence[str]) -> tuple[list[str], str | None]:
    """Verify files of a checkpoint on disk; return their problems, or why they are unknown."""
    try:
        hash_file(path / MANIFEST, cached=False)  # so that it too is read from disk
        return list(problems_of_files(path, read_manifest(path), names, cached=False)), None
    except StoreError as error:
        return [], str(error)
    except (OSError, Damaged) as error:
        return [str(error)], None

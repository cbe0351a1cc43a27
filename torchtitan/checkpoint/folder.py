"""Folder of a run's checkpoints: complete, unfinished, damaged and old ones, and its lock; and the
counters of the run in them.

    <dump_folder>/lock                         held by the run that writes here
    <dump_folder>/checkpoint/step-500          a complete checkpoint
    <dump_folder>/checkpoint/step-1000.saving  being written, or left by a run that was killed
    <dump_folder>/checkpoint/step-10.deleting  being deleted
    <dump_folder>/checkpoint/step-20.damaged   found to be damaged, and renamed

See `store` for why the first name always means a checkpoint that was complete, and for folders
that are not on a disk.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import (
    Damaged,
    Manifest,
    problems_of_sizes,
    read_manifest,
    read_whole,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.store import MANIFEST, NAME, step_of, store_of
from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.remote import dangling
from torchtitan.step import StepStatus

LOCK_FILE = "lock"
LOCK_SECONDS = 2.0
"""Time to try for the lock. A process that a killed run had just forked (git, a compiler) holds the
run's lock until its exec, a moment after the run is gone."""
ENDING = ", which is ending"
"""End of the lock's text while its holder saves for the last time."""
ENDING_SECONDS = 600.0
"""Time to wait for such a holder."""
OLD_COUNTERS = {"skipped_in_a_row": "consecutive_skips", "stepped_over": "skipped_samples"}
"""Names of counters in checkpoints of version 0.1, mapped to the current names."""


@dataclass
class TrainState:
    """Progress of a run: all of its counters."""

    step: int = 0
    """Number of steps taken, including skipped ones."""
    tokens: int = 0
    """Number of targets trained on, over all ranks."""
    skipped: int = 0
    """Number of steps whose update was skipped because of a spike in loss or gradient norm."""
    consecutive_skips: int = 0
    """Number of skipped steps since the last good one."""
    rollbacks: int = 0
    """Number of rollbacks to an earlier checkpoint because of too many skipped steps in a row."""
    skipped_samples: int = 0
    """Number of samples that were read but, because of this, are not in the weights."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Loss and gradient norm of the last good steps, used to detect spikes."""
    schedule_start: int = 0
    """Step after which the learning rate schedule started."""
    schedule_start_tokens: int = 0
    """Number of targets before it."""

    def advance(self, status: StepStatus) -> None:
        """Count a step, unless it is void."""
        if status.is_void:
            return
        self.step += 1
        self.tokens += status.count
        self.skipped += status.is_skipped
        self.consecutive_skips = self.consecutive_skips + 1 if status.is_skipped else 0


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, in order."""
    found = store_of(folder).checkpoints(folder)
    return dict(sorted((step_of(path), path) for path in found))


def read_verified_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest; raise Damaged unless the state and the sizes of files match it."""
    manifest = read_manifest(checkpoint)
    name = NAME.fullmatch(checkpoint.name)
    if name and not manifest.model_only and int(name[1]) != manifest.step:
        raise Damaged(f"{checkpoint}: damaged: its {MANIFEST} is of step {manifest.step}")
    if problem := next(problems_of_sizes(checkpoint, manifest), None):
        raise Damaged(problem)
    read_state(checkpoint, manifest)
    return manifest


def read_state(checkpoint: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read everything except tensors: counters, data position, recipe, versions."""
    manifest = manifest or read_manifest(checkpoint)
    state: dict[str, Any] = json.loads(read_whole(checkpoint, manifest, state_file(manifest)))
    counters = state.get("train_state", {})
    counters = {OLD_COUNTERS.get(name, name): value for name, value in counters.items()}
    return {**state, "train_state": counters} if counters else state


def place_in_schedule(counters: Mapping[str, int]) -> tuple[int, int]:
    """Return the next step of a saved run by its schedule, and the targets before it."""
    done = counters["step"] - counters.get("schedule_start", 0)
    return done + 1, counters["tokens"] - counters.get("schedule_start_tokens", 0)


def replace_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Replace the state of a checkpoint atomically; the old one is kept for inspection."""
    manifest = read_manifest(checkpoint)
    number = 1
    while (checkpoint / (name := f"train_state.{number}.json")).exists():
        number += 1
    files = {n: file for n, file in manifest.files.items() if n != state_file(manifest)}
    files[name] = write_json(checkpoint / name, state)
    store = store_of(checkpoint)
    store.sync(checkpoint)
    write_manifest(checkpoint, replace(manifest, files=files))
    store.sync(checkpoint)


def state_file(manifest: Manifest) -> str:
    """Return the name of STATE_FILE or of its replacement."""
    return next(name for name in manifest.files if name.startswith("train_state"))


def delete_old_checkpoints(folder: Path, newest: int, keep: int, every: int) -> None:
    """Delete all but the latest `keep` checkpoints and those of multiples of `every`.

    Checkpoints after step `newest` are of a run that went further: they are kept and do not count.
    """
    try:
        steps = {step: path for step, path in saved_steps(folder).items() if step <= newest}
        for step in sorted(steps)[:-keep]:
            if not every or step % every:
                store_of(folder).delete(steps[step])
    except OSError as error:
        logger.warning("could not delete old checkpoints in %s: %s", folder, error)


def delete_unfinished(folder: Path) -> None:
    """Delete the unfinished saves of a killed run."""
    for path in store_of(folder).unfinished(folder):
        try:
            store_of(folder).remove(path)
            logger.info("deleted %s: an unfinished save", path)
        except OSError as error:
            logger.warning("could not delete %s, an unfinished save: %s", path, error)


class Lock:
    """Lock on a folder, held by this process, whose file names the holder to others."""

    def __init__(self, file: FileIO) -> None:
        self.file = file
        self.holder = f"process {os.getpid()} on {socket.gethostname()}"

    def write(self, text: bytes) -> None:
        """Replace the text of the file; the lock does not depend on it, as a disk may be full."""
        with suppress(OSError):
            self.file.truncate(0)
            self.file.write(text)

    def mark_ending(self) -> None:
        """Let a run that starts on this folder wait until this one has ended."""
        self.write(f"{self.holder}{ENDING}\n".encode())


@contextmanager
def lock(dump_folder: Path, key: str = "job.dump_folder") -> Iterator[Lock]:
    """Hold an exclusive lock on the folder; the kernel releases it when this process ends.

    The holder is waited for if it is ending. Afterwards the lock's file is as it was before, and a
    folder made for it is removed if it is empty: a refused start leaves no trace. Raises
    ConfigError, with the setting `key`, if another run has the lock, or the folder cannot be
    locked.
    """
    made = [path for path in (dump_folder, *dump_folder.parents) if not path.exists()]
    try:
        file = _acquire(dump_folder, key)
    except OSError as error:
        link = dangling(error.filename or dump_folder)
        raise ConfigError(f"{key}: {link or f'cannot write into {dump_folder}: {error}'}") from None
    try:
        with file:
            found, held = file.read(), Lock(file)
            held.write(f"{held.holder}\n".encode())
            try:
                yield held
            finally:
                if found:
                    held.write(found)
                else:
                    with suppress(OSError):
                        (dump_folder / LOCK_FILE).unlink()
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _acquire(dump_folder: Path, key: str) -> FileIO:
    """Open and lock the file; wait for a holder that is ending, and a moment for any other."""
    path, began, until, is_told = dump_folder / LOCK_FILE, time.monotonic(), LOCK_SECONDS, False
    while True:
        waited = time.monotonic() - began
        try:
            dump_folder.mkdir(parents=True, exist_ok=True)
            file = FileIO(path, "a+")
        except FileNotFoundError:
            if waited > LOCK_SECONDS:
                raise
            continue  # the holder has just removed the folder
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode().strip() or "another process"
            file.close()
            is_ending = holder.endswith(ENDING)
            if is_ending and waited < ENDING_SECONDS:
                until = waited + LOCK_SECONDS
            if waited > until:
                raise ConfigError(
                    f"{key}: another run writes into {dump_folder} ({holder}); wait until it ends, "
                    "or choose another folder"
                ) from None
            if is_ending and not is_told:
                is_told, minutes = True, ENDING_SECONDS / 60
                message = "waiting up to %.0f minutes for the run in %s (%s)"
                logger.info(message, minutes, dump_folder, holder)
        else:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.seek(0)
                    return file
            file.close()  # the holder has just removed it
        time.sleep(0.05)

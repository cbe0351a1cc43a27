"""Stores of checkpoints: on a disk a folder's name marks it as complete, elsewhere its manifest.

On a disk a checkpoint is written under another name, and renamed when every byte is on disk;
renaming a folder is atomic. An object store has no rename: files are written in place, and the
folder is a checkpoint while it has a manifest, which is written last and deleted first. A folder
without a manifest is an unfinished save.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import IOBase, RawIOBase
from pathlib import Path

from torchtitan.logging import logger
from torchtitan.remote import RangedFile, RemotePath, missing

MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
PROBE = ".writable"
HISTORY = "frequent.json"
"""File next to the checkpoints of a run that also has frequent ones, and says where."""
OF_NODE = ".frequent"
"""Mark of a folder of frequent checkpoints, in which each node has only some files of each."""
NAME = re.compile(r"step-(\d+)")


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its name."""
    return int(path.name.removeprefix("step-"))


def store_of(path: Path) -> "Disk":
    """Return the store of a path."""
    return OBJECTS if isinstance(path, RemotePath) else DISK


class Disk:
    """File system, on which the name of a folder tells whether it is a checkpoint."""

    def checkpoints(self, folder: Path) -> Iterator[Path]:
        """Yield complete checkpoints, in any order."""
        paths = folder.iterdir() if folder.is_dir() else ()
        return (path for path in paths if NAME.fullmatch(path.name))

    def unfinished(self, folder: Path) -> list[Path]:
        """Return the folders of unfinished saves and deletions."""
        return [p for p in folder.glob("step-*") if p.suffix in (".saving", ".deleting")]

    def is_taken(self, checkpoint: Path) -> bool:
        """Whether there is a checkpoint; False if that cannot be determined."""
        # Not `Path.exists`, which raises if the disk fails; a failing save has its own message.
        return os.path.exists(checkpoint)

    def make_shared(self, folder: Path) -> None:
        """Create the folder that all ranks write into; called on one rank."""
        folder.mkdir(parents=True, exist_ok=True)

    def is_shared(self, folder: Path, rank: int) -> bool:
        """Whether this rank sees the folder that one rank created, and can write into it."""
        return os.access(folder, os.W_OK)

    def saving(self, checkpoint: Path) -> Path:
        """Return the folder to write a checkpoint into."""
        return checkpoint.with_name(f"{checkpoint.name}.saving")

    def begin(self, saving: Path) -> None:
        """Create an empty `saving` folder."""
        self.discard(saving)
        saving.mkdir(parents=True)

    def commit(self, saving: Path) -> Path:
        """Turn a finished folder, with its manifest, into a checkpoint, flushed to disk."""
        self.sync(saving)
        done = saving.with_suffix("")
        saving.rename(done)
        self.sync(done.parent)
        return done

    def delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint such that a partial one is never visible."""
        doomed = checkpoint.with_name(f"{checkpoint.name}.deleting")
        checkpoint.rename(doomed)
        self.remove(doomed)

    def remove(self, path: Path) -> None:
        """Delete a folder that is not a checkpoint; of a link only the link."""
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def discard(self, path: Path) -> None:
        """Delete a folder that is not a checkpoint, ignoring errors."""
        shutil.rmtree(path, ignore_errors=True)

    def is_exported(self, folder: Path, last: str) -> bool:
        """Whether the folder has complete exported weights; the file `last` is written last."""
        return folder.exists()

    def set_aside(self, checkpoint: Path) -> str:
        """Keep a damaged checkpoint for inspection, under a name that runs ignore."""
        number, aside = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
        return checkpoint.rename(aside).name

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file atomically, flushed to disk."""
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.write(data)
            self.flush(file)
        new.replace(path)

    def open(self, path: Path, cached: bool = True) -> RawIOBase:
        """Open a file for reading; unless `cached`, from the disk and not the page cache."""
        file = path.open("rb", buffering=0)
        if not cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def sizes(self, folder: Path) -> Callable[[str], int]:
        """Return a function from a file's name to its size; OSError if the file is missing."""
        return lambda name: (folder / name).stat().st_size

    def flush(self, file: IOBase) -> None:
        """Flush a file's written data to disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Flush a file, or the names in a folder, to disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStore(Disk):
    """Store without renames, in which a folder with a manifest is a checkpoint."""

    def checkpoints(self, folder: Path) -> Iterator[Path]:
        return (path for path in _steps(folder) if (path / MANIFEST).exists())

    def unfinished(self, folder: Path) -> list[Path]:
        marks = (MANIFEST, DAMAGED)
        return [p for p in _steps(folder) if not any((p / mark).exists() for mark in marks)]

    def is_taken(self, checkpoint: Path) -> bool:
        try:
            return (checkpoint / MANIFEST).exists()
        except OSError:
            return False

    def make_shared(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder / PROBE, b"")

    def is_shared(self, folder: Path, rank: int) -> bool:
        own = folder / f"{PROBE}-{rank}"
        try:
            self.write(own, b"")
            own.unlink()
            return (folder / PROBE).exists()
        except OSError as error:
            logger.error("%s", error)
            return False

    def saving(self, checkpoint: Path) -> Path:
        return checkpoint

    def begin(self, saving: Path) -> None:
        self.delete(saving)
        saving.mkdir(parents=True, exist_ok=True)

    def commit(self, saving: Path) -> Path:
        return saving

    def delete(self, checkpoint: Path) -> None:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        self.remove(checkpoint)

    def remove(self, path: Path) -> None:
        assert isinstance(path, RemotePath)
        path.remove()

    def discard(self, path: Path) -> None:
        with suppress(OSError):
            self.delete(path)

    def is_exported(self, folder: Path, last: str) -> bool:
        """Check as on a disk, and delete the remains of an interrupted export."""
        if (folder / last).exists():
            return True
        self.remove(folder)
        return False

    def set_aside(self, checkpoint: Path) -> str:
        """Set aside as on a disk, but only until the run saves this step again."""
        try:
            found = (checkpoint / MANIFEST).read_bytes()
        except FileNotFoundError:
            found = b""
        self.write(checkpoint / DAMAGED, found)
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        return f"{checkpoint.name}/{DAMAGED}"

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def open(self, path: Path, cached: bool = True) -> RawIOBase:
        assert isinstance(path, RemotePath)
        return RangedFile(path)

    def sizes(self, folder: Path) -> Callable[[str], int]:
        assert isinstance(folder, RemotePath)
        sizes = folder.sizes()

        def size_of(name: str) -> int:
            if name not in sizes:
                raise missing(folder / name)
            return sizes[name]

        return size_of

    def flush(self, file: IOBase) -> None:
        """Do nothing: closing the file waits for the store."""

    def sync(self, path: Path) -> None:
        """Do nothing: written data is already stored."""


def _steps(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []


DISK, OBJECTS = Disk(), ObjectStore()

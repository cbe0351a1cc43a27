"""Where checkpoints are, and what makes a folder one: on a disk its name, else its manifest.

On a disk a checkpoint is written under another name, and renamed when every byte is on disk;
renaming a folder is atomic. An object store has no rename: files are written where they stay, and
the folder is a checkpoint from the moment its manifest is there, which is written last, and is
deleted first. A folder without one is an unfinished save.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from io import IOBase, RawIOBase
from pathlib import Path

from torchtitan.checkpoint.remote import RangedFile, RemotePath, missing
from torchtitan.logging import logger

MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
PROBE = ".writable"
NAME = re.compile(r"step-(\d+)")


def store_of(path: Path) -> "Disk":
    """What holds a path."""
    return OBJECTS if isinstance(path, RemotePath) else DISK


class Disk:
    """A file system: the name of a folder says whether it is a checkpoint."""

    def checkpoints(self, folder: Path) -> Iterator[Path]:
        """Complete ones, in any order."""
        paths = folder.iterdir() if folder.is_dir() else ()
        return (path for path in paths if NAME.fullmatch(path.name))

    def unfinished(self, folder: Path) -> list[Path]:
        """Folders of saves and deletions that did not end."""
        return [p for p in folder.glob("step-*") if p.suffix in (".saving", ".deleting")]

    def is_taken(self, checkpoint: Path) -> bool:
        """Whether there is a checkpoint; False where that cannot be found out."""
        # Not `Path.exists`, which fails where a disk does; a save that fails has its own words.
        return os.path.exists(checkpoint)

    def make_shared(self, folder: Path) -> None:
        """On one rank make the folder that all ranks are to write into."""
        folder.mkdir(parents=True, exist_ok=True)

    def is_shared(self, folder: Path, rank: int) -> bool:
        """Whether this rank sees the folder that one of them has made, and can write into it."""
        return os.access(folder, os.W_OK)

    def saving(self, checkpoint: Path) -> Path:
        """The name of the folder to write a checkpoint into."""
        return checkpoint.with_name(f"{checkpoint.name}.saving")

    def begin(self, saving: Path) -> None:
        """Make that folder, empty."""
        self.discard(saving)
        saving.mkdir(parents=True)

    def commit(self, saving: Path) -> Path:
        """Turn a finished folder, with its manifest, into a checkpoint, down to the disk."""
        self.sync(saving)
        done = saving.with_suffix("")
        saving.rename(done)
        self.sync(done.parent)
        return done

    def delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint so that no moment shows half of one."""
        doomed = checkpoint.with_name(f"{checkpoint.name}.deleting")
        checkpoint.rename(doomed)
        self.remove(doomed)

    def remove(self, path: Path) -> None:
        """Delete what is no checkpoint."""
        shutil.rmtree(path)

    def discard(self, path: Path) -> None:
        """Delete what is no checkpoint, as far as that can be done."""
        shutil.rmtree(path, ignore_errors=True)

    def is_exported(self, folder: Path, last: str) -> bool:
        """Whether there are exported weights, of which the file `last` is written last."""
        return folder.exists()

    def set_aside(self, checkpoint: Path) -> str:
        """Keep a damaged checkpoint for people, under a name that no run takes for one."""
        number, aside = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
        return checkpoint.rename(aside).name

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file, down to the disk, all or none."""
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.write(data)
            self.flush(file)
        new.replace(path)

    def open(self, path: Path, cached: bool = True) -> RawIOBase:
        """A file to read from; unless `cached`, from the disk and not from the kernel's memory."""
        file = path.open("rb", buffering=0)
        if not cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def sizes(self, folder: Path) -> Callable[[str], int]:
        """Tells the size of a file in a folder by its name; OSError if there is none."""
        return lambda name: (folder / name).stat().st_size

    def flush(self, file: IOBase) -> None:
        """Have on the disk what was written to a file."""
        file.flush()
        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Have a file, or the names in a folder, on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStore(Disk):
    """A store without renames: a folder with a manifest is a checkpoint."""

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
        try:
            self.delete(path)
        except OSError:
            return

    def is_exported(self, folder: Path, last: str) -> bool:
        """As on a disk; deletes what an export that was cut short has left."""
        if (folder / last).exists():
            return True
        self.remove(folder)
        return False

    def set_aside(self, checkpoint: Path) -> str:
        """As on a disk, but only until the run saves this step again."""
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
        """Nothing to do: closing the file waits for the store."""

    def sync(self, path: Path) -> None:
        """Nothing to do: what was written is there."""


def _steps(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []


DISK, OBJECTS = Disk(), ObjectStore()

"""The note of each rank's step, which is written at every step and survives a kill.

It is in a file in memory: on a file system that thousands of ranks share, every step would take as
long as the slowest write. The folder of the run has the first note, which names that file, and at
the end the last one. If the rank was killed, a process that outlives it on its machine copies the
last note: another rank, the launcher, or the next start.
"""

import json
import os
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchtitan.logging import logger

Note = dict[str, Any]

MEMORY = Path("/dev/shm")
"""File system in memory; on machines without one, the temporary folder is used."""
PREFIX = "torchtitan-"
# More than any note has, so that each covers the one before.
NOTE_BYTES = 511


class NoteFile:
    """The file of a rank's notes in memory."""

    def __init__(self) -> None:
        try:
            self._open(MEMORY)
        except OSError:  # there is none, or it is full
            self._open(Path(tempfile.gettempdir()))

    def _open(self, folder: Path) -> None:
        self.path = folder / f"{PREFIX}{uuid4().hex}.step"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.write({})  # takes the space of all later notes

    def write(self, note: Note) -> None:
        """Replace the last note."""
        os.pwrite(self._file, json.dumps(note).ljust(NOTE_BYTES).encode() + b"\n", 0)

    def remove(self) -> None:
        """Close and delete the file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def note_path(folder: Path, rank: int) -> Path:
    """Return the file in a folder of traces with the first or last note of a rank."""
    return folder / f"{rank}.step"


def save(path: Path, content: bytes) -> bool:
    """Write a file at once, so that none reads a part of it; return whether that succeeded.

    A disk that is full neither ends a run nor hides why it ends.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        logger.warning("could not write %s: %s", path, error.strerror)
        with suppress(OSError):
            unfinished.unlink()
        return False
    return True


def save_note(path: Path, note: Note) -> bool:
    """Write a note into the folder of the run; return whether that succeeded."""
    return save(path, json.dumps(note).ljust(NOTE_BYTES).encode() + b"\n")


def read_note(path: Path) -> Note:
    """Return the newest note of a rank; empty if the rank was killed before it wrote any.

    Args:
        path: the note in the folder of the run. If later ones are in memory that cannot be read
            here, or is gone, the returned note has their file as `kept_at`.
    """
    note = _parse(path)
    return (_newest(note) or note) if "kept_at" in note else note


def rescue(folder: Path, ranks: Iterable[int]) -> None:
    """Copy the last notes of the `ranks` that were killed on this machine to `folder`."""
    for rank in ranks:
        path = note_path(folder, rank)
        first = _parse(path)
        if first.get("host") == socket.gethostname() and is_gone(first["pid"]):
            settle(path)


def settle(path: Path) -> None:
    """Replace the first note of a rank that has ended by the last one, if it is in memory here."""
    first = _parse(path)
    if "kept_at" in first and (last := _newest(first)):
        kept_at = Path(first["kept_at"])
        with suppress(FileNotFoundError):  # as another rank does it too
            if save_note(path, last) and kept_at.stat().st_uid == os.geteuid():
                kept_at.unlink()


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, even if its parent does not know yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # somebody else's, so it exists
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "Z"
    return False


def _newest(first: Note) -> Note:
    """Return the note in memory of the process that wrote the first one; empty if out of reach."""
    path = Path(first["kept_at"])
    if first["host"] != socket.gethostname() or not path.name.startswith(PREFIX):
        return {}
    note = _parse(path)
    return note if note.get("pid") == first["pid"] else {}


def _parse(path: Path) -> Note:
    try:
        note: Note = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    return note if isinstance(note, dict) else {}

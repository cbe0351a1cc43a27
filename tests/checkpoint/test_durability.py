"""What a power cut would leave: every byte and every name is on disk before something relies on it.

A killed process loses nothing that the kernel has, so that no kill finds a flush that is missing.
Here each flush is noted, with what was in the file or the folder then; whatever is otherwise when
something relies on it would be lost.
"""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.checkpoint import test_folder, test_frequent
from tests.runs import train
from torchtitan.checkpoint import saved_steps, saver
from torchtitan.checkpoint.folder import read_state, replace_state
from torchtitan.checkpoint.manifest import Damaged, read_manifest, write_json
from torchtitan.checkpoint.storage import Piece, write_file, write_tensors
from torchtitan.checkpoint.store import DISK, HISTORY, MANIFEST, NAME, Disk
from torchtitan.digest import digest, unsigned
from torchtitan.metrics.data_ledger import LEDGER_FILE


class Flushes:
    """Notes what is flushed, in files that all ranks see, and what is relied on too early."""

    names: list[str]
    """Names that were given, files read past the kernel's cache, flushed ledgers and folders."""
    lost: list[str]
    """What a power cut would have lost at some moment."""

    def __init__(self, notes, patch):
        self.notes, self.names, self.lost = notes, [], []
        fsync, rename, advise = os.fsync, os.rename, os.posix_fadvise

        def flush(descriptor):
            fsync(descriptor)
            path = opened(descriptor)
            self._note(path).write_text(content(path))
            self.names += [path.name] * (path.name in (LEDGER_FILE, "checkpoint"))

        def move(source, target):
            self._before(Path(source), Path(target))
            rename(source, target)

        def forget(descriptor, *rest):
            advise(descriptor, *rest)
            assert rest == (0, 0, os.POSIX_FADV_DONTNEED)
            self.names.append(f"{opened(descriptor).name} is read")

        patch.setattr(os, "posix_fadvise", forget)
        patch.setattr(os, "fsync", flush)
        patch.setattr(os, "fdatasync", flush)
        patch.setattr(os, "rename", move)
        patch.setattr(os, "replace", move)

    def _note(self, path):
        return self.notes / str(path.stat().st_ino)

    def _before(self, source, target):
        """Something is about to get another name."""
        self.names.append(target.name)
        if NAME.fullmatch(target.name):  # a checkpoint from now on
            self.lost += [
                f"{path.name} of {target.name}"
                for path in (source, *source.iterdir())
                if not self.is_whole(path)
            ]
        elif target.suffix == ".deleting":  # what replaces it has to last
            self.lost += [f"{n}, as {source.name} is deleted" for n in self.new(source.parent)]
        elif source.is_file() and not self.is_whole(source):
            self.lost.append(target.name)
        elif target.name == MANIFEST and target.exists():  # what it lists has to be there
            self.lost += [name for name in self.new(target.parent) if name != source.name]

    def is_whole(self, path):
        """Whether a power cut would leave all of a file, or all names in a folder."""
        return self._note(path).exists() and self._note(path).read_text() == content(path)

    def new(self, folder):
        """Names in a checkpoint, or of checkpoints in a folder, that a power cut would lose."""
        note = self._note(folder)
        kept = json.loads(note.read_text()) if note.exists() else {}
        names = json.loads(content(folder))
        if not NAME.fullmatch(folder.name):
            names = {name: at for name, at in names.items() if NAME.fullmatch(name)}
        return [name for name, at in names.items() if kept.get(name) != at]

    def at_the_end(self, folder):
        """All that a power cut would have lost, now that the checkpoints of a folder are there."""
        folders = [*saved_steps(folder).values(), folder]
        return [*self.lost, *(name for path in folders for name in self.new(path))]


def opened(descriptor):
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def content(path):
    """The bytes of a file; the names in a folder, and what they name."""
    if path.is_dir():
        return json.dumps({each.name: each.inode() for each in os.scandir(path)}, sort_keys=True)
    return path.read_bytes().hex()


@pytest.fixture
def flushes(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    return Flushes(tmp_path / "notes", monkeypatch)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_outlives_a_power_cut(mode, tmp_path, flushes):
    """So does its row in the ledger, before it; older ones are deleted once it was read back."""
    once = {"interval": 1, "keep_latest_k": 1, "async_mode": mode}
    train(test_folder.recipe(tmp_path / "run", steps=2, checkpoint=once))
    assert flushes.at_the_end(tmp_path / "run/checkpoint") == []
    files = [LEDGER_FILE, "train_state.json", MANIFEST]
    read = [f"{name} is read" for name in (MANIFEST, "rank-0.safetensors", files[1])]
    first, second = ([*files, f"step-{n}", "checkpoint", *read] for n in (1, 2))
    assert flushes.names == [LEDGER_FILE, *first, *second, "step-1.deleting", LEDGER_FILE]


def test_frequent_checkpoints_outlive_a_power_cut(tmp_path, flushes):
    train(test_frequent.recipe(tmp_path, "one rank, accumulating 8", keep_latest_k=1))
    (folder,) = (tmp_path / "disk").iterdir()
    for each in (folder, tmp_path / "run/checkpoint"):
        assert flushes.at_the_end(each) == []
    assert "step-1.deleting" in flushes.names
    # Frequent checkpoints count only with the start that the history has.
    assert flushes.names[flushes.names.index(HISTORY) + 1] == "checkpoint"


def test_what_is_not_flushed_is_found(tmp_path, flushes, monkeypatch):
    keep = {"interval": 1, "keep_latest_k": 1}
    job = test_folder.recipe(tmp_path / "run", steps=2, checkpoint=keep)
    monkeypatch.setattr(Disk, "flush", lambda store, file: file.flush())
    monkeypatch.setattr(Disk, "sync", lambda store, path: None)
    train(job)
    for name in ("rank-0.safetensors", MANIFEST, "step-2.saving"):
        assert f"{name} of step-2" in flushes.lost
    assert "step-2, as step-1 is deleted" in flushes.lost
    assert flushes.lost.count("train_state.json") == 2
    assert flushes.at_the_end(tmp_path / "run/checkpoint")[-1] == "step-2"


def test_a_state_that_is_replaced_outlives_a_power_cut(tmp_path, flushes):
    path = tmp_path / "folder/step-1"
    path.mkdir(parents=True)
    write_tensors(path, [("a", torch.ones(3))], {"recipe": {}}, 100)
    DISK.sync(path)
    DISK.sync(path.parent)
    replace_state(path, read_state(path, read_manifest(path)) | {"more": 1})
    assert flushes.at_the_end(path.parent) == []
    assert flushes.names[-2:] == ["train_state.1.json", MANIFEST]


def test_a_small_file_that_cannot_be_flushed_replaces_none(tmp_path, monkeypatch):
    path = tmp_path / MANIFEST
    write_json(path, {"step": 1})

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}


def test_a_copy_that_changed_before_it_was_written_is_refused(tmp_path):
    """Of several, the one that changed is named."""
    tensors = {name: torch.arange(4.0) for name in ("kept", "changed")}
    pieces = [
        (Piece(n, t.dtype, (4,), (0,), (4,), 0, unsigned(int(digest(t, (0,)).item()))), t)
        for n, t in tensors.items()
    ]
    digests = write_file(tmp_path / "whole", pieces[:1]).digests
    assert digests == {"kept": pieces[0][0].digest}
    tensors["changed"][2] += 1
    with pytest.raises(Damaged, match="/file: changed changed between the end of the step and"):
        write_file(tmp_path / "file", pieces)


def test_a_save_whose_copy_changes_is_no_checkpoint(tmp_path, monkeypatch, caplog):
    write = saver.write_file

    def spoil(file, pieces):
        """Between the copy and the write."""
        return write(file, [(piece._replace(digest=piece.digest ^ 1), t) for piece, t in pieces])

    monkeypatch.setattr(saver, "write_file", spoil)
    with pytest.raises(RuntimeError, match="step 2 could not be saved"):
        train(test_folder.recipe(tmp_path, steps=2, checkpoint={"async_mode": "async"}))
    assert "changed between the end of the step and the write" in caplog.text
    assert list((tmp_path / "checkpoint").iterdir()) == []

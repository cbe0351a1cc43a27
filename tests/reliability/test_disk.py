"""Disks that are full, read-only, slow or forbidden: a run goes on, says so, keeps what it has."""

import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.reliability.trials import End, at_call, checkpoints, leftovers, play, recipe
from torchtitan.checkpoint import saver
from torchtitan.checkpoint.manifest import read_manifest

SECOND, THIRD, LAST = 2, 3, 4
"""Saves of a run: of steps 4, 6 and 8."""
NOBODY = 65534
MODES = (pytest.param("disabled", marks=pytest.mark.slow), "async")
HALF = 200_000
"""Bytes, of what a checkpoint has."""


@pytest.fixture
def small_disk():
    """Makes a folder a disk with 3 MB, where this is allowed."""
    mounted = []

    def mount(folder):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def traps(*each):
    """All of them, and no long wait before another attempt."""

    def set_all():
        saver.RETRY_SECONDS = 0.01
        for trap in each:
            trap()

    return set_all


def when_saving(number, action):
    """Does something when the `number`-th save begins, and none is under way, on every rank."""

    def then(begin, saver, *arguments):
        saver.wait_until_idle()
        action()
        return begin(saver, *arguments)

    return at_call("torchtitan.checkpoint.saver:Saver.save", number, then)


def limit_files(size):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size else hard, hard))


def fill(folder, room=0):
    ballast = shutil.disk_usage(folder).free - room
    (folder / "ballast").write_bytes(bytes(ballast))


def remount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def faults(kind, run, first, until, mount):
    """A disk that fails from one save until another."""
    at = run / "checkpoint"
    match kind:
        case "files that may not grow (RLIMIT_FSIZE)":
            begin, end = (lambda: limit_files(100_000)), (lambda: limit_files(0))
        case "a full file system":
            mount(at)
            begin, end = (lambda: fill(at, HALF)), (lambda: (at / "ballast").unlink())
        case "a full file system, with all of the run on it":
            mount(run)
            begin, end = (lambda: fill(run)), (lambda: (run / "ballast").unlink())
        case "a read-only file system":
            mount(at)
            begin, end = (lambda: remount(at, "ro")), (lambda: remount(at, "rw"))
        case "no permission":
            begin, end = (lambda: os.seteuid(NOBODY)), (lambda: os.seteuid(0))
        case _:
            raise AssertionError(kind)
    return traps(when_saving(first, begin), when_saving(until, end))


WHAT = {
    "files that may not grow (RLIMIT_FSIZE)": "File too large",
    "a full file system": "No space left on device",
    "a full file system, with all of the run on it": "No space left on device",
    "a read-only file system": "Read-only file system",
    "no permission": "Permission denied",
}


def daily(kind, mode):
    is_daily = mode == "async" and kind.startswith(("files", "a full file system, with"))
    return pytest.param(kind, mode, marks=() if is_daily else pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "mode"), [daily(kind, mode) for kind in WHAT for mode in ("disabled", "async")]
)
def test_a_disk_that_fails_and_recovers(kind, mode, tmp_path, small_disk, undisturbed):
    if kind == "no permission" and os.geteuid():
        pytest.skip("only root can become somebody else")
    run = tmp_path / "run"
    if not kind.endswith("on it"):
        run.mkdir()
    trap = faults(kind, run, SECOND, THIRD, small_disk)
    played = play(recipe(run, checkpoint={"async_mode": mode}), traps={0: trap}, status=0)
    assert "step 4 could NOT be saved: " in played.log
    assert WHAT[kind] in played.log
    assert "Training continues; the last checkpoint is step-2\n" in played.log
    assert ("attempt 2 of 3 failed" in played.log) == (
        kind not in ("a read-only file system", "no permission")
    )
    assert list(checkpoints(run)) == [2, 6, 8]
    assert leftovers(run) == []
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [daily(k, mode) for k in WHAT if k != "no permission" for mode in ("disabled", "async")],
)
def test_a_disk_that_fails_at_the_last_save(kind, mode, tmp_path, small_disk, undisturbed):
    run = tmp_path / "run"
    if not kind.endswith("on it"):
        run.mkdir()
    trap = faults(kind, run, LAST, LAST + 1, small_disk)
    played = play(recipe(run, checkpoint={"async_mode": mode}), traps={0: trap})
    last = "step 8 could not be saved (see above); the run's work since step 6 is lost\n"
    assert played.status == 1, played.log
    assert last in played.log
    assert "Traceback" not in played.log
    assert list(checkpoints(run)) == [2, 4, 6]
    if "read-only" in kind:
        remount(run / "checkpoint", "rw")
    for ballast in run.rglob("ballast"):
        ballast.unlink()
    played = play(recipe(run, checkpoint={"async_mode": mode}), status=0)
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


FILES = ("rank-0.safetensors", "train_state.json.new", "manifest.json.new")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [FILES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FILES[1:])]
)
def test_a_file_for_which_there_is_no_room(name, mode, tmp_path, undisturbed):
    run = tmp_path / "run"

    def full(begin, *arguments):
        made = begin(*arguments)
        (run / "checkpoint/step-4.saving" / name).symlink_to("/dev/full")
        return made

    place = "torchtitan.checkpoint.store:Disk.begin"
    trap = traps(at_call(place, SECOND, full))
    played = play(recipe(run, checkpoint={"async_mode": mode}), traps={0: trap}, status=0)
    assert "step 4 could NOT be saved: [Errno 28] No space left on device" in played.log
    assert list(checkpoints(run)) == [2, 6, 8]
    assert leftovers(run) == []
    assert Path("/dev/full").is_char_device()
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_disk_of_one_of_two_ranks_fails(rank, mode, tmp_path, undisturbed):
    run = tmp_path / "run"
    trap = faults("files that may not grow (RLIMIT_FSIZE)", run, SECOND, THIRD, Path)
    quick = {0: traps(), 1: traps(), rank: trap}
    played = play(recipe(run, "FSDP 2", checkpoint={"async_mode": mode}), 2, quick, status=0)
    assert "step 4 could NOT be saved: [Errno 27] File too large" in played.log
    assert list(checkpoints(run)) == [2, 6, 8]
    assert leftovers(run) == []
    End.of(run).assert_same(undisturbed("FSDP 2")[0], to_the_bit=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_attempt_that_works(mode, tmp_path, undisturbed):
    run = tmp_path / "run"

    def room_again(write, *arguments):
        limit_files(0)
        return write(*arguments)

    trap = traps(
        when_saving(SECOND, lambda: limit_files(100_000)),
        at_call("torchtitan.checkpoint.saver:write_file", SECOND + 1, room_again),
    )
    played = play(recipe(run, checkpoint={"async_mode": mode}), traps={0: trap}, status=0)
    assert "attempt 1 of 3 failed (File too large); retrying in 0.01 s" in played.log
    assert "could NOT be saved" not in played.log
    assert list(checkpoints(run)) == [4, 6, 8]
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


def test_a_slow_disk(tmp_path, undisturbed):
    """Training goes on; and what is written late is still the step it is named after."""
    run = tmp_path / "run"

    def slow(write, path, pieces):
        written.wait(60)
        return write(path, pieces)

    def sets(step, *arguments):
        written.set()
        return step(*arguments)

    written = threading.Event()
    trap = traps(
        at_call("torchtitan.checkpoint.saver:write_file", 1, slow),
        at_call("torchtitan.trainer:Trainer.step", 7, sets),
    )
    saves = {"async_mode": "async", "interval": 4}
    played = play(recipe(run, checkpoint=saves), traps={0: trap}, status=0)
    log = played.log
    assert log.index("step 4/8") < log.index("step 6/8") < log.index("/step-4: ") < len(log)
    assert list(checkpoints(run)) == [4, 8]
    end, _ = undisturbed("one rank")
    End.of(run).assert_same(end, to_the_bit=True)
    sync = tmp_path / "sync"
    play(recipe(sync, training={"steps": 4}), status=0)
    digests = [read_manifest(checkpoints(folder)[4]).digest for folder in (run, sync)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_run_that_may_write_nowhere(tmp_path, small_disk):
    run = small_disk(tmp_path / "run")
    remount(run, "ro")
    played = play(recipe(run), status=2)
    assert played.log.startswith(f"error: job.dump_folder: cannot write into {run}: ")
    assert "Traceback" not in played.log
    assert not list(run.iterdir())

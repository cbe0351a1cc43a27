"""What else can be wrong with a folder: another run, another format, other clocks, early damage."""

import json
import os
import random
import shutil
import sys
import time
from itertools import count

import pytest
import torch

from tests.ranks import free_port
from tests.reliability.test_damage import FILES, flip
from tests.reliability.test_disk import MODES
from tests.reliability.trials import (
    End,
    at_call,
    checkpoints,
    leftovers,
    play,
    play_each,
    ranks_of,
    recipe,
    wait_until,
)
from torchtitan import trainer
from torchtitan.checkpoint import folder, manifest
from torchtitan.provenance import to_toml

CHECKPOINT = "torchtitan.checkpoint"


def state_of(folder):
    """Every file with its size and time."""
    found = ((path, path.stat()) for path in folder.rglob("*"))
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


# --- two runs ---


def test_a_second_run_on_a_folder_is_refused(tmp_path, undisturbed):
    """It comes while the first is in its fifth step."""
    run, found = tmp_path / "run", tmp_path / "found.json"
    (tmp_path / "second.toml").write_text(to_toml(recipe(run)))

    def second():
        folder.LOCK_SECONDS = 0.0
        try:
            with (tmp_path / "second.log").open("w") as sys.stderr:
                os._exit(trainer.main(["--job.config_file", str(tmp_path / "second.toml")]))
        finally:
            os._exit(70)

    def meanwhile(step, *arguments):
        before = state_of(run)
        if not (child := os.fork()):
            second()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.write_text(json.dumps((os.getpid(), status, state_of(run) == before)))
        return step(*arguments)

    play(recipe(run), traps={0: at_call("torchtitan.trainer:Trainer.step", 5, meanwhile)}, status=0)
    holder, status, is_untouched = json.loads(found.read_text())
    said = (tmp_path / "second.log").read_text()
    assert status == 2, said
    assert said.startswith(
        f"error: job.dump_folder: another run writes into {run} (process {holder} on "
    )
    assert is_untouched
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


def test_a_run_that_waits_for_another_starts_from_its_last_checkpoint(tmp_path, undisturbed):
    """It comes while the first is in its sixth step, and waits until that has finished.

    The first goes on when the second has found the folder locked; it would have chosen step 4.
    """
    run, started = tmp_path / "run", tmp_path / "started"
    (tmp_path / "second.toml").write_text(to_toml(recipe(run)))
    if not (second := os.fork()):
        folder.LOCK_SECONDS = 60.0
        with (tmp_path / "second.log").open("w") as sys.stderr:
            wait_until((run / "checkpoint/step-4").exists)
            sleep = time.sleep
            time.sleep = lambda seconds: (started.touch(), sleep(seconds))
            os._exit(trainer.main(["--job.config_file", str(tmp_path / "second.toml")]))

    def meanwhile(step, *arguments):
        wait_until(started.exists)
        return step(*arguments)

    play(recipe(run), traps={0: at_call("torchtitan.trainer:Trainer.step", 6, meanwhile)}, status=0)
    status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    said = (tmp_path / "second.log").read_text()
    assert status == 0, said
    assert "nothing to do: all 8 steps are done" in said
    assert not (run / "metrics.superseded.jsonl").exists()
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


REFUSED = {
    "other sizes": ({"model": {"flavor": "flat", "n_layers": 1}}, "belongs to another run"),
    "other sizes, told to resume": (
        {"model": {"flavor": "flat", "n_layers": 1}, "checkpoint": {"resume": "must"}},
        "is in the checkpoint, but not in this run",
    ),
    "used, and not to be resumed": ({"checkpoint": {"resume": "never"}}, "has been used"),
    "a step that there is": ({"checkpoint": {"load_step": 4}}, "already exists"),
    "a step that there is not": ({"checkpoint": {"load_step": 5}}, "no checkpoint of step 5"),
    "a typing mistake": ({"data": {"dataset_path": "nowhere"}}, "nowhere"),
}


def content(folder):
    """Every file with its bytes, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def wait_for_no_lock():
    folder.LOCK_SECONDS = 0.0


@pytest.mark.parametrize("layout", ["one rank", pytest.param("FSDP 2", marks=pytest.mark.gate)])
def test_a_refused_start_leaves_the_folder_as_it_was(layout, tmp_path):
    """Some are refused when the recipe is read, others when a checkpoint is loaded."""
    run, ranks = tmp_path / "run", ranks_of(layout)
    play(recipe(run, layout), ranks, status=0)
    (run / "checkpoint/step-7.saving").mkdir()
    (run / "comm_traces/0.json").write_text("{}")
    (run / "comm_traces/5.step").write_text("of more ranks")
    before = content(run)
    starts = play_each([recipe(run, layout, **each) for each, _ in REFUSED.values()], ranks)
    for played, (_, why) in zip(starts, REFUSED.values(), strict=True):
        assert played.status == 2, played.log
        assert why in played.log
        assert "--checkpoint.resume must" not in played.log  # which would be refused, too
        assert "Traceback" not in played.log
    assert content(run) == before
    (run / "lock").write_text("of a run that was killed\n")
    with folder.lock(run):
        before = content(run)
        played = play(
            recipe(run, layout), ranks, dict.fromkeys(range(ranks), wait_for_no_lock), status=2
        )
        assert "another run writes into" in played.log
        assert content(run) == before
    assert (run / "lock").read_text() == "of a run that was killed\n"


def test_a_refused_start_makes_no_folder(tmp_path):
    play(recipe(tmp_path / "other", training={"steps": 2}), status=0)
    initial = {"initial_load_path": str(tmp_path / "other/checkpoint")}
    model = {"flavor": "flat", "n_layers": 1}
    play(recipe(tmp_path / "run", model=model, checkpoint=initial), status=2)
    assert not (tmp_path / "run").exists()


def test_every_rank_learns_that_rank_0_was_refused(tmp_path, monkeypatch):
    """On other nodes they have no launcher that sees it end."""
    run = tmp_path / "run"
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(run, "FSDP 2")))
    port = free_port()
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    children = []
    with folder.lock(run):
        for rank in range(2):
            if not (child := os.fork()):
                try:
                    wait_for_no_lock()
                    os.environ["RANK"] = str(rank)
                    with (tmp_path / f"{rank}.log").open("w") as sys.stderr:
                        os._exit(trainer.main(["--job.config_file", str(tmp_path / "recipe.toml")]))
                finally:
                    os._exit(70)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    told, untold = ((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert statuses == [2, 2], told + untold
    assert f"another run writes into {run}" in told
    assert not untold
    assert not run.exists()


# --- formats ---


def refused(run, tmp_path):
    """Everything that may start from the checkpoints of a run."""
    before = state_of(run)
    before.pop(str(run / "lock"), None)  # has the name of the process that held it last
    newest = max((run / "checkpoint").iterdir())
    for path in (run / "checkpoint", newest):
        initial = {"initial_load_path": str(path), "enable": False}
        yield play(recipe(tmp_path / "fresh", checkpoint=initial))
    yield from play_each([recipe(run, checkpoint={"resume": how}) for how in ("auto", "must")])
    assert state_of(run).items() >= before.items()
    assert not leftovers(run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_the_first_format(tmp_path):
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "run/checkpoint/step-500"
    dcp.save({"model.norm.weight": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    (path / "train_state.json").write_text('{"train_state": {"step": 500}}')
    assert {p.suffix for p in path.iterdir()} >= {".distcp", ".json"}
    of_weights = f"initial_load_path: {path}: not the weights of"
    of_run = f"checkpoint.folder: {path} was saved by torch's distributed checkpoint"
    plays = refused(tmp_path / "run", tmp_path)
    for played, told in zip(plays, [of_weights] * 2 + [of_run] * 2, strict=True):
        assert played.status == 2, played.log
        assert told in played.log
        assert "Traceback" not in played.log


def test_a_checkpoint_of_a_later_format(tmp_path):
    run = tmp_path / "run"
    play(recipe(run, training={"steps": 2}), status=0)
    path = run / "checkpoint/step-2/manifest.json"
    content = json.loads(path.read_text()) | {"format": 5, "new": "what is not known yet"}
    del content[manifest.HASH]
    path.write_text(json.dumps(content | {manifest.HASH: manifest._hash_of(content)}))
    for played in refused(run, tmp_path):
        assert played.status == 2, played.log
        told = f"{path}: format 5; this version reads 2 to 4. It was written by a newer torchti"
        assert told in played.log


# --- time ---


def backwards():
    """Clocks that start ten years ago, and go back by an hour whenever they are read."""
    for name in ("time", "perf_counter", "time_ns"):
        now, hours = getattr(__import__("time"), name)(), count(1)
        hour = 3600 * (10**9 if name.endswith("_ns") else 1)
        read = lambda now=now, hour=hour, hours=hours: now - hour * (87600 + next(hours))  # noqa: E731
        setattr(__import__("time"), name, read)


def test_a_clock_that_goes_backwards(tmp_path, undisturbed):
    run = tmp_path / "run"
    played = play(recipe(run), traps={0: at_call(f"{CHECKPOINT}.store:Disk.commit", 3)})
    assert played.was_killed
    for years, path in zip((70, -50), checkpoints(run).values(), strict=True):
        for each in (path, *path.iterdir()):
            moment = each.stat().st_mtime + years * 3.15e7
            os.utime(each, (moment, moment))
    played = play(recipe(run), traps={0: backwards}, status=0)
    assert "/step-4 at step 4\n" in played.log
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


# --- retention ---


def harm_when_named(number, name):
    """A file changes after it was written, and before it is read back."""

    def harm(commit, store, path):
        done = commit(store, path)
        flip(random.Random(name), done / name)
        return done

    return at_call(f"{CHECKPOINT}.store:Disk.commit", number, harm)


def note_what_is_there(number, run, note):
    def write(begin, *arguments):
        note.write_text(" ".join(sorted(path.name for path in (run / "checkpoint").iterdir())))
        return begin(*arguments)

    return at_call(f"{CHECKPOINT}.store:Disk.begin", number, write)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "-0" in name or name[0] == "m" else pytest.mark.slow)
        for name in FILES["one rank"]
    ],
)
def test_nothing_is_deleted_for_what_is_harmed_at_once(name, mode, tmp_path, undisturbed):
    run, note = tmp_path / "run", tmp_path / "note"
    saves = {"keep_latest_k": 1, "async_mode": mode}
    harm, look = harm_when_named(2, name), note_what_is_there(3, run, note)

    def traps():
        harm()
        look()

    played = play(recipe(run, checkpoint=saves), traps={0: traps}, status=0)
    assert f"step-4/{name}: damaged" in played.log
    assert "; renamed to step-4.damaged\n" in played.log
    assert note.read_text() == "step-2 step-4.damaged"
    assert list(checkpoints(run)) == [8]
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_last_checkpoint_that_is_harmed_at_once(mode, tmp_path, undisturbed):
    run, saves = tmp_path / "run", {"keep_latest_k": 1, "async_mode": mode}
    trap = harm_when_named(4, "rank-0.safetensors")
    played = play(recipe(run, checkpoint=saves), traps={0: trap}, status=1)
    assert "the run's work since step 6 is lost\n" in played.log
    assert list(checkpoints(run)) == [6]
    play(recipe(run, checkpoint=saves), status=0)
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


def test_checkpoints_of_a_run_that_went_further_are_left_alone(tmp_path):
    run = tmp_path / "run"
    play(recipe(run, checkpoint={"keep_latest_k": 0}), status=0)
    assert list(checkpoints(run)) == [2, 4, 6, 8]
    back = {"load_step": 4, "keep_latest_k": 2}
    play(recipe(run, checkpoint=back, training={"steps": 5}), status=0)
    assert list(checkpoints(run)) == [4, 5, 6, 8]
    shutil.rmtree(run)

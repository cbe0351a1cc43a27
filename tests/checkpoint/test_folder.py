"""What a run starts from, and that nothing on disk is taken for what it is not."""

import io
import json
import os
import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import listening, losses, rows, train
from tests.tiers import tiers
from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint import lock, saved_steps, saver
from torchtitan.checkpoint.settings import NOTHING_SAVED
from torchtitan.checkpoint.store import Disk
from torchtitan.config import ConfigError
from torchtitan.job import JobConfig
from torchtitan.tools.cli import main
from torchtitan.trainer import choose


def recipe(folder, steps=4, **sections):
    checkpoint = {"enable": True, "interval": 2} | sections.pop("checkpoint", {})
    training = {"steps": steps, "local_batch_size": 4} | sections.pop("training", {})
    schedule = {"total_steps": 8} | sections.pop("lr_scheduler", {})
    return tiny.job(
        folder, checkpoint=checkpoint, training=training, lr_scheduler=schedule, **sections
    )


def run(job):
    return run_ranks(train, 1, job)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four steps, saved at 2 and 4, and their weights."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(recipe(folder))


@pytest.fixture
def finished(saved, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(saved[0], tmp_path / "finished"))


def steps_in(folder):
    return list(saved_steps(folder / "checkpoint"))


def test_saves_at_the_interval_and_at_the_end(tmp_path):
    run(recipe(tmp_path, steps=3))
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("off", [{"enable": False}, {"load_only": True}], ids=str)
def test_a_run_saves_unless_it_is_told_not_to_and_says_so(off, tmp_path, monkeypatch):
    """By default at the end; without saves it is said before and after, and by `check`."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    recipe = tmp_path / "plain.toml"
    text = "[job]\nimports = ['tests.tiny']\n[model]\nname = 'tiny'\nflavor = 'tiny'\n"
    text += "[training]\nsteps = 1\nseq_len = 32\nlocal_batch_size = 1\n"
    recipe.write_text(text + "[metrics]\nlog_freq = 1\n")
    words = [str(recipe), f"--job.dump_folder={tmp_path}", "--no-data.report_unigram_loss"]
    assert main(["train", *words]) == 0
    assert steps_in(tmp_path) == [1]
    assert "nothing" not in said.getvalue()
    words[1] = f"--job.dump_folder={tmp_path / 'off'}"
    words += [f"--checkpoint.{key}={str(value).lower()}" for key, value in off.items()]
    assert main(["train", *words]) == 0
    assert steps_in(tmp_path / "off") == []
    begun, _, ended = said.getvalue().rpartition("step 1/1")
    assert NOTHING_SAVED in begun
    assert "ended at step 1 of 1; nothing is saved" in ended


def test_a_key_that_has_no_effect_without_saves_is_found(capsys):
    words = ["debug_model", "--checkpoint.enable=false", "--checkpoint.keep_latest_k=2"]
    assert main(["check", *words]) == 0
    out, err = capsys.readouterr()
    assert NOTHING_SAVED in out
    for key in ("interval", "keep_latest_k"):
        assert re.search(rf"checkpoint.{key}: got .* no effect while checkpoint.enable is", err)


def test_keeps_the_latest(tmp_path):
    run(recipe(tmp_path, steps=5, checkpoint={"keep_latest_k": 2}))
    assert steps_in(tmp_path) == [4, 5]
    run(recipe(tmp_path, steps=8, checkpoint={"keep_latest_k": 1}))
    assert steps_in(tmp_path) == [8]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-8"]


def test_first_step_and_load_only(tmp_path):
    run(recipe(tmp_path, steps=2, checkpoint={"enable_first_step_checkpoint": True}))
    assert steps_in(tmp_path) == [1, 2]
    run(recipe(tmp_path, steps=4, checkpoint={"load_only": True}))
    assert steps_in(tmp_path) == [1, 2]
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


def killed_at(module, stage, job):
    """Die, as if killed, at a stage of the second save."""
    original, calls = getattr(module, stage), []

    def die(*args, **named):
        calls.append(args)
        if len(calls) == 2:
            os._exit(9)
        return original(*args, **named)

    setattr(module, stage, die)
    train(job)


@pytest.mark.parametrize(
    ("module", "stage"),
    [(Disk, "begin"), (saver, "write_file"), (saver, "write_manifest_of"), (Disk, "commit")],
)
def test_a_save_cut_short_is_no_checkpoint(module, stage, tmp_path):
    process = torch.multiprocessing.get_context("fork").Process(
        target=killed_at, args=(module, stage, recipe(tmp_path))
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert steps_in(tmp_path) == [2]
    assert (tmp_path / "checkpoint/step-4.saving").exists() == (stage != "begin")

    run(recipe(tmp_path))
    assert steps_in(tmp_path) == [2, 4]
    assert not list((tmp_path / "checkpoint").glob("*.saving"))


@pytest.mark.parametrize("name", ["old-step-5", "step-5.saving", "step-5x", "step-", "5"])
def test_other_names_are_no_checkpoints(name, tmp_path):
    (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == {}


def test_the_newest_checkpoint_is_that_of_the_last_step(tmp_path):
    """Neither the last name, nor the last file."""
    for step in (100, 9, 20):
        (tmp_path / f"step-{step}").mkdir()
    assert list(saved_steps(tmp_path)) == [9, 20, 100]
    disk.delete_old_checkpoints(tmp_path, newest=100, keep=2, every=0)
    assert list(saved_steps(tmp_path)) == [20, 100]


def test_never_refuses_a_used_folder(finished, tmp_path):
    never = {"resume": "never"}
    assert not choose(recipe(tmp_path / "new", checkpoint=never)).is_resume
    with pytest.raises(ConfigError, match=r'resume: got "never", but .* has been used'):
        choose(recipe(finished, checkpoint=never))
    with pytest.raises(ConfigError, match="has been used"):
        choose(recipe(finished, checkpoint=never | {"enable": False}))


def test_must_needs_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r'got "must", but there is no checkpoint in'):
        choose(recipe(tmp_path, checkpoint={"resume": "must"}))


def test_auto_refuses_another_run_and_must_takes_it(finished):
    other = {"model": {"flavor": "tied"}, "debug": {"seed": 3}}
    message = (
        r'belongs to another run \(debug.seed: 0 -> 3; model.flavor: "tiny" -> "tied"; '
        r"model.tied: false -> true\)"
    )
    with pytest.raises(ConfigError, match=message):
        choose(recipe(finished, **other))
    start = choose(recipe(finished, checkpoint={"resume": "must"}, debug={"seed": 3}))
    assert start.path == finished / "checkpoint/step-4"
    assert "debug.seed: 0 -> 3" in start.changes


def test_other_sizes_are_another_run_however_they_are_said(finished):
    with pytest.raises(ConfigError, match=r"belongs to another run \(model.ffn_dim: 64 -> 128\)"):
        choose(recipe(finished, model={"ffn_dim": 128}))
    assert choose(recipe(finished, model={"ffn_dim": 64, "tied": False})).is_resume


def test_a_checkpoint_that_recorded_no_sizes_has_those_of_its_flavor(tmp_path, monkeypatch):
    in_effect = JobConfig.in_effect

    def as_before(job):
        sizes = {f"model.{key}" for key in job.model.sizes()}
        return {key: value for key, value in in_effect(job).items() if key not in sizes}

    with monkeypatch.context() as patch:
        patch.setattr(JobConfig, "in_effect", as_before)
        run(recipe(tmp_path))
    assert choose(recipe(tmp_path)).changes == ()
    with pytest.raises(ConfigError, match=r"belongs to another run \(model.dim: 32 -> 64\)"):
        choose(recipe(tmp_path, model={"dim": 64}))


def test_auto_goes_on_when_only_settings_changed_and_says_which(finished):
    start = choose(recipe(finished, steps=6, optimizer={"name": "AdamW", "lr": 0.1}))
    assert start.is_resume
    moved, *changes = start.changes
    assert moved.startswith("job.dump_folder: ")
    assert changes == ["optimizer.lr: 0.0008 -> 0.1", "training.steps: 4 -> 6"]


def test_a_change_of_the_next_learning_rate_is_told_in_a_line(finished):
    """By more steps, another schedule or optimizer; of a run that is resumed or branched."""
    same = recipe(finished)
    tokens = {"unit": "tokens", "warmup_steps": 2 * 8 * 32, "total_steps": 8 * 8 * 32}
    assert choose(same).rate == choose(recipe(finished, lr_scheduler=tokens)).rate == ""
    slower = {"lr_scheduler": tokens | {"warmup_steps": 6 * 8 * 32}}
    kept = recipe(finished, training={"global_batch_size": -1}, **slower)
    assert choose(kept).rate == choose(recipe(finished, **slower)).rate
    must = {"optimizer": {"name": "SGD", "lr": 0.5}, "checkpoint": {"resume": "must"}}
    sgd = recipe(finished, steps=6, **must)
    anew = recipe(finished, steps=6, checkpoint={"exclude_from_loading": ["lr_scheduler"]})
    longer, cosine = (
        tiny.job(
            finished, training={"steps": 16}, lr_scheduler=schedule, checkpoint={"enable": True}
        )
        for schedule in ({"warmup_steps": 2}, {"total_steps": 8, "decay_type": "cosine"})
    )
    initial = {"initial_load_path": str(finished / "checkpoint/step-4")}
    branch = tiny.job(
        finished.with_name("branch"),
        training={"steps": 16},
        lr_scheduler={"warmup_steps": 2},
        checkpoint=initial | {"initial_load_model_only": False},
    )
    there = same.optimizer.lr * same.learning_rate_factor(5)
    for job in (sgd, anew, longer, cosine, branch):
        here = job.optimizer.lr * job.learning_rate_factor(1 if job is anew else 5)
        assert choose(job).rate == f"learning rate of step 5: {there:g} -> {here:g}"


def test_steps_are_not_counted_anew_in_a_folder_that_has_them(finished):
    anew = {"exclude_from_loading": ["train_state"]}
    message = r"exclude_from_loading: \S+/step-2: already exists, and a run without train_state"
    with pytest.raises(ConfigError, match=message):
        choose(recipe(finished, steps=6, checkpoint=anew))
    assert choose(recipe(finished, steps=3, checkpoint=anew | {"interval": 100})).excluded


def test_load_step(finished):
    start = choose(recipe(finished, steps=3, checkpoint={"load_step": 2}))
    assert start.path == finished / "checkpoint/step-2"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 .* there are step-2, step-4"):
        choose(recipe(finished, checkpoint={"load_step": 3}))


def test_going_back_does_not_overwrite_what_came_later(finished):
    before = (finished / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"load_step: \S+/step-4: already exists, .*Delete it;"):
        choose(recipe(finished, checkpoint={"load_step": 2}))
    with pytest.raises(AssertionError, match=r"step-4: already exists"):
        run(recipe(finished, checkpoint={"load_step": 2}))
    assert steps_in(finished) == [2, 4]
    assert (finished / "metrics.jsonl").read_text() == before, "no step was taken"
    for checkpoint, steps in (
        ({"interval": 3}, 4),  # the last step is saved
        ({"interval": 4}, 5),
    ):
        with pytest.raises(ConfigError, match=r"step-4: already exists"):
            choose(recipe(finished, steps, checkpoint={"load_step": 2} | checkpoint))


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [({"interval": 100}, 3), ({"interval": 3}, 5), ({"interval": 3}, 3), ({"load_only": True}, 4)],
)
def test_going_back_where_no_save_would_overwrite_what_came_later(checkpoint, steps, finished):
    run(recipe(finished, steps, checkpoint={"load_step": 2} | checkpoint))
    assert {2, 4} <= set(steps_in(finished))


def test_weights_alone_cannot_be_resumed_but_can_start_another_run(tmp_path):
    only = {"interval": 100, "last_save_model_only": True, "export_dtype": "bfloat16"}
    trained = run(recipe(tmp_path / "a", checkpoint=only))
    with pytest.raises(ConfigError, match="holds only weights"):
        choose(recipe(tmp_path / "a", steps=6, checkpoint=only))

    initial = {"initial_load_path": str(tmp_path / "a/checkpoint")}
    frozen = {"name": "SGD", "lr": 1e-30, "weight_decay": 0.0}
    found = run(recipe(tmp_path / "b", steps=1, checkpoint=initial, optimizer=frozen))
    assert all(torch.equal(found[n], w.bfloat16().float()) for n, w in trained.items())
    with pytest.raises(ConfigError, match="initial_load_model_only = true"):
        choose(recipe(tmp_path / "c", checkpoint=initial | {"initial_load_model_only": False}))


def test_a_checkpoint_of_this_run_comes_before_initial_weights(tmp_path, saved):
    initial = {"initial_load_path": str(saved[0] / "checkpoint/step-2")}
    assert choose(recipe(tmp_path / "b", checkpoint=initial)).model_only
    run(recipe(tmp_path / "b", checkpoint=initial))
    start = choose(recipe(tmp_path / "b", checkpoint=initial))
    assert start.path == tmp_path / "b/checkpoint/step-4"


def test_everything_of_another_run(tmp_path, saved):
    initial = {
        "initial_load_path": str(saved[0] / "checkpoint/step-2"),
        "initial_load_model_only": False,
    }
    run(recipe(tmp_path / "second", steps=4, checkpoint=initial))
    whole, second = losses(saved[0]), losses(tmp_path / "second")
    assert second == {step: whole[step] for step in (3, 4)}


def state_of(folder, step):
    return json.loads((folder / f"checkpoint/step-{step}/train_state.json").read_text())


@pytest.mark.parametrize(("unit", "size"), [("steps", 1), ("tokens", 8 * 32)])
def test_parts_left_out_of_loading_start_afresh(finished, unit, size):
    excluded = {"exclude_from_loading": ["lr_scheduler", "data", "optimizer"]}
    schedule = {"unit": unit, "warmup_steps": 2 * size, "total_steps": 8 * size}
    run(recipe(finished, steps=6, checkpoint=excluded, lr_scheduler=schedule))
    state = state_of(finished, 6)
    assert state["train_state"]["schedule_start"] == 4
    assert state["train_state"]["schedule_start_tokens"] == 4 * 8 * 32
    assert state["train_state"]["step"] == 6
    assert state["data"]["samples"] == 2 * 8
    rates = [row["lr"] for row in rows(finished)]
    assert rates[4:6] == rates[0:2]


@pytest.mark.parametrize("branches", [True, False], ids=["of another run", "of its own"])
def test_parts_are_left_out_once(branches, finished, tmp_path):
    """So a run that left them out, and was interrupted, resumes as if it had not been."""
    excluded = {"exclude_from_loading": ["lr_scheduler", "data", "optimizer"]}
    folders = [tmp_path / "whole", tmp_path / "halves"]
    if branches:
        initial = str(finished / "checkpoint/step-4")
        excluded |= {"initial_load_path": initial, "initial_load_model_only": False}
    else:
        for folder in folders:
            shutil.copytree(finished, folder)
    whole = run(recipe(folders[0], steps=8, checkpoint=excluded))
    for steps in (6, 8):
        found = run(recipe(folders[1], steps, checkpoint=excluded))
    assert all(torch.equal(found[name], weight) for name, weight in whole.items())
    assert losses(folders[1]) == losses(folders[0])


SGD, NOT_HERE = {"name": "SGD"}, "is in the checkpoint, but not in this run"
MISFITS = {
    r"\.\S+momentum_buffer is not in the checkpoint": {"optimizer": SGD | {"momentum": 0.9}},
    r"is \(300, 32\) there and \(300, 64\) here": {"model": {"flavor": "wide"}},
    f"exp_avg {NOT_HERE}": {"optimizer": SGD | {"momentum": 0.0}},
    rf"model.layers.1.\S+ {NOT_HERE}": {"model": {"flavor": "short"}},
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_named(message, finished):
    with pytest.raises(AssertionError, match=message):
        run(recipe(finished, steps=6, checkpoint={"resume": "must"}, **MISFITS[message]))


def test_what_is_written_says_what_ran(finished):
    state = state_of(finished, 4)
    assert state["recipe"]["training.steps"] == 4
    assert state["seed"] == 0
    assert state["versions"]["torch"] == torch.__version__


def flip(path, at=-1):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def choose_and_run(job):
    choose(job)
    run(job)


def train_and_listen(job):
    """The weights, and what was logged."""
    said = listening()
    return train(job), said


def cut(path):
    os.truncate(path, 100)


FILES = ("manifest.json", "train_state.json", "rank-0.safetensors")
DAMAGES = [(damage, name) for damage in (flip, cut, Path.unlink) for name in FILES]
DAILY = [*((flip, name) for name in FILES[:2]), (cut, FILES[2]), (cut, FILES[1])]
DAILY += [(Path.unlink, FILES[2]), (Path.unlink, FILES[0])]


@pytest.mark.parametrize(("damage", "name"), tiers(DAMAGES, DAILY))
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(damage, name, finished, saved):
    damage(finished / "checkpoint/step-4" / name)
    with pytest.raises((ConfigError, AssertionError), match=f"step-4.*{name}"):
        choose_and_run(recipe(finished, checkpoint={"resume": "must"}))
    found, said = run_ranks(train_and_listen, 1, recipe(finished))[0]
    assert all(torch.equal(found[parameter], weight) for parameter, weight in saved[1].items())
    assert steps_in(finished) == [2, 4]
    assert (finished / "checkpoint/step-4.damaged").is_dir()
    assert any(re.search(f"step-4.*{name}.*; renamed to step-4.damaged", line) for line in said)
    assert not any("keeping later checkpoints" in line for line in said)  # of none that stays


def test_without_a_good_checkpoint_nothing_starts_afresh(finished):
    for step in (2, 4):
        flip(finished / f"checkpoint/step-{step}/rank-0.safetensors")
    with pytest.raises(AssertionError, match=r"all checkpoints in \S+ are damaged"):
        run(recipe(finished, steps=6))
    assert steps_in(finished) == [2, 4]


def test_damaged_initial_weights_are_refused(tmp_path, finished):
    flip(finished / "checkpoint/step-4/rank-0.safetensors")
    initial = {"initial_load_path": str(finished / "checkpoint")}
    with pytest.raises(AssertionError, match=r"initial_load_path: \S+/step-4/rank-0.safetensors"):
        run(recipe(tmp_path / "b", checkpoint=initial))


def test_one_run_at_a_time_writes_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0)
    with lock(tmp_path):
        message = f"another run writes into {tmp_path} \\(process {os.getpid()} on"
        with pytest.raises(ConfigError, match=message), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


def test_a_lock_that_is_about_to_be_let_go_is_waited_for(tmp_path, monkeypatch):
    """As of a process that a killed run has forked, and that is not yet another program."""
    with ExitStack() as killed:
        killed.enter_context(lock(tmp_path))
        monkeypatch.setattr("time.sleep", lambda seconds: killed.close())
        with lock(tmp_path):
            assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_run_that_is_ending_is_waited_for(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "torchtitan")
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0)
    with ExitStack() as ending:
        ending.enter_context(lock(tmp_path)).mark_ending()
        naps = []

        def sleep(seconds):
            naps.append(seconds)
            if len(naps) == 100:
                ending.close()

        monkeypatch.setattr("time.sleep", sleep)
        with lock(tmp_path):
            assert len(naps) == 100
    (message,) = caplog.messages
    assert message.startswith(f"waiting up to 10 minutes for the run in {tmp_path} (process ")
    monkeypatch.undo()
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0)
    monkeypatch.setattr(disk, "ENDING_SECONDS", 0)
    with lock(tmp_path) as holder:
        holder.mark_ending()
        message = r"another run writes into \S+ \(process \d+ on \S+, which is ending\); wait until"
        with pytest.raises(ConfigError, match=message), lock(tmp_path):
            pass


def test_a_lock_leaves_no_trace(tmp_path):
    with lock(tmp_path / "new/run"):
        assert (tmp_path / "new/run/lock").read_text().startswith("process ")
    assert not (tmp_path / "new").exists()
    (tmp_path / "lock").write_text("of a run that was killed")
    with lock(tmp_path):
        assert (tmp_path / "lock").read_text().startswith("process ")
    assert (tmp_path / "lock").read_text() == "of a run that was killed"


def test_a_folder_that_cannot_be_written_into_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = f"job.dump_folder: cannot write into {tmp_path}/file/run: "
    with pytest.raises(ConfigError, match=message), lock(tmp_path / "file" / "run"):
        pass
    (tmp_path / "link").symlink_to("/no/disk")
    for run in ("link", "link/run"):
        with pytest.raises(ConfigError, match="link to /no/disk"), lock(tmp_path / run):
            pass


def test_of_an_old_checkpoint_that_is_a_link_only_the_link_is_deleted(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-4").mkdir()
    disk.delete_old_checkpoints(tmp_path, newest=4, keep=1, every=0)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "step-4"}


def test_what_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    for name in ("step-2", "step-4", "step-6.saving"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("shutil.rmtree", Mock(side_effect=PermissionError(13, "denied")))
    disk.delete_unfinished(tmp_path)
    disk.delete_old_checkpoints(tmp_path, newest=4, keep=1, every=0)
    assert len(caplog.messages) == 2
    assert "could not delete" in caplog.messages[0]
    assert "could not delete" in caplog.messages[1]
    assert (tmp_path / "step-6.saving").exists()
    assert list(saved_steps(tmp_path)) == [4]


def test_checkpoints_of_every_so_many_steps_are_kept(tmp_path):
    run(recipe(tmp_path, steps=7, checkpoint={"interval": 1, "keep_latest_k": 2, "keep_every": 3}))
    assert steps_in(tmp_path) == [3, 6, 7]


def test_finished_run_has_nothing_to_do(finished):
    before = (finished / "metrics.jsonl").read_text()
    run(recipe(finished))
    assert (finished / "metrics.jsonl").read_text() == before
    assert steps_in(finished) == [2, 4]


def test_a_run_that_is_done_says_how_to_go_on(tmp_path):
    run(recipe(tmp_path, steps=2))
    ((_, told),) = run_ranks(train_and_listen, 1, recipe(tmp_path, steps=2))
    assert told[-1] == (
        "nothing to do: all 2 steps are done; to continue, increase training.steps; to start "
        "over, choose another job.dump_folder"
    )

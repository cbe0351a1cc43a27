"""Spikes: all ranks skip the same steps, roll back alike, and a resumed run does as one whole."""

import dataclasses
import json
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import layouts
from tests.checkpoint.test_folder import flip
from tests.layouts import LAYOUTS
from tests.ranks import run_ranks
from tests.runs import each, losses, parts, rows, running, weights, world_of
from torchtitan.build import Observer, build
from torchtitan.checkpoint import TrainState, saved_steps
from torchtitan.checkpoint.folder import read_state, replace_state
from torchtitan.checkpoint.manifest import problems_of_files, read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checkpoint.store import Disk
from torchtitan.checkpoint.tiers import read_history
from torchtitan.inputs import open_stream
from torchtitan.losses import IGNORED
from torchtitan.resilience.divergence import TrainingDiverged
from torchtitan.tools.cli import main
from torchtitan.trainer import Trainer, choose


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


UNSEEN = 299
"""A token that the data does not have."""


class Spoiled:
    """A stream in which, at some positions, nothing but an unseen token follows."""

    def __init__(self, stream, accumulation, batch, bad):
        self.stream, self.accumulation, self.batch, self.bad = stream, accumulation, batch, bad
        self.position = self.left = 0

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            self.position = self.stream.state_dict()["samples"] // self.batch + 1
            self.left = self.accumulation
        self.left -= 1
        batch = next(self.stream)
        if self.position not in self.bad:
            return batch
        targets = batch.targets.where(batch.targets == IGNORED, UNSEEN)
        return dataclasses.replace(batch, targets=targets)


@dataclasses.dataclass
class Outcome:
    """What a rank ends with."""

    state: TrainState
    weights: dict[str, Tensor]
    error: str | None
    moved: list[bool]
    """Of each step taken, whether it changed a weight that this rank has."""
    returned: list[dict[str, Tensor]]
    """The weights after each rollback."""


class Killed(Exception):
    """As by SIGKILL: nothing is saved."""


def train(job, bad, kill_after=0, sees=-1, at_step=lambda step: None):
    """Train on data that is bad where step n of an undisturbed run reads it, for n in `bad`.

    Args:
        kill_after: how many steps are taken before the run is killed; 0: it is not.
        sees: the one rank that measures another gradient norm in these steps, of good data; -1:
            data is bad.
    """
    with world_of(job) as world:
        start = world.broadcast_object(choose(job) if world.rank == 0 else None)
        batch, accumulation = job.global_batch(world.degrees), job.accumulation(world.degrees)

        def open_spoiled(*arguments, **settings):
            stream = open_stream(*arguments, **settings)
            return Spoiled(stream, accumulation, batch, bad) if sees < 0 else stream

        with mock.patch("torchtitan.build.open_stream", open_spoiled):
            run = build(job, world, Observer(before_step=at_step))
        roll_back = run.divergence.roll_back
        norm = run.optimizers.norm

        def misled():
            found, is_bad = norm(), run.state.step + 1 in bad and world.rank == sees
            return replace(found, squares=found.squares * 1e4) if is_bad else found

        run.optimizers.norm = misled
        trainer = Trainer(run)
        step = trainer.step
        outcome = Outcome(run.state, {}, None, [], [])

        def watched():
            if kill_after and len(outcome.moved) == kill_after:
                raise Killed
            before = parts(run)
            step()
            pairs = [(part.local, before[name].local) for name, part in parts(run).items()]
            outcome.moved.append(any(not torch.equal(new, old) for new, old in pairs))

        def returning():
            if is_done := roll_back():
                outcome.returned.append(weights(run))
            return is_done

        trainer.step = watched
        run.divergence.roll_back = returning
        with closing(run.batches):
            try:
                trainer.train(start)
            except (TrainingDiverged, Killed) as raised:
                outcome.error = str(raised)
        outcome.weights = weights(run)
        return outcome


def recipe(folder, layout="one", optimizer="AdamW", **sections):
    """Steps are judged from the fifth good one on, and every third is saved."""
    defaults = {
        "job": {"dump_folder": str(folder)},
        "debug": {"seed": 7},  # with others a step of good data may be far from the few before
        "model": {"flavor": "flat"},
        "training": {"steps": 12, "max_skipped_steps": 3},
        "lr_scheduler": {"total_steps": 12},
        "checkpoint": {"enable": True, "interval": 3},
        "spikes": {"sigma": 10, "window": 4, "max_rollbacks": 2},
    }
    merged = layouts.tiny.merged(defaults, sections)
    return layouts.job(LAYOUTS.get(layout, layouts.ONE), optimizer, **merged)


def ranks(layout):
    return LAYOUTS.get(layout, layouts.ONE).ranks


def curve(folder):
    """The rows of a run without what depends on the clock."""
    measured = {"loss", "grad_norm", "lr", "tokens", "skipped", "skipped_because"}
    decided = {"step", "event", "from_step", "skipped_samples", "rollbacks"}
    return [{k: v for k, v in row.items() if k in measured | decided} for row in rows(folder)]


def is_same(found, expected):
    return all(torch.equal(weight, expected[name]) for name, weight in found.items())


def is_near(found, expected):
    return all(torch.allclose(w, expected[n], rtol=0, atol=1e-5) for n, w in found.items())


# --- skipping ---


@pytest.fixture(scope="module")
def without_step_6():
    """The weights of a run by SGD whose sixth update is not made."""
    job = recipe(Path("unused"), optimizer="SGD", training={"steps": 8}, **FREE)
    return run_ranks(leaving_out, 1, job, 6)[0]


FREE = {"spikes": {"sigma": 0, "max_rollbacks": 0}, "checkpoint": {"enable": False}}


def leaving_out(job, at):
    with running(job, sinks=[]) as run, run.meter:
        update = run.optimizers.step
        run.optimizers.step = lambda *norms: None if run.state.step + 1 == at else update(*norms)
        trainer = Trainer(run)
        for _ in range(job.training.steps):
            trainer.step()
        return weights(run)


@pytest.mark.parametrize(
    "names", [("one",), ("FSDP 2", "PP 2, 1F1B"), slow(("FSDP 2 x TP 2",))], ids=" and ".join
)
def test_all_ranks_skip_a_spike_and_are_as_without_the_step(names, tmp_path, without_step_6):
    short = {"training": {"steps": 8}, "metrics": {"log_freq": 100}}
    jobs = [recipe(tmp_path / name, name, "SGD", **short) for name in names]
    for outcomes in run_ranks(each, ranks(names[0]), train, jobs, {6}):
        for name, found in zip(names, outcomes, strict=True):
            assert found.moved == [True] * 5 + [False] + [True] * 2, name
            assert (found.state.skipped, found.state.consecutive_skips) == (1, 0)
            assert is_near(found.weights, without_step_6), name
            first, skipped, last = rows(tmp_path / name)
            assert (first["step"], skipped["step"], last["step"]) == (1, 6, 8)
            assert skipped["skipped_because"] == "grad_norm"
            assert skipped["grad_norm"] > skipped["grad_norm_mean"] + 10 * skipped["grad_norm_std"]
            assert skipped["loss"] < skipped["loss_mean"] + 10 * skipped["loss_std"]
            # What was skipped is no measure of what follows.
            assert skipped["grad_norm"] not in found.state.history["grad_norm"]


def test_a_spike_that_one_rank_alone_sees_is_skipped_by_all(tmp_path):
    job = recipe(tmp_path, "DDP 2", training={"steps": 7})
    one, other = run_ranks(train, 2, job, {6}, 0, 1)
    assert one.moved == other.moved == [True] * 5 + [False, True]
    assert one.state == other.state


def test_an_ordinary_run_has_no_spike(tmp_path):
    spikes = {"sigma": 6, "window": 32}
    job = recipe(tmp_path, training={"steps": 40}, lr_scheduler={"total_steps": 40}, spikes=spikes)
    assert run_ranks(train, 1, job, {})[0].state.skipped == 0


@pytest.mark.slow
def test_the_debug_run_has_no_spike(tmp_path):
    flags = ["--spikes.sigma=6", "--spikes.window=20", "--training.steps=60"]
    folder = f"--job.dump_folder={tmp_path}"
    assert main(["train", "train_configs/debug_model.toml", *flags, folder]) == 0
    assert sum(row.get("skipped", 0) for row in rows(tmp_path)) == 0


# --- rolling back ---

BAD = {5, 8, 9, 10}
"""One step that is skipped, and a row too long; step 9, within it, is saved."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one rank that is never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(train, 1, recipe(folder), BAD)[0]


def test_rollback_is_the_checkpoint_with_later_data(whole):
    folder, found = whole
    checkpoint = folder / "checkpoint/step-6"
    manifest = read_manifest(checkpoint)
    saved = SavedTensors(checkpoint)
    [returned] = found.returned
    assert is_same(returned, {name: saved.read(f"model.{name}") for name in returned})

    # Steps 1 to 10, and 7 to 12 again.
    assert found.moved == [n not in BAD for n in range(1, 11)] + [True] * 6
    state = found.state
    assert (state.step, state.skipped, state.rollbacks, state.skipped_samples) == (12, 1, 1, 4 * 8)
    assert state.tokens == 12 * 8 * 32
    last = folder / "checkpoint/step-12"
    assert read_state(last, read_manifest(last))["data"]["samples"] == (12 + 4) * 8
    assert list(saved_steps(folder / "checkpoint")) == [3, 6, 9, 12]

    steps = [row["step"] for row in rows(folder)]
    assert steps == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12]
    event = {"step": 6, "event": "rollback", "from_step": 10, "skipped_samples": 32, "rollbacks": 1}
    assert curve(folder)[6] == event
    old = (folder / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in old] == [7, 8, 9, 10]
    # The old position of the data is kept for people; what counts is known to be whole.
    assert json.loads((checkpoint / "train_state.json").read_text())["data"]["samples"] == 6 * 8
    assert read_state(checkpoint, manifest)["data"]["samples"] == 10 * 8
    assert list(problems_of_files(checkpoint, manifest)) == []


@pytest.mark.parametrize("layout", ["FSDP 2", slow("PP 2, 1F1B")])
def test_rollback_on_several_ranks_ends_as_on_one(layout, tmp_path, whole):
    """To a checkpoint that was saved in the background, or to a frequent one."""
    folder, expected = whole
    often = {"enable": True, "interval": 5, "frequent": {"interval": 3}}
    jobs = [
        recipe(tmp_path / "rare", layout, checkpoint={"async_mode": "async"}),
        recipe(tmp_path / "often", layout, checkpoint=often),
    ]
    for outcomes in run_ranks(each, ranks(layout), train, jobs, BAD):
        for found in outcomes:
            assert found.moved == expected.moved
            assert is_near(found.weights, expected.weights)
    for run in (tmp_path / "rare", tmp_path / "often"):
        assert losses(run) == pytest.approx(losses(folder), rel=1e-5)
        assert curve(run)[6] == curve(folder)[6]
    assert list(saved_steps(tmp_path / "often/checkpoint")) == [5, 10, 12]
    saved = saved_steps(tmp_path / "often/frequent")
    assert list(saved) == [6, 9]
    assert read_state(saved[6], read_manifest(saved[6]))["train_state"]["rollbacks"] == 1
    history = read_history(tmp_path / "often/checkpoint/frequent.json")
    assert [step for _, step in history] == [0, 6]


# Killed before the row, in it with a checkpoint of it, right after the rollback, and later.
@pytest.mark.parametrize("kill_after", [slow(7), 9, 10, slow(13)])
def test_a_run_killed_around_a_rollback_ends_as_one_never_stopped(kill_after, tmp_path, whole):
    folder, expected = whole
    killed = run_ranks(train, 1, recipe(tmp_path), BAD, kill_after)[0]
    assert len(killed.moved) == kill_after
    found = run_ranks(train, 1, recipe(tmp_path), BAD)[0]
    assert is_same(found.weights, expected.weights)
    assert found.state == expected.state
    assert curve(tmp_path) == curve(folder)
    if kill_after >= 10:
        assert all(found.moved), "the bad data was met again"


@pytest.mark.parametrize(
    ("before", "kill_after", "after"),
    [
        pytest.param("FSDP 2", 10, "PP 2, 1F1B", marks=pytest.mark.gate),
        slow("PP 2, 1F1B", 9, "FSDP 2"),
    ],
)
def test_a_run_killed_around_a_rollback_goes_on_on_another_layout(
    before, kill_after, after, tmp_path, whole
):
    folder, expected = whole
    run_ranks(train, ranks(before), recipe(tmp_path, before), BAD, kill_after)
    for found in run_ranks(train, ranks(after), recipe(tmp_path, after), BAD):
        assert is_near(found.weights, expected.weights)
        assert found.state.skipped_samples == expected.state.skipped_samples
    assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-5)


def test_after_the_last_rollback_allowed_the_run_ends_with_what_was_trained_saved(tmp_path):
    bad = {8, 9, 10, 11, 12, 13, 14, 15, 16}
    for found in run_ranks(train, 2, recipe(tmp_path, "FSDP 2"), bad):
        assert (found.state.step, found.state.rollbacks) == (9, 2)
        assert found.error is not None
        assert found.error.startswith(
            "step 9: 3 steps in a row (training.max_skipped_steps) were skipped, after 2 rollbacks "
            "(spikes.max_rollbacks); none of them changed a weight."
        )
    events = [row for row in curve(tmp_path) if "event" in row]
    # From step 7, 8, 9 and 10 of the data, then from three more.
    assert [(row["step"], row["skipped_samples"]) for row in events] == [(6, 4 * 8), (6, 3 * 8)]
    assert list(saved_steps(tmp_path / "checkpoint")) == [3, 6, 9]


def test_without_a_checkpoint_to_go_back_to_the_run_ends(tmp_path):
    job = recipe(tmp_path, checkpoint={"enable": True, "interval": 100})
    found = run_ranks(train, 1, job, {5, 6, 7})[0]
    assert found.error is not None
    assert "were skipped, with no checkpoint before them to roll back to;" in found.error


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path):
    found = run_ranks(train, 1, recipe(tmp_path), BAD, 0, -1, partial(damage, tmp_path))[0]
    assert [row["step"] for row in rows(tmp_path) if "event" in row] == [3]
    assert (found.state.step, found.state.skipped_samples) == (12, 7 * 8)
    assert (tmp_path / "checkpoint/step-6.damaged").is_dir()
    assert list(saved_steps(tmp_path / "checkpoint")) == [3, 6, 9, 12]


def damage(folder, step):
    """Change a bit of the checkpoint that step 8 would go back to, once."""
    [file] = (folder / "checkpoint").glob("step-6/*.safetensors") if step == 8 else [None]
    if file and not (folder / "checkpoint/step-6.damaged").exists():
        flip(file)


def test_a_rollback_that_is_killed_halfway_is_made_again(tmp_path, whole):
    _, expected = whole
    killed = run_ranks(killed_while_deleting, 1, recipe(tmp_path), BAD)[0]
    assert killed.error == "while deleting"
    found = run_ranks(train, 1, recipe(tmp_path), BAD)[0]
    assert found.state == expected.state
    assert is_same(found.weights, expected.weights)
    assert list(saved_steps(tmp_path / "checkpoint")) == [3, 6, 9, 12]


def killed_while_deleting(job, bad):
    with mock.patch.object(Disk, "delete", side_effect=Killed("while deleting")):
        return train(job, bad)


def test_checkpoints_of_another_past_are_not_gone_back_to(tmp_path):
    every_second = {"enable": True, "interval": 2}
    run_ranks(train, 1, recipe(tmp_path, training={"steps": 8}, checkpoint=every_second), {})
    again = {"enable": True, "interval": 100, "load_step": 4}
    run_ranks(train, 1, recipe(tmp_path, training={"steps": 13}, checkpoint=again), BAD)
    assert [row["step"] for row in rows(tmp_path) if "event" in row] == [4]
    assert list(saved_steps(tmp_path / "checkpoint")) == [2, 4, 6, 8, 13]


def test_a_checkpoint_from_before_there_was_a_history_is_resumed(tmp_path):
    run_ranks(train, 1, recipe(tmp_path, training={"steps": 3}), {})
    checkpoint = tmp_path / "checkpoint/step-3"
    state = read_state(checkpoint, read_manifest(checkpoint))
    for name in ("history", "rollbacks", "skipped_samples"):
        del state["train_state"][name]
    replace_state(checkpoint, state)
    found = run_ranks(train, 1, recipe(tmp_path), {})[0]
    assert found.state.step == 12
    assert [len(past) for past in found.state.history.values()] == [4, 4]

"""A save that fails in an unexpected way, and what a save that has ended still holds."""

import gc
import itertools
import json
import logging
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.reliability.trials import at_call, wait_until
from tests.runs import losses, rows, train
from torchtitan.checkpoint import saved_steps, saver
from torchtitan.checkpoint.placement import on_all_ranks, on_rank_0
from torchtitan.checkpoint.saver import Staging, in_thread
from torchtitan.checkpoint.storage import Piece
from torchtitan.config import ConfigError
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.parallel import CommConfig, Degrees, open_world


class Unsendable(Exception):
    """An error that cannot be pickled."""

    def __init__(self):
        super().__init__("a lock")
        self.generator = (n for n in range(2))


def met(world, rank, error, way):
    """What a rank knows of an error of one rank."""

    def work():
        if world.rank == rank:
            raise error
        return world.rank

    try:
        return str(way(world, work))
    except Exception as error:
        # The ranks are still in step.
        assert world.gather(world.rank) == [0, 1]
        return f"{type(error).__name__}: {error}"


ERRORS = {  # and what other ranks say of it
    Unsendable(): "FailedOnRank: rank {rank} failed: Unsendable: a lock",
    KeyError("name"): "FailedOnRank: rank {rank} failed: KeyError: 'name'",
    ConfigError("wrong"): "ConfigError: wrong",
    OSError("full"): "OSError: full",
}
WAYS = (on_all_ranks, on_rank_0)


def all_met():
    with open_world(Degrees(dp_shard=2), CommConfig(), Device("cpu")) as world:
        cases = itertools.product((0, 1), ERRORS, WAYS)
        return [met(world, rank, error, way) for rank, error, way in cases]


def test_an_error_on_one_rank_is_known_to_all():
    found = zip(*run_ranks(all_met, 2), strict=True)
    for (rank, error, way), each in zip(
        itertools.product((0, 1), ERRORS, WAYS), found, strict=True
    ):
        told = [ERRORS[error].format(rank=rank)] * 2
        told[rank] = f"{type(error).__name__}: {error}"
        if way is on_rank_0 and rank == 1:  # which does not work then
            told = ["0", "0"]
        assert list(each) == told, (rank, error, way)


def recipe(folder, mode="async", **sections):
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode}
    parallelism = {"data_parallel_shard_degree": -1}
    return tiny.job(
        folder, checkpoint=checkpoint, training={"steps": 4}, parallelism=parallelism, **sections
    )


def defective(job, place, rank):
    """Train where a step of a save has a defect on one rank; how this rank ends."""

    with pytest.MonkeyPatch.context() as patch:
        if int(torch.distributed.get_rank()) == rank:
            patch.setattr(saver, place, Mock(side_effect=LookupError("a defect")))
        try:
            train(job)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "went on"


@pytest.mark.gate
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("place", "rank"), [("write_file", 1), ("write_manifest_of", 0), ("problems_of_files", 1)]
)
def test_a_defect_in_a_save_ends_all_ranks(place, rank, mode, tmp_path):
    found = run_ranks(defective, 2, recipe(tmp_path, mode), place, rank)
    assert found[rank] == "LookupError: a defect"
    assert found[1 - rank] == f"FailedOnRank: rank {rank} failed: LookupError: a defect"


def with_a_silent_rank(job, place):
    """Train where rank 1 comes to a stage of the first save once it is given up; what is logged."""
    said = Path(job.job.dump_folder, "said")

    def late(function, *arguments):
        wait_until(lambda: "the save is given up" in said.read_text())
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "PATIENCE", timedelta(seconds=10))
        if torch.distributed.get_rank():
            at_call(place, 1, late)()
        else:
            logger.addHandler(logging.FileHandler(said))
        train(job)
    return said.read_text()


@pytest.mark.gate
@pytest.mark.parametrize(
    ("place", "who"),
    [
        ("torchtitan.checkpoint.saver:write_file", "rank 1 does not respond. The"),
        ("torchtitan.checkpoint.layout:WritePlan.sum_digests", "a rank does not respond: "),
    ],
)
def test_a_rank_that_does_not_respond_ends_the_save_and_neither_the_step_nor_the_next(
    place, who, tmp_path
):
    told, _ = run_ranks(with_a_silent_rank, 2, recipe(tmp_path), place)
    assert f"step 2: the save is given up, as {who}" in told
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert list(saved_steps(tmp_path / "checkpoint")) == [4]


def held_after_saves(job):
    """How many tensors were made for saves, once none is left at the end."""
    made = []
    sending = {"error": torch.ones(1000)}

    def note(function):
        def noted(*arguments, **named):
            tensor = function(*arguments, **named)
            made.append(weakref.ref(tensor))
            return tensor

        return noted

    def look(run):
        gc.collect()
        wait_until(lambda: all(reference() is None for reference in made))
        return len(made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.checkpoint.saver.torch.empty", note(torch.empty))
        patch.setattr(
            "torchtitan.checkpoint.contents.Checkpointable._of_sending",
            lambda _: {f"communication.0.{name}": Noted(t, made) for name, t in sending.items()},
        )
        return train(job, look)


def saved_beside_training(job):
    """Train where the first commit ends in the step after it, and the last one takes a moment."""
    is_next = threading.Event()

    def in_the_next_step(write, *arguments, **named):
        assert is_next.wait(60), "training waits for the commit"
        return write(*arguments, **named)

    def step(function, *arguments):
        is_next.set()
        return function(*arguments)

    def slowly(write, *arguments, **named):
        time.sleep(0.25)
        return write(*arguments, **named)

    at_call("torchtitan.checkpoint.saver:write_manifest_of", 1, in_the_next_step)()
    at_call("torchtitan.checkpoint.saver:write_manifest_of", 2, slowly)()
    at_call("torchtitan.trainer:Trainer.step", 3, step)()
    train(job)


def test_training_does_not_wait_for_the_commit_of_an_asynchronous_save(tmp_path):
    """But for that of the step before, at the next save, and at the end."""
    run_ranks(saved_beside_training, 1, recipe(tmp_path))
    assert list(saved_steps(tmp_path / "checkpoint")) == [2, 4]
    counted = sum(row.get("checkpoint_s", 0.0) for row in rows(tmp_path))
    ends = (tmp_path / "events/rank0.jsonl").read_text().splitlines()
    assert counted + json.loads(ends[-1])["pauses"]["checkpoint"] >= 0.25


class Noted:
    """A tensor whose clones are noted."""

    def __init__(self, tensor, made):
        self.tensor, self.made = tensor, made

    def clone(self):
        clone = self.tensor.clone()
        self.made.append(weakref.ref(clone))
        return clone


def test_a_save_that_has_ended_holds_no_tensors(tmp_path):
    assert run_ranks(held_after_saves, 1, recipe(tmp_path))[0] > 20
    assert list(saved_steps(tmp_path / "checkpoint")) == [2, 4]


@pytest.fixture
def few_objects():
    """The garbage collector does not look at the many objects of other tests."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_copies_are_of_the_moment_and_tensors_are_released_once_copied(few_objects):
    tensor = torch.arange(4.0)
    reference = weakref.ref(tensor)
    piece = Piece("name", tensor.dtype, (8,), (4,), (4,))
    staging = Staging(pinned=False, device=Device("cpu"))
    copies = staging.begin([(piece, tensor)])
    staging.wait()
    del tensor
    gc.collect()
    wait_until(lambda: reference() is None)  # the thread lets go after it has answered
    ((found, copy),) = copies()
    assert found.digest is not None
    assert copy.tolist() == [0, 1, 2, 3]


def test_work_is_released_when_it_has_ended(few_objects):
    held = torch.zeros(1)
    reference = weakref.ref(held)
    task = in_thread(lambda held=held: held.numel())
    task.wait()
    del held
    gc.collect()
    assert task.get() == 1
    wait_until(lambda: reference() is None)

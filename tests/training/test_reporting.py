"""What reporting does to a run: it waits for nothing, ends nothing, and goes on after a kill."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, rows, running, train, train_from_scratch, train_until_killed
from tests.wandb_files import offline_run
from torchtitan import build as assembly
from torchtitan.device import Device

pytestmark = pytest.mark.usefixtures("offline")
ALL_SINKS = {"enable_tensorboard": True, "enable_wandb": True}


class Waits(TorchDispatchMode):
    """Counts what would wait for a device, if the tensors were on one, by step."""

    WORDS = ("tolist", "numpy", "cpu")

    def __init__(self):
        super().__init__()
        self.step, self.found = 0, Counter[int]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Behind `item`, and behind the truth, the int and the float of a tensor.
        if function is torch.ops.aten._local_scalar_dense.default:
            self.found[self.step] += 1
        return function(*args, **(kwargs or {}))

    def counting(self, function):
        def counted(*args, **kwargs):
            self.found[self.step] += 1
            return function(*args, **kwargs)

        return counted

    def begin(self, step):
        self.step = step


def waits_by_step(job):
    """Train; what waited in each step, up to the beginning of the next."""
    waits = Waits()
    with pytest.MonkeyPatch.context() as patch:
        # The text of the first sequence is shown on the host.
        patch.setattr(assembly, "previewed", lambda batches, *about: batches)
        with running(job, before_step=waits.begin) as run:
            for owner, word in [*((Tensor, w) for w in Waits.WORDS), (Device, "synchronize")]:
                patch.setattr(owner, word, waits.counting(getattr(owner, word)))
            with waits:
                train_from_scratch(run)
    return dict(waits.found)


@pytest.mark.parametrize(
    ("ranks", "sinks"),
    [(2, {"enable_tensorboard": True}), pytest.param(1, ALL_SINKS, marks=pytest.mark.gate)],
)
def test_only_a_step_that_is_reported_waits_more_than_once(ranks, sinks, tmp_path):
    job = tiny.job(tmp_path, training={"steps": 8}, metrics={"log_freq": 3, **sinks})
    for found in run_ranks(waits_by_step, ranks, job):
        # A step waits once, for its verdict. A report waits once for its values and, where there
        # are several ranks, once for their times, which are known only then.
        reported = 1 + ranks
        expected = {step: reported if step in (1, 3, 6, 8) else 1 for step in range(1, 9)}
        # The ledger of the data has the position before the first step and after the last.
        found[8] -= found.pop(0)
        assert found == expected


@pytest.mark.gate
def test_curves_of_a_run_that_was_killed_go_on_in_every_sink(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = tiny.job(
        tmp_path / "run",
        training={"steps": 7},
        checkpoint={"enable": True, "interval": 3},
        metrics={"log_freq": 1, **ALL_SINKS},
    )
    with pytest.raises(AssertionError):
        run_ranks(train_until_killed, 1, job, 6)  # steps 4 and 5 are reported, but not saved
    before = losses(tmp_path / "run")
    run_ranks(train, 1, job)

    curve = losses(tmp_path / "run")
    assert list(before) == [1, 2, 3, 4, 5]
    assert list(curve) == [1, 2, 3, 4, 5, 6, 7]
    board = EventAccumulator(str(tmp_path / "run/tb"))
    board.Reload()
    # Seconds, unlike losses, are not the same when a step is done again.
    for key in ("loss", "step_time"):
        newest = {row["step"]: row[key] for row in rows(tmp_path / "run") if key in row}
        points = [(event.step, event.value) for event in board.Scalars(key)]
        assert points == [(step, pytest.approx(value)) for step, value in newest.items()]

    # Of the process that was killed W&B may have written nothing yet; the id was noted before.
    run_id = (tmp_path / "run/wandb_run_id").read_text().strip()
    folders = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert [folder.name.split("-")[3] for folder in folders] == [run_id, run_id]
    record, later = offline_run(folders[1])
    assert record.resume
    assert later == [(step, curve[step]) for step in (4, 5, 6, 7)]


def with_broken_sinks(job):
    """Train with two sinks that fail; the summary."""

    class Unopened:
        def __init__(self, error):
            self.error = error

        def open(self, start_step):
            raise self.error

        def write(self, step, metrics): ...

        def close(self, summary):
            raise self.error

    class Full(Unopened):
        def open(self, start_step): ...

        def write(self, step, metrics):
            if step == 2:
                raise self.error

    with running(job) as run:
        if dist.get_rank() == 0:
            broken = Unopened(ConnectionError("no route")), Full(OSError(28, "No space left"))
            run.meter.sinks = [*broken, *run.meter.sinks]
        train_from_scratch(run)
        return run.meter.summary()


def with_broken_sinks_and_without(broken, whole):
    summary = with_broken_sinks(broken)
    train(whole)
    return summary


def test_sinks_that_fail_on_one_rank_change_nothing_of_the_run(tmp_path):
    jobs = tiny.job(tmp_path / "broken"), tiny.job(tmp_path / "whole")
    summaries = run_ranks(with_broken_sinks_and_without, 2, *jobs)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert summaries[0]["failed_sinks"] == (
        "Unopened (at step 0: ConnectionError: no route), "
        "Full (at step 2: OSError: [Errno 28] No space left)"
    )
    assert summaries[1]["failed_sinks"] is None

"""What a step does when something is wrong, and what it must not depend on."""

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import each, losses, rows, running, trace, train, train_from_scratch, weights
from torchtitan.checkpoint import ResumePoint, saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.convert import MXFP8
from torchtitan.optim.parameters import local
from torchtitan.resilience.divergence import TrainingDiverged
from torchtitan.tools.verify.measure import RowSink
from torchtitan.trainer import Trainer
from torchtitan.validate import Validator


def with_spoiled_gradients(job, bad_steps):
    """Train, making one gradient of one rank infinite at some steps: {step: rank}."""
    recorder, moved, error = RowSink(), [], None
    with running(job, sinks=[recorder]) as run:
        trainer = Trainer(run)
        norm, step = run.optimizers.norm, trainer.step

        def spoiled():
            if bad_steps.get(run.state.step + 1) == dist.get_rank():
                local(next(iter(run.optimizers.inner.names)).grad).view(-1)[0] = torch.inf
            return norm()

        def watched():
            before = weights(run)
            step()
            moved.append(any(not torch.equal(w, before[n]) for n, w in weights(run).items()))

        run.optimizers.norm, trainer.step = spoiled, watched
        try:
            trainer.train(ResumePoint(None))
        except TrainingDiverged as diverged:
            error = str(diverged)
        return {"rows": recorder.rows, "moved": moved, "error": error, "state": run.state}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks):
    job = tiny.job(training={"steps": 3})
    for found in run_ranks(with_spoiled_gradients, ranks, job, {2: ranks - 1}):
        assert found["moved"] == [True, False, True]
        assert [row["skipped"] for row in found["rows"]] == [0, 1, 0]
        assert found["state"].skipped == 1
        assert found["state"].consecutive_skips == 0
        assert found["error"] is None


def test_too_many_in_a_row_end_the_run_with_what_was_trained_saved(tmp_path):
    bad = {3: 0, 5: 0, 6: 1, 7: 0}
    job = tiny.job(
        tmp_path,
        training={"steps": 9, "max_skipped_steps": 3},
        checkpoint={"enable": True, "interval": 100},
    )
    for found in run_ranks(with_spoiled_gradients, 2, job, bad):
        assert found["moved"] == [True, True, False, True, False, False, False]
        assert "step 7" in found["error"]
        assert "3 steps in a row (training.max_skipped_steps)" in found["error"]
    assert list(saved_steps(tmp_path / "checkpoint")) == [7]


def stopped_by_signal(job, number, at_step, rank):
    """Train; one rank gets a signal in the middle of a step."""

    def interrupt(step):
        if step == at_step and dist.get_rank() == rank:
            os.kill(os.getpid(), number)

    with running(job, before_step=interrupt) as run:
        train_from_scratch(run)


def stopped_and_resumed(job, whole, number, rank):
    """Train until a signal comes in the second step, then to the end; and in one go."""
    stopped_by_signal(job, number, 2, rank)
    folder = Path(job.job.dump_folder) / "checkpoint"
    assert list(saved_steps(folder)) == [2]
    assert not read_manifest(folder / "step-2").model_only, "it is not finished"
    train(job)
    assert read_manifest(folder / "step-4").model_only
    train(whole)


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (1, signal.SIGINT),
        (2, signal.SIGTERM),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.gate),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.gate),
    ],
)
def test_a_signal_to_one_rank_ends_all_after_the_step_with_a_checkpoint(ranks, number, tmp_path):
    """One to resume from, although of a run that is finished only the weights are saved."""
    checkpoint = {"enable": True, "interval": 100, "last_save_model_only": True}
    settings = {"checkpoint": checkpoint, "training": {"steps": 4}}
    jobs = [tiny.job(tmp_path / name, **settings) for name in ("stopped", "whole")]
    run_ranks(stopped_and_resumed, ranks, *jobs, number, ranks - 1)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "whole")) == [1, 2, 3, 4]


def test_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(tiny.job(tmp_path, training={"steps": 1}))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_each_validation_reads_the_same_batches(tmp_path):
    frozen = {"name": "SGD", "lr": 1e-30, "weight_decay": 0.0}
    validation = {"enable": True, "freq": 1, "steps": 2}
    job = tiny.job(tmp_path, validation=validation, optimizer=frozen, training={"steps": 3})
    run_ranks(train, 2, job)
    found = [row["validation_loss"] for row in rows(tmp_path) if "validation_loss" in row]
    assert len(found) == 3
    assert len(set(found)) == 1


def test_checkpoint_is_on_disk_before_validation_begins(tmp_path):
    job = tiny.job(
        tmp_path,
        validation={"enable": True, "freq": 2},
        checkpoint={"enable": True, "interval": 2},
        training={"steps": 2},
    )
    run_ranks(failing_validation, 1, job)
    assert list(saved_steps(tmp_path / "checkpoint")) == [2]


def failing_validation(job):
    Validator.run = Mock(side_effect=MemoryError)  # in this forked process alone
    with running(job) as run, pytest.raises(MemoryError):
        train_from_scratch(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixed_precision_keeps_float32_masters_and_stays_near(ranks):
    exact = run_ranks(trace, 1, tiny.job())[0]
    mixed = run_ranks(trace, ranks, tiny.job(training={"mixed_precision_param": "bfloat16"}))[0]
    assert all(weight.local.dtype == torch.float32 for weight in mixed.weights[-1].values())
    assert mixed.losses != exact.losses
    assert mixed.losses == pytest.approx(exact.losses, rel=1e-2)


# torch's tracer looks at the gradient of an intermediate result.
@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"activation_checkpoint": {"mode": "full"}}, marks=pytest.mark.gate),
        {"compile": {"enable": True, "backend": "aot_eager", "granularity": "model"}},
    ],
)
def test_one_rank_casts_what_fsdp_would_have_gathered(sections):
    """To the bit; FSDP2 over one rank is still what brings parameters from host memory."""
    mixed = {"mixed_precision_param": "bfloat16"}
    hosted = tiny.job(training=mixed | {"enable_cpu_offload": True})
    jobs = [tiny.job(training=mixed, **sections), hosted]
    found, expected = run_ranks(each, 1, trace, jobs)[0]
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    for name, part in found.weights[-1].items():
        assert torch.equal(part.local, expected.weights[-1][name].local), name


def test_a_technique_that_is_off_is_in_no_step():
    half = {"mixed_precision_param": "bfloat16"}
    even = tiny.job(model={"flavor": "even"})
    converted = even.model_copy(update={"convert": (MXFP8(emulate=True),)})
    jobs = [tiny.job(), tiny.job(training=half), converted]
    assert [run_ranks(calls_around_passes, 1, job) for job in jobs] == [[0], [0], [1]]


def calls_around_passes(job):
    with running(job) as run:
        model = run.model
        calls = [*model.before_forward, *model.before_pass, *model.complete_gradients]
        return len([*calls, *model.after_backward])


@pytest.mark.parametrize("ranks", [1, 2])
def test_full_bfloat16(ranks):
    settings = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
    found = run_ranks(trace, ranks, tiny.job(training=settings))[0]
    assert all(weight.local.dtype == torch.bfloat16 for weight in found.weights[-1].values())
    assert found.losses[-1] < found.losses[0]


def test_deterministic_mode_is_set_and_repeats(tmp_path):
    debug = {"deterministic": True}
    first = run_ranks(deterministic_trace, 1, tiny.job(debug=debug))[0]
    second = run_ranks(deterministic_trace, 1, tiny.job(debug=debug))[0]
    assert first == second
    assert first[0] is True


def deterministic_trace(job):
    found = trace(job)
    return torch.are_deterministic_algorithms_enabled(), found.losses

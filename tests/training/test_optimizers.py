"""Optimizer states in host memory, and steps in the backward, in whole runs: saved, ended."""

import math
import statistics
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.layouts import case
from tests.ranks import run_ranks
from tests.reliability.trials import copy_late
from tests.runs import train, world_of
from torchtitan.build import build
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.device import Device
from torchtitan.resilience.divergence import TrainingDiverged
from torchtitan.resilience.replica_groups import InMemoryState
from torchtitan.tools.verify.measure import training
from torchtitan.trainer import Trainer

DEBUG_MODEL = Path(__file__).parents[2] / "train_configs/debug_model.toml"
ALONE = case(batch=8)
FSDP = case(shard=2)


def recipe(folder, layout, steps=4, **sections):
    """Saved at step 2 and at the end."""
    defaults = {
        "model": {"flavor": "square"},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 4},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"enable": True, "interval": 2, "async_mode": "async"},
    }
    return tiny.job(folder, **layout.recipe(**tiny.merged(defaults, sections)))


def eager(job):
    torch.compiler.set_stance("force_eager")
    return train(job)


def in_memory(run):
    """The state of a run, to be handed over."""
    return InMemoryState(run.checkpoint.contents, run.checkpoint.wait_staging)


def handed_over(job):
    """Whether a run that takes over another's live state goes on as that does."""
    torch.compiler.set_stance("force_eager")
    with world_of(job) as world:
        one, other = build(job, world), build(job, world)
        with closing(one.batches), closing(other.batches), one.meter, other.meter:
            Trainer(one).step()
            in_memory(other).put(in_memory(one).get())
            for run in (one, other):
                Trainer(run).step()
        pairs = zip(one.model.parts[0].parameters(), other.model.parts[0].parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def test_another_replica_group_takes_the_state_over(tmp_path):
    assert run_ranks(handed_over, 1, recipe(tmp_path, ALONE)) == [True]


EARLY = {"early_step_in_backward": True}
UNCLIPPED = {"max_norm": 0.0}


def ended(job):
    """What the run says at its end, and the steps it has saved."""
    with pytest.raises(TrainingDiverged) as error:
        train(job)
    folder = Path(job.job.dump_folder) / job.checkpoint.folder
    return str(error.value), sorted(saved_steps(folder))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_a_run_whose_update_is_made(ranks, tmp_path):
    job = recipe(
        tmp_path,
        case(shard=ranks, batch=8 // ranks),
        optimizer=EARLY | {"lr": 1e30},
        training=UNCLIPPED | {"steps": 4},
        checkpoint={"interval": 1},
    )
    for said, steps in run_ranks(ended, ranks, job):
        assert said.startswith("step 2: the loss or gradient norm is not finite, which with ")
        assert "the last checkpoint is step-1" in said
        assert steps == [1]


def copied_late(job):
    copy_late()
    return train(job)


def test_no_weight_changes_while_it_is_copied(tmp_path):
    for mode in ("disabled", "async"):
        job = recipe(
            tmp_path / mode,
            ALONE,
            optimizer=EARLY,
            training=UNCLIPPED | {"steps": 3},
            checkpoint={"interval": 1, "async_mode": mode},
        )
        run_ranks(copied_late, 1, job)
    for step in (1, 2, 3):
        found, expected = (
            SavedTensors(tmp_path / mode / "checkpoint" / f"step-{step}")
            for mode in ("async", "disabled")
        )
        for name, (_, shape) in expected.shapes().items():
            blocks = (saved.read(name, [0] * len(shape), shape) for saved in (found, expected))
            assert torch.equal(*blocks), f"step {step}: {name}"


def losses_of(job):
    return [row["loss"] for _, row in training(job, Device("cpu"), uneven=False)]


@pytest.mark.slow
def test_a_rate_and_nothing_else_trains_the_debug_model():
    a_rate_trains_the_debug_model("Muon")


def a_rate_trains_the_debug_model(name):
    """From about the loss of guessing evenly among all 2,048 tokens."""
    flags = [
        *("--training.steps=8", "--training.seq_len=64", "--training.global_batch_size=2"),
        *("--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq=1"),
        *("--lr_scheduler.warmup_steps=2", "--data.report_unigram_loss=false"),
        *(f"--optimizer.name={name}", "--optimizer.lr=1e-3"),
    ]
    (found,) = run_ranks(losses_of, 1, load_job(DEBUG_MODEL, flags, 1, "cpu").config)
    assert found[0] == pytest.approx(math.log(2048), rel=0.05)
    assert statistics.fmean(found[-3:]) < found[0] - 0.8

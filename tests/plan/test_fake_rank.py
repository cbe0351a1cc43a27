"""Recordings of fake ranks, and what they leave behind."""

import sys

import pytest
import torch

from tests import layouts
from tests.parallel.test_parity import is_the_run_of_one_rank
from tests.ranks import run_ranks
from torchtitan.optim import GradientNorm, Muon, Optimizers
from torchtitan.plan.fake_rank import ASSUMED, record


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch for CUDA cannot fork after a backward"
)
def test_ranks_that_follow_a_recording_are_not_changed_by_it():
    layout = layouts.LAYOUTS["TP 2"].of(n_layers=1)
    for rank in range(2):
        record(layouts.job(layout, "AdamW"), 2, rank)
    is_the_run_of_one_rank(layout, "cpu")


def recorded(name, rank=0, **sections):
    """A rank of a layout with one block in each stage."""
    layout = layouts.LAYOUTS[name]
    job = layouts.job(layout.of(n_layers=layout.pp), "AdamW")
    return record(job.model_copy(update=sections), layout.ranks, rank)


def test_a_recording_leaves_the_words_of_errors_as_they_are():
    before = sys.excepthook
    recorded("DDP 2")
    assert sys.excepthook is before


def test_a_process_of_a_run_cannot_record():
    with pytest.raises(AssertionError, match="is in a process group cannot record fake ranks"):
        run_ranks(recorded, 1, "DDP 2")


def test_reads_of_values_are_answered_with_a_note(monkeypatch):
    name = "HSDP 2 x 2, Float8 tensorwise, gathered so, scaled before"
    assert ASSUMED not in recorded(name).notes

    def norm(optimizers):
        square = torch.ones(1) * float(next(iter(optimizers.names)).detach().sum())
        return GradientNorm(square, is_split=False)

    monkeypatch.setattr(Optimizers, "norm", norm)
    assert ASSUMED in recorded("DDP 2").notes


@pytest.mark.gate
def test_updates_of_whole_matrices_are_recorded_on_any_mesh():
    """A pipeline rank has a part of the ranks, so a group of its mesh is created.

    Recorded before are ranks whose meshes are the same relative to them.
    """
    for name, rank in (("FSDP 2 x TP 2", 1), ("FSDP 2 x TP 2 x PP 2", 5)):
        found = recorded(name, rank, optimizer=Muon(lr=0.01))
    [name] = [name for name, axis in found.axes.items() if axis == "matrices"]
    assert found.members[name] == [4, 5, 6, 7]
    assert found.notes == []

"""Every shipped recipe states the hardware that it is meant for, and fits it."""

from pathlib import Path

import pytest
import torch

from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.checks.limits import model_states
from torchtitan.config import CannotRun
from torchtitan.device import GIB
from torchtitan.plan.fitting import peak_of
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import plan

FOLDER = Path(__file__).parents[2] / "train_configs"
RECIPES = sorted(p for part in ("", "mixtures/", "research/") for p in FOLDER.glob(f"{part}*.toml"))
every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
LEAST_ROOM = 0.05
"""Fraction of the memory of a device that a recipe leaves."""


def load(path, ranks):
    """Load a recipe, without the files that a user brings."""
    try:
        return load_job(path, [], ranks, "cuda").config
    except CannotRun as error:
        return error.config


@every_recipe
def test_states_its_hardware(path):
    job = load(path, None)
    assert job.job.ranks is not None
    assert job.job.ranks >= job.parallelism.least_ranks
    assert find_hardware(job.job.hardware).memory_gib > 0


GATE = [path for path in RECIPES if path.stem in ("llama3_70b", "qwen3_0.6b", "galore_7b")]
"""The others differ from these in sizes or in what is tested elsewhere."""


@pytest.mark.parametrize("path", tiers(RECIPES, [], gate=GATE), ids=lambda path: path.stem)
def test_fits_its_hardware(path):
    stated = load(path, None).job
    assert stated.ranks is not None
    torch._dynamo.reset()
    job = load(path, stated.ranks)
    planned = plan(job, stated.ranks, find_hardware(stated.hardware))
    assert planned.capacity_gib is not None
    assert planned.room_gib is not None
    assert planned.room_gib > LEAST_ROOM * planned.capacity_gib
    assert model_states(job, stated.ranks).device < peak_of(planned).device


SHORT_671B = "--model.name deepseek_v3 --model.flavor 671B --model.n_layers 4 "
SHORT_671B += "--parallelism.expert_parallel_degree 8 --training.local_batch_size 1 "
SHORT_671B += "--training.seq_len 4096"


@pytest.mark.gate
def test_a_layer_of_671b_fits_a_rank_with_an_eighth_of_its_experts():
    """After the three that have none; weights, gradients and Adam's state are 16 bytes each."""
    job = load_job(None, SHORT_671B.split(), 8, "cuda").config
    planned = plan(job, 8, find_hardware("h100"))
    assert planned.fits
    assert 16 * 32 * 3 * 7168 * 2048 / GIB < peak_of(planned).device < 80e9 / GIB

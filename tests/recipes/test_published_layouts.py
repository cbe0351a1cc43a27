"""No recipe is shipped that cannot start: each takes a step on as many ranks as it is meant for.

The process group is torch's fake one, which has one rank and says that there are the others, and
tensors have shapes and no values; all else is what a run does: the layout is built, and forward,
backward, clipping and the optimizer run on this rank's part. Blocks are not compiled, which would
need values. A pipeline gets as few microbatches as its schedule allows.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.many import leave_out_the_vote
from tests.ranks import run_ranks
from tests.recipes.test_recipes import FOLDER, RANKS
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.device import Device
from torchtitan.models import MODELS
from torchtitan.optim import Optimizers, name_parameters
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.world import make_world
from torchtitan.parts import allocate, lay_out
from torchtitan.tasks.next_token import TokenBatch
from torchtitan.timeline import Timeline

# A rank of each kind: the first, and in a pipeline the last too.
SLOW = [("llama3_70b", 0), ("llama3_405b", 511)]
CASES = [(name, 0) for name in RANKS if name not in ("debug_model", "llama3_70b")] + SLOW


def step(path: Path, ranks: int, rank: int) -> dict[str, int]:
    """A step on fake ranks; what there was to see."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    flags = ["--model.tokenizer_path", "none", "--compile.enable", "false"]
    job = load_job(path, flags, ranks, "cpu").config
    degrees = job.degrees(ranks)
    if degrees.pp > 1:
        flags += ["--training.local_batch_size", str(degrees.pp)]
        job = load_job(path, flags, ranks, "cpu").config

    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    world = make_world(degrees, job.comm, Device("cpu"), dist.group.WORLD)
    model = lay_out(job, world, Timeline(world.device))
    if isinstance(model.executor, Pipeline):
        leave_out_the_vote(model.executor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate(model, job, world)
        parameters = name_parameters(model.parts, MODELS[job.model.name].role)
        optimizers = Optimizers(parameters, job.optimizer, world.groups["pp"])
        shape = job.training.local_batch_size, job.training.seq_len
        batch = TokenBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))
        loss = model.forward_backward([batch, batch], torch.tensor(1.0))["loss"]
        gradients = sum(p.grad is not None for p in optimizers.names)
        norm = optimizers.clip(job.training.max_norm)
        optimizers.step()
    assert loss.shape == norm.shape == ()
    return {
        "parameters": sum(p.numel() for p in optimizers.names),
        "own": sum(p.to_local().numel() for p in optimizers.names),
        "tensors": len(optimizers.names),
        "gradients": gradients,
        "stages": len(model.parts),
    }


@pytest.mark.parametrize(("name", "rank"), tiers(CASES, [("llama3_8b", 0)], SLOW))
def test_recipe_takes_a_step_at_its_real_size(name: str, rank: int) -> None:
    ranks = RANKS[name]
    (seen,) = run_ranks(step, 1, FOLDER / f"{name}.toml", ranks, rank)
    job = load_job(FOLDER / f"{name}.toml", ["--model.tokenizer_path", "none"], ranks, "cpu").config
    degrees = job.degrees(ranks)
    assert seen["gradients"] == seen["tensors"] > 0
    assert seen["stages"] == (2 if degrees.pp > 1 else 1)
    # Each rank owns its share: a stage's parameters, split over the fsdp and the tensor ranks
    # (norms are whole on the tensor ranks, hence about).
    share = seen["parameters"] / (degrees.fsdp * degrees.tp)
    assert share <= seen["own"] <= 1.01 * share

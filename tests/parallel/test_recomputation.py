"""Recomputing by operator does not repeat what ranks wait for each other in."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import layouts, tiny
from tests.ranks import run_ranks
from tests.runs import Operators, trace
from tests.tiers import tiers
from torchtitan.models.llama3 import LLAMA3
from torchtitan.parallel import ActivationCheckpointConfig, activation_checkpoint, context, tensor

ARGS, LENGTH = tiny.FLAVORS["deep"], 32
ATTENTION = "torchtitan.context_attention.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"


def in_backward(axis, mode):
    """What the backward of the tiny model computes on 2 ranks of an axis."""
    model = LLAMA3.build(ARGS, LENGTH)
    if axis == "cp":
        context.apply(model, dist.group.WORLD, "allgather", "headtail")
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = LLAMA3.tensor_plan
        tensor.apply(model, plan, mesh, sequence_parallel=True, loss_parallel=True)
    blocks = LLAMA3.blocks(model)
    config = ActivationCheckpointConfig.model_validate({"mode": mode, "selective_ac_option": "op"})
    activation_checkpoint.apply(blocks, list(blocks), config)
    loss = model(torch.zeros(2, LENGTH // (2 if axis == "cp" else 1), dtype=torch.int64)).sum()
    with Operators() as backward:
        loss.backward()
    return backward.counts


@pytest.mark.parametrize(
    ("axis", "operator"), tiers([("cp", ATTENTION), ("tp", SCATTER)], [("cp", ATTENTION)])
)
def test_what_ranks_wait_for_is_kept(axis, operator):
    none, full, selective = (
        run_ranks(in_backward, 2, axis, mode)[0][operator] for mode in ("none", "full", "selective")
    )
    assert full == none + ARGS.n_layers
    assert selective == none


def computed_in_a_step(mode):
    """How often a rank of a pipeline that splits its backward computes attention."""
    sections = {"parallelism": layouts.ZBV, "activation_checkpoint": {"mode": mode}}
    case = layouts.Case(pp=2, sections=sections).of(n_layers=4)
    with Operators() as step:
        trace(layouts.job(case, "SGD", training={"steps": 1, "local_batch_size": 2}))
    return step.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]


def test_a_split_backward_recomputes_a_block_once_for_inputs_and_once_for_weights():
    none, full = (run_ranks(computed_in_a_step, 2, mode) for mode in ("none", "full"))
    # Rank 0 has the first stage, whose inputs need no gradients: its backward is not split.
    assert full == [none[0] * 5 / 2, none[1] * 3], none

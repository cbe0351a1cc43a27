"""What is kept for the backward, in bytes, and what is computed twice."""

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests import tiny
from tests.runs import Operators
from tests.tiers import tiers
from tests.unit.models import families
from torchtitan.checks.execution import recomputation
from torchtitan.config import PlannedWorld
from torchtitan.models import MODELS
from torchtitan.models.llama3 import LLAMA3
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    compile,
)
from torchtitan.parallel.activation_checkpoint import apply

LENGTH = 32
BLOCKS = [f"layers.{number}" for number in range(11)]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
DOCUMENTS = "torchtitan.document_attention.default"


def config(mode, **options):
    return ActivationCheckpointConfig.model_validate({"mode": mode, **options})


@pytest.fixture
def budget_restored():
    """The budget is a setting of the whole process."""
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield


class Doubling(nn.Module):
    """A block that says how often it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def forward(self, x):
        self.asked += 1
        return (x * 2).sin()


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 9], [2, 5, 8], list(range(1, 11))])
@pytest.mark.parametrize(
    ("chosen", "every"),
    [
        (config("none"), []),
        (config("memory_budget"), []),
        (config("full"), BLOCKS),
        (config("selective", selective_ac_option=1), BLOCKS),
        (config("selective", selective_ac_option=2), BLOCKS[::2]),
        (config("selective", selective_ac_option=3), BLOCKS[::3]),
        (config("selective", selective_ac_option=50), BLOCKS[:1]),
    ],
)
def test_the_same_blocks_recompute_however_a_model_is_cut(chosen, every, cuts, budget_restored):
    model = {name: Doubling() for name in BLOCKS}
    said = []
    for start, stop in zip([0, *cuts], [*cuts, len(BLOCKS)], strict=True):
        stage = {name: model[name] for name in BLOCKS[start:stop]}
        said += apply(stage, BLOCKS, chosen)
    x = torch.ones(3, requires_grad=True)
    for block in model.values():
        x = block(x)
    x.sum().backward()
    twice = [name for name, block in model.items() if block.asked == 2]
    assert twice == said == every


def block_and_inputs():
    model = LLAMA3.build(tiny.FLAVORS["wide"], LENGTH)
    x = torch.randn(2, LENGTH, 64, requires_grad=True)
    return LLAMA3.blocks(model)["layers.0"], (x, torch.arange(LENGTH)[None], None)


@pytest.mark.parametrize(
    ("chosen", "products", "attention"),
    [
        (config("none"), 0, 0),
        # Of wq, wk, wv, wo, w1, w3 and w2: no gradient needs what the last one gave.
        (config("full"), 6, 1),
        (config("selective", selective_ac_option="op"), 3, 0),
    ],
)
def test_what_the_backward_computes_again(chosen, products, attention):
    block, (x, positions, _) = block_and_inputs()
    apply({"layers.0": block}, ["layers.0"], chosen)
    documents = torch.arange(LENGTH).expand(2, -1) // 10
    for mask, operator in ((None, ATTENTION), (documents, DOCUMENTS)):
        loss = block(x, positions, mask).sum()
        with Operators() as backward:
            loss.backward()
        assert backward.counts["aten.mm.default"] == 14 + products
        assert backward.counts[operator] == attention


@pytest.mark.costs("compiles")
@pytest.mark.parametrize("is_compiled", tiers([False, True], [False], gate=[True]))
@pytest.mark.parametrize("option", [1, "op"])
def test_experts_are_not_chosen_again(option, is_compiled):
    block = families.drawn(MODELS["tiny_sparse"], tiny.SPARSE["flat"], LENGTH).double().layers["1"]
    chosen = config("selective", selective_ac_option=option)
    apply({"layers.1": block}, ["layers.1"], chosen, is_compiled=is_compiled)
    if is_compiled:
        compile.apply([block], CompileConfig(enable=True, backend="aot_eager"))
    loss = block(torch.randn(2, LENGTH, 32).double(), torch.arange(LENGTH)[None], None).sum()
    with Operators() as backward:
        loss.backward()
    assert backward.counts["torchtitan.expert_gradients.default"] == 3
    assert backward.counts["torchtitan.choose_experts.default"] == 0


def kept(block, inputs):
    """Bytes kept for the backward beside the parameters, and the gradient of the first input."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(*inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0])
    return sum(sizes.values()), gradient


def test_a_smaller_budget_keeps_less(budget_restored):
    block, inputs = block_and_inputs()
    eager, expected = kept(block, inputs)
    forward, sizes = block.forward, []
    for budget in (1.0, 0.5, 0.2, 0.0):
        torch.compiler.reset()
        block.forward = forward
        assert not apply({"b": block}, ["b"], config("memory_budget", memory_budget=budget))
        compile.apply([block], CompileConfig(enable=True, backend="aot_eager"))
        size, gradient = kept(block, inputs)
        torch.testing.assert_close(gradient, expected)
        sizes.append(size)
    whole, half, fifth, none = sizes
    assert eager > whole > half > fifth > none
    # What is kept cannot be divided at will, and inputs are always there.
    assert half < 0.65 * whole
    assert fifth < 0.35 * whole
    assert none < 0.15 * whole


COMPILED = CompileConfig(enable=True)
ON_TP = ParallelismConfig(tensor_parallel_degree=2)
ON_CP = ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2)


def problems(chosen, compile, parallelism, device):
    """What the rule says; on no machine in particular if `device` is None."""
    sections = {"activation_checkpoint": chosen, "compile": compile, "parallelism": parallelism}
    world = PlannedWorld(device_type=device or "cpu", is_here=device is not None)
    return list(recomputation(tiny.job().model_copy(update=sections), world))


@pytest.mark.parametrize("mesh_is_input", [False, True])
@pytest.mark.parametrize(
    ("chosen", "parallelism", "device", "is_refused"),
    [
        (config("full"), ON_TP, "cpu", True),
        (config("selective", selective_ac_option=2), ON_TP, "cpu", True),
        (config("selective", selective_ac_option="op"), ON_TP, "cpu", False),
        (config("memory_budget"), ON_TP, "cpu", False),
        (config("none"), ON_TP, "cpu", False),
        (config("full"), ON_CP, "cpu", False),
        (config("full"), ParallelismConfig(), "cpu", False),
        (config("full"), ON_TP, "cuda", False),
        (config("full"), ON_TP, None, False),
    ],
)
def test_recomputed_attention_on_a_mesh(
    chosen, parallelism, device, is_refused, mesh_is_input, monkeypatch
):
    name = "_register_distributed_opaque_types"
    if mesh_is_input:
        monkeypatch.setattr(torch.distributed.device_mesh, name, None, raising=False)
    else:
        monkeypatch.delattr(torch.distributed.device_mesh, name, raising=False)
    found = problems(chosen, COMPILED, parallelism, device)
    assert bool(found) == (is_refused and mesh_is_input)
    uncompiled = problems(chosen, CompileConfig(), parallelism, device)
    assert not uncompiled or chosen.mode == "memory_budget"

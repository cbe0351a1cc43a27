"""Compiled functions in a recording, against the compiler's own choices."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tests import tiny
from tests.tiers import tiers
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import activation_checkpoint
from torchtitan.plan.compiled import SharedGraphs, places_taken
from torchtitan.plan.expansion import expand
from torchtitan.plan.fake_rank import record
from torchtitan.plan.fusion import FusedGraph, size_of
from torchtitan.plan.recording import Change, Mark
from torchtitan.torch_private.compiler import compilations, compiler_counts

COMPILE = {"enable": True, "components": ["model"]}


def recorded(ranks=1, shorten=True, rank=0, graphs=None, **sections):
    training = {**tiny.SECTIONS["training"], "global_batch_size": 2}
    job = tiny.job(**({"training": training, "compile": COMPILE} | sections))
    return record(job, ranks, rank, device_type="cuda", shorten=shorten, graphs=graphs)


@pytest.mark.gate
def test_recordings_share_the_graphs_of_equal_blocks():
    def events(found):
        return [each for each in found.recording.events if not isinstance(each, Mark)]

    parallel = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    one = partial(recorded, 4, parallelism=parallel)
    with SharedGraphs() as graphs:
        before = compiler_counts()["stats"]["unique_graphs"]
        found, counts = [], []
        for rank in (0, 2, 0, 2):
            found.append(one(rank=rank, graphs=graphs))
            counts.append(compiler_counts()["stats"]["unique_graphs"] - before)
    assert counts[0] > 0
    assert counts[1] == counts[3]
    assert compiler_counts()["stats"]["unique_graphs"] == before
    assert events(found[0]) == events(found[2]) == events(one())
    assert events(found[1]) == events(found[3]) == events(one(rank=2))


def kept(found, block):
    """The bytes that a block's forward leaves."""
    total, inside = 0, False
    for event in found.recording.events:
        if isinstance(event, Mark):
            inside = event.name == f"forward of {block}"
        elif inside and isinstance(event, Change):
            total += event.bytes
    return total


def kept_by_the_compiler(recompute):
    """The bytes that a compiled block of real tensors keeps, its output included."""
    job = tiny.job(activation_checkpoint=recompute)
    spec, args = MODELS["tiny"], job.model_args()
    model = build_empty(spec.build, args, 32).to_empty(device="cpu")
    model.init_buffers()
    block = spec.blocks(model)["layers.1"]
    activation_checkpoint.apply({"layers.1": block}, ["layers.1"], job.activation_checkpoint)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    x = torch.randn(2, 32, args.dim, requires_grad=True)
    positions = torch.arange(32).expand(2, 32)
    found = dict[int, int]()

    def note(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        note(torch.compile(block.forward, backend=backend)(x, positions, None))
    for given in (x, positions, *model.parameters(), *model.buffers()):
        found.pop(given.untyped_storage().data_ptr(), None)
    # Of the CPU's generator, to recompute attention; that of CUDA is small.
    state = torch.get_rng_state().nbytes
    return sum(size for size in found.values() if size != state)


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"mode": "none"}, marks=pytest.mark.gate),
        pytest.param({"mode": "full"}, marks=pytest.mark.gate),
        {"mode": "selective", "selective_ac_option": "op"},
        pytest.param({"mode": "memory_budget", "memory_budget": 0.3}, marks=pytest.mark.gate),
    ],
    ids=lambda each: each["mode"],
)
def test_a_compiled_block_keeps_what_the_compiler_keeps(recompute):
    found = recorded(activation_checkpoint=recompute)
    assert not found.notes
    assert kept(found, "layers.1") == kept_by_the_compiler(recompute)


def swiglu(gate, up, down):
    return (torch.nn.functional.silu(gate) * up) @ down


def normed(x, weight, matrix):
    return torch.nn.functional.rms_norm(x, (32,), weight) @ matrix


@pytest.mark.parametrize(
    ("function", "shapes", "moved"),
    [(swiglu, [(64, 32), (64, 32), (32, 8)], 3), (normed, [(64, 32), (32,), (32, 8)], 2)],
)
def test_loops_move_their_inputs_and_outputs_alone(function, shapes, moved):
    """Nothing between is written: each input is read once, and the product's factor is written."""
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *(torch.empty(shape) for shape in shapes)
    )
    first, product = FusedGraph(graph.graph).steps
    assert product.operator is not None
    assert first.operator is None
    moves = sum(first.reads.values()) + sum(map(size_of, first.writes))
    small = 4 * 32 if function is normed else 0  # the norm's weight
    assert moves - small == moved * 4 * 64 * 32
    assert size_of(first.writes[0]) == 4 * 64 * 32


def sent(x, place):
    c10d = torch.ops._c10d_functional
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor_out(x @ x, 2, "0", out=place.neg()))
    part = c10d.reduce_scatter_tensor(x @ x, "sum", 2, "0")
    return whole, x @ x, c10d.wait_tensor(part)


def test_a_collective_holds_what_it_reads_until_it_is_waited_for():
    given = torch.empty(8, 8), torch.empty(16, 8)
    steps = FusedGraph(make_fx(sent, tracing_mode="fake")(*given).graph).steps
    *_, product, _, _, wait = (each for each in steps if each.operator is not None)
    assert [each for each in steps if product.operator in each.frees] == [wait]
    written = sum(size_of(node) for each in steps for node in each.writes)
    assert written == 4 * (3 * 64 + 128 + 32)  # products, the place of what is gathered, and a part


def kernels(step):
    return Counter(kernel.name for part in step.segments for kernel in part.kernels)


COMPILED = {
    "blocks": {},
    "the model": {"granularity": "model"},
    "the model, planned as it is not compiled": {"granularity": "model", "backend": "aot_eager"},
}


@pytest.mark.parametrize("name", tiers(COMPILED, [[*COMPILED][-1]], ["the model"]))
def test_repeated_blocks_stand_for_those_that_were_not_compiled(name):
    sections = {
        "model": {"name": "tiny", "flavor": "deep", "n_layers": 9},
        "compile": COMPILE | COMPILED[name],
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    }
    short, whole = (expand(recorded(shorten=each, **sections), 1) for each in (True, False))
    assert kernels(short) == kernels(whole)
    assert kernels(whole)["aten.mm"] == 9 * (7 + 14 + 3) + 3


@pytest.mark.gate
def test_a_compiled_block_is_split_over_tensor_ranks():
    found = recorded(2, parallelism={"tensor_parallel_degree": 2})
    assert not found.notes
    step = expand(found, 1)
    assert kernels(step)["aten.mm"] == 2 * 21 + 3
    assert kernels(step)["inductor.fused"]
    assert any(part.messages for part in step.segments if part.name == "forward of layers.0")


def test_compiled_experts_on_other_ranks_compute_all_their_rows():
    """As many as without a compiler, though only the devices know how many come from each rank."""

    def products(compiled):
        parallel = {"parallelism": {"expert_parallel_degree": 2}, "compile": {"enable": compiled}}
        model = {"model": {"name": "tiny_sparse", "n_layers": 2}}
        step = expand(recorded(2, **parallel, **model), 1)
        all_kernels = (kernel for each in step.segments for kernel in each.kernels)
        return sum(each.flops for each in all_kernels if "torchtitan.expert" in each.name)

    assert products(compiled=True) == products(compiled=False) > 0


def test_a_recording_is_not_counted_as_a_compilation_of_the_run():
    def counted():
        return {topic: dict(counts) for topic, counts in compiler_counts().items()}, compilations()

    before = counted()
    recorded()
    assert counted() == before


@pytest.mark.parametrize(("name", "can"), [("primals_1", False), ("mm_3", True)])
def test_a_loop_writes_in_the_place_of_saved_results_but_not_of_inputs(name, can):
    graph = Graph()
    given = graph.placeholder(name)
    result = graph.call_function(torch.ops.aten.neg.default, (given,))
    for node in (given, result):
        node.meta["val"] = torch.empty(64, device="meta")
    assert [*places_taken([given, result], {result: 256})] == [given] * can

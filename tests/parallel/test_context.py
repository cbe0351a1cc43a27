"""Attention over a sequence that is split among ranks equals attention over the whole."""

import itertools
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dense import dense_attention
from tests.ranks import run_ranks
from tests.runs import each
from torchtitan.models.attention import SelfAttention, causal_attention
from torchtitan.parallel import context, context_pieces
from torchtitan.parallel.context import context_attention, context_attention_backward, shard
from torchtitan.parallel.context_pieces import Cut, segments
from torchtitan.tasks.next_token import TokenBatch
from torchtitan.torch_private.attention_kernels import attention_backward, attention_forward
from torchtitan.torch_private.distributed import all_gather, reduce_scatter
from torchtitan.torch_private.segment_kernels import segments_backward, segments_forward

LENGTH = 48  # divides in two chunks a rank for 2, 3 and 4 ranks
ROTATIONS = ("allgather", "ring")
BALANCINGS = ("headtail", "none")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def documents():
    """(2, LENGTH): borders within chunks, and documents smaller than the smallest chunk."""
    sizes = ([5, 3, 2, 19, 1, 18], [45, 3])
    return torch.stack([torch.arange(len(s)).repeat_interleave(torch.tensor(s)) for s in sizes])


def operands(kv_heads, dtype, device):
    """q, k, v and the gradient of the output for whole sequences, (2, heads, LENGTH, 16)."""
    generator = torch.Generator().manual_seed(kv_heads)
    return tuple(
        torch.randn(2, LENGTH, heads, 16, generator=generator).to(device, dtype).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads, 4)
    )


def differentiate(attention, q, k, v, grad):
    """Output and gradients."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*inputs)
    out.backward(grad)
    return dict(zip("qkv", (tensor.grad for tensor in inputs), strict=True)) | {"out": out.detach()}


def mine(whole, balancing, group=None, window=0):
    """This rank's part of (B, heads, LENGTH, E)."""
    cut, rank = Cut(dist.get_world_size(group), balancing), dist.get_rank(group)
    if balancing == "documents":
        at = [row.positions(rank) for row in cut.rows(documents(), window)]
        return torch.stack([x[:, p] for x, p in zip(whole, at, strict=True)])
    return cut.part(whole.transpose(1, 2), rank).transpose(1, 2)


def split(rotation, balancing, together, group=None, window=0):
    """Attention over the ranks of a group, by default all."""
    name, rest = (group or dist.group.WORLD).group_name, (rotation, balancing, window)
    return lambda q, k, v: context_attention(q, k, v, together, name, *rest)[0]


# Sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("balancing", BALANCINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_position_is_on_one_rank_once(size, balancing):
    positions = torch.arange(24).repeat(2, 1)
    batch = TokenBatch(positions + 100, positions + 101, positions, positions // 5)
    parts = [shard(batch, rank, size, balancing) for rank in range(size)]
    for part in parts:
        assert part.tokens.shape == (2, 24 // size)
        assert torch.equal(part.tokens, part.positions + 100)
        assert torch.equal(part.targets, part.positions + 101)
        assert torch.equal(part.documents, batch.documents)
    found = torch.cat([part.positions for part in parts], dim=1)
    assert torch.equal(found.sort(dim=1).values, positions)


def test_headtail_is_a_piece_and_its_mirror():
    positions = torch.arange(12).repeat(1, 1)
    batch = TokenBatch(positions, positions, positions, positions)
    found = [shard(batch, rank, 3, "headtail").positions[0].tolist() for rank in range(3)]
    assert found == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert shard(batch, 1, 3, "none").positions[0].tolist() == [4, 5, 6, 7]


def test_a_sequence_must_divide():
    assert [Cut(size, "headtail").chunks for size in (1, 2, 4)] == [1, 4, 8]
    assert [Cut(size, "none").chunks for size in (1, 2, 4)] == [1, 2, 4]
    odd = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(AssertionError, match="6 not in 4 chunks"):
        shard(TokenBatch(odd, odd, odd, odd), 0, 2, "headtail")


@pytest.mark.parametrize("balancing", BALANCINGS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tiles_are_the_causal_mask(size, balancing):
    """Together they hold every visible pair once; with headtail each rank the same number."""
    cut = Cut(size, balancing)
    length = 24 // size
    places = [cut.part(torch.arange(24)[None], rank)[0] for rank in range(size)]
    pairs = [0] * size
    for rank, owner in itertools.product(range(size), repeat=2):
        expected = places[rank][:, None] >= places[owner]
        found = torch.zeros(length, length, dtype=torch.bool)
        if tile := cut.tile(rank, owner, length):
            area = torch.ones_like(found[tile.queries, tile.keys])
            found[tile.queries, tile.keys] = area.tril() if tile.causal else area
        assert torch.equal(found, expected), f"rank {rank} looking at {owner}"
        pairs[rank] += int(found.sum())
    assert sum(pairs) == 24 * 25 // 2
    assert (len(set(pairs)) == 1) == (balancing == "headtail")


# Attention ------------------------------------------------------------------------------------


MASKS = [
    *((kv_heads, together, 0) for kv_heads in (2, 4) for together in (None, documents())),
    *((2, None, 7), (2, documents(), 7), (2, documents(), 19)),
]
"""Key/value heads, documents and window."""


@patch.object(context_pieces, "MIN_PIECE", 3)
def compare_with_whole(device):
    """With up to eight pieces on a rank."""
    for kv_heads, together, window in MASKS:
        *qkv, grad = operands(kv_heads, torch.float32, device)
        attention = partial(dense_attention, documents=together, window=window)
        if together is None and not window:
            attention = partial(causal_attention, documents=None)
        expected = differentiate(attention, *qkv, grad)
        half = [tensor.bfloat16() for tensor in (*qkv, grad)]
        rounded = differentiate(attention, *half)
        truth = differentiate(attention, *(tensor.float() for tensor in half))
        balancings = BALANCINGS if together is None else (*BALANCINGS, "documents")
        for rotation, balancing in itertools.product(ROTATIONS, balancings):
            where = f"{kv_heads} {together is not None} {window} {rotation} {balancing}"
            attention = split(rotation, balancing, together, window=window)
            own = partial(mine, balancing=balancing, window=window)
            found = differentiate(attention, *map(own, (*qkv, grad)))
            for name, value in found.items():
                whole = own(expected[name])
                off = ((value - whole).abs().max() / whole.abs().max()).item()
                assert off <= (2e-6 if name == "out" else 1e-5), f"{where}: {name} off by {off}"
            found = differentiate(attention, *map(own, half))
            for name, value in found.items():
                assert value.dtype == torch.bfloat16
                whole = own(truth[name])
                off = (value - whole).norm()
                allowed = (own(rounded[name]) - whole).norm()
                # 1.4 is measured; parts that were also summed in bf16 would be off by up to 2.
                assert off <= 1.6 * allowed, f"{where}: {name} off by {off}, whole by {allowed}"


class Largest(TorchDispatchMode):
    """As a context, records the number of elements of the largest tensor computed within it."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        found = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *found])
        return result


def largest_tensor(length, window):
    """Elements of the largest tensor in forward and backward, of documents of 500 tokens."""
    own, heads, name = length // dist.get_world_size(), 2, dist.group.WORLD.group_name
    q, k, v, grad = (torch.randn(1, heads, own, 8) for _ in range(4))
    rest = (name, "allgather", "documents", window)
    together = (torch.arange(length) // 500)[None]
    with Largest() as largest:  # an operator hides what it calls
        out, lse = context_attention._init_fn(q, k, v, together, *rest)
        context_attention_backward._init_fn(grad, q, k, v, together, out, lse, *rest)
    return largest.elements


def largest_tensors():
    return [[largest_tensor(n, window) for n in (4096, 8192, 16384)] for window in (0, 700)]


def test_memory_is_linear_in_the_length():
    for found in run_ranks(largest_tensors, 2):
        for sizes in found:
            assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
            assert sizes[0] == 2 * 4096 * 2 * 8  # keys and values of all ranks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_split_attention_equals_whole_attention(ranks, device):
    run_ranks(compare_with_whole, ranks, device, device=device)


def attend_in_pairs():
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
    group = pairs[dist.get_rank() % 2]
    *qkv, grad = (x + dist.get_rank() % 2 for x in operands(2, torch.float32, "cpu"))
    expected = differentiate(partial(causal_attention, documents=documents()), *qkv, grad)
    for rotation in ROTATIONS:
        attention = split(rotation, "headtail", documents(), group)
        parts = (mine(x, "headtail", group) for x in (*qkv, grad))
        for name, value in differentiate(attention, *parts).items():
            whole = mine(expected[name], "headtail", group)
            torch.testing.assert_close(value, whole, rtol=1e-5, atol=1e-5)


def test_ranks_of_a_group_need_not_be_neighbours():
    run_ranks(attend_in_pairs, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_sees_nothing_in_a_tile_takes_nothing_from_it(dtype):
    """Merged with what it sees elsewhere, its share of output and gradients is exactly zero."""
    rows = Cut(2, "none").rows(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]), 0)
    (tile,) = segments(rows, 1, 0, 0)
    q, k, v, grad = (torch.randn(1, 2, 4, 16, dtype=dtype) for _ in range(4))
    out, lse = segments_forward(q, k, v, tile)
    assert out.isfinite().all()
    assert torch.equal((lse[:, :, 1:] - 0.5).exp(), torch.zeros(1, 2, 3))
    lse = torch.full_like(lse, 0.5)
    of_q, of_k, of_v = segments_backward(grad, q, k, v, out, lse, tile)
    assert torch.equal(of_q[:, :, 1:], torch.zeros_like(of_q[:, :, 1:]))
    grad[:, :, 1:] = 0
    of_first = segments_backward(grad, q, k, v, out, lse, tile)
    assert torch.equal(of_k, of_first[1])
    assert torch.equal(of_v, of_first[2])


def count_communication(rotation):
    """Calls in the forward and in the backward."""
    *qkv, grad = (mine(x, "headtail") for x in operands(2, torch.float32, "cpu"))
    inputs = [tensor.detach().requires_grad_() for tensor in qkv]
    with (
        patch.object(context_pieces, "all_gather", wraps=all_gather) as gather,
        patch.object(context_pieces, "reduce_scatter", wraps=reduce_scatter) as sums,
        patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as exchange,
    ):
        spies = {"gather": gather, "scatter": sums, "exchange": exchange}
        out = split(rotation, "headtail", None)(*inputs)
        forward = {name: spy.call_count for name, spy in spies.items()}
        out.backward(grad)
    return {name: [forward[name], spy.call_count - forward[name]] for name, spy in spies.items()}


def test_the_rotation_named_is_the_one_that_runs():
    for gathered, ring in run_ranks(each, 3, count_communication, ("allgather", "ring")):
        assert gathered == {"gather": [1, 1], "scatter": [0, 1], "exchange": [0, 0]}
        # Backward: keys and values travel as before, and as often their gradients.
        assert ring == {"gather": [0, 0], "scatter": [0, 0], "exchange": [2, 2 + 2]}


def wrong_settings():
    *qkv, grad = operands(2, torch.float32, "cpu")
    parts = [mine(x, "headtail") for x in (*qkv, grad)]
    right = differentiate(split("ring", "headtail", documents()), *parts)
    for wrong in (split("ring", "none", documents()), split("ring", "headtail", None)):
        for name, value in differentiate(wrong, *parts).items():
            assert (value - right[name]).abs().max() > 1e-2, name
    gathered = differentiate(split("allgather", "headtail", documents()), *parts)
    assert torch.equal(gathered["out"], right["out"])


def test_another_balancing_or_mask_is_another_result():
    """So the comparison with whole attention can fail; another rotation is the same to the bit."""
    run_ranks(wrong_settings, 2)


# As an operator -------------------------------------------------------------------------------


class Tiny(nn.Module):
    """The least that a block has: a projection, then attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 3 * 16)
        self.attend = SelfAttention()

    def forward(self, x, together):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        return x + self.attend(q, k, v, together).transpose(1, 2).flatten(2)


def run_tiny(model, forward, balancing):
    """Output and gradients on this rank's part of a fixed input."""
    x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(0))
    x = Cut(dist.get_world_size(), balancing).part(x, dist.get_rank()).requires_grad_()
    model.zero_grad()
    out = forward(x, documents())
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def compile_tiny():
    for rotation in ROTATIONS:
        model = Tiny()
        context.apply(model, dist.group.WORLD, rotation, "headtail")
        eager = run_tiny(model, model, "headtail")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for found, expected in zip(run_tiny(model, compiled, "headtail"), eager, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_it_compiles_as_one_graph():
    run_ranks(compile_tiny, 2)


def check_operator():
    q, k, v, _ = (mine(x, "headtail").requires_grad_() for x in operands(2, torch.float32, "cpu"))
    name = dist.group.WORLD.group_name
    for rotation, together in itertools.product(ROTATIONS, (None, documents())):
        torch.library.opcheck(
            context_attention, (q, k, v, together, name, rotation, "headtail"), rtol=0, atol=1e-6
        )


def test_it_keeps_the_contract_of_an_operator():
    run_ranks(check_operator, 2)


def without_data(dtype):
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        k, v = (torch.empty(2, 8, 2, 16, dtype=dtype).transpose(1, 2) for _ in "kv")
        k, v = k.requires_grad_(), v.requires_grad_()
        out, lse = context_attention(q, k, v, None, "no such group", "ring", "headtail")
        assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
        assert (lse.shape, lse.dtype) == ((2, 4, 8), torch.float32)
        assert not lse.requires_grad
        out.sum().backward()
        for tensor in (q, k, v):
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_data_it_needs_no_group(dtype):
    # A process that has run a backward cannot fork ranks that do (torch built for CUDA).
    run_ranks(without_data, 1, dtype)


# Kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_cuda_accept_what_they_are_given(masked, dtype):
    """Their shapes and argument lists; their results need a GPU."""
    q, grad = (torch.empty(2, 4, 40, 16, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 2, 24, 16, dtype=dtype, device="meta") for _ in range(2))
    bias = torch.empty(2, 1, 40, 24, dtype=dtype, device="meta") if masked else None
    out, lse = attention_forward(q, k, v, causal=False, bias=bias)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
    grads = attention_backward(grad, q, k, v, out, lse, causal=False, bias=bias)
    assert [tensor.shape for tensor in grads] == [q.shape, k.shape, v.shape]


def compare_kernels(device):
    """Attention to the first 40 keys and to the other 24, merged, against attention to all."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads, length):
        return torch.randn(2, length, heads, 16, generator=generator).to(device).transpose(1, 2)

    def whole(q, k, v, seen):
        k, v = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))
        return (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    masks = ("none", "causal", "bias")
    for dtype, heads, mask in itertools.product((torch.float32, torch.bfloat16), (2, 4), masks):
        q, k, v, grad = (draw(*x).to(dtype) for x in ((4, 40), (heads, 64), (heads, 64), (4, 40)))
        seen = torch.ones(2, 1, 40, 64, dtype=torch.bool)
        if mask == "causal":
            seen[..., :40] = seen[..., :40].tril()
        if mask == "bias":
            seen = torch.rand(seen.shape, generator=generator) < 0.5
            seen[:, :, 3, :40] = False  # nothing to see in the first part
            seen[:, :, 3, 40] = True
        seen = seen.to(device)
        bias = torch.zeros(seen.shape, dtype=dtype, device=device)
        bias = bias.masked_fill(~seen, torch.finfo(dtype).min / 2)
        parts = []
        for keys in (slice(0, 40), slice(40, 64)):
            kind = {"causal": mask == "causal" and keys.start == 0}
            kind["bias"] = bias[..., keys] if mask == "bias" else None
            parts.append(((k[:, :, keys], v[:, :, keys]), kind))
        results = [attention_forward(q, *kv, **kind) for kv, kind in parts]
        lse = torch.logaddexp(results[0][1], results[1][1])
        out = sum((own - lse).exp()[..., None] * part for part, own in results).to(dtype)
        gradients = [attention_backward(grad, q, *kv, out, lse, **kind) for kv, kind in parts]
        of_q, of_k, of_v = zip(*gradients, strict=True)
        found = {"out": out, "q": sum(of_q), "k": torch.cat(of_k, 2), "v": torch.cat(of_v, 2)}
        truth = differentiate(partial(whole, seen=seen), *(x.float() for x in (q, k, v, grad)))
        for name, value in found.items():
            off = (value - truth[name]).norm() / truth[name].norm()
            where = f"{dtype}, {heads} heads, {mask}: {name} is off by {off}"
            assert off <= (1e-3 if dtype == torch.float32 else 2e-2), where


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_attention_merge(device):
    run_ranks(compare_kernels, 1, device, device=device)


def test_a_model_that_attends_otherwise_is_not_split():
    with pytest.raises(AssertionError, match="SelfAttention"):
        context.apply(
            nn.Linear(2, 2), SimpleNamespace(size=lambda: 2, group_name=""), "ring", "none"
        )

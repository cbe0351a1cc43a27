"""Attention within segments, against dense attention with a mask."""

import itertools
import math
import random
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.torch_private import segment_kernels
from torchtitan.torch_private.segment_kernels import Segment, segments_backward, segments_forward

BATCH, HEADS, QUERIES, KEYS = 2, 4, 40, 50


def seen_by(segments):
    """Whether a query sees a key: (B, 1, S, T)."""
    seen = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    for row, queries, keys, shift, window in segments:
        for i in range(*queries):
            for j in range(*keys):
                seen[row, 0, i, j] = 0 <= i + shift - j < (window or math.inf)
    return seen


def dense(q, k, v, seen):
    k, v = (kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1) for kv in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def operands(groups, dim, dtype):
    """q, k, v and the gradient of the output, as a projection makes them."""
    shapes = ((QUERIES, HEADS), (KEYS, groups), (KEYS, groups), (QUERIES, HEADS))
    return [torch.randn(BATCH, *s, dim, dtype=dtype).transpose(1, 2) for s in shapes]


def seen_in(pack):
    """Whether a packed query sees a key, as torch defines it for its flash kernel."""
    queries, keys = (part.offsets.tolist() for part in pack[:2])
    assert {part.offsets.dtype for part in pack[:2]} == {torch.int32}
    seen = torch.zeros(queries[-1], keys[-1], dtype=torch.bool)
    spans = zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True)
    for (start, stop), (first, last) in spans:
        assert 0 < stop - start <= pack.queries.longest
        assert 0 < last - first <= pack.keys.longest
        end = torch.arange(stop - start)[:, None] + (last - first) - (stop - start)
        before = end - torch.arange(last - first)
        is_near = before <= pack.left if pack.left >= 0 else True
        is_past = before >= -pack.right if pack.right >= 0 else True
        seen[start:stop, first:last] = torch.ones_like(before, dtype=torch.bool) & is_near & is_past
    return seen


def of_pack(q, k, v, pack):
    out, lse = dense(*(x.transpose(0, 1)[None] for x in (q, k, v)), seen_in(pack))
    return out[0].transpose(0, 1).contiguous(), lse[0]


def of_pack_backward(*given):
    *packed, lse, pack = given
    grad, q, k, v, out = (x.transpose(0, 1) for x in packed)
    groups, heads = len(k), len(q) // len(k)
    k, v = (kv.repeat_interleave(heads, dim=0) for kv in (k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    p = (q @ k.mT * scale - lse[..., None]).exp() * seen_in(pack)
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    of_k, of_v = (x.unflatten(0, (groups, heads)).sum(1) for x in (ds.mT @ q, p.mT @ grad))
    return tuple(x.transpose(0, 1).contiguous() for x in (ds @ k, of_k, of_v))


@pytest.fixture
def packed(monkeypatch):
    """Segments are packed as on CUDA, and computed by the definition of the kernel."""
    monkeypatch.setattr(segment_kernels, "has_varlen_kernels", lambda *_: True)
    monkeypatch.setattr(segment_kernels, "flash_forward", of_pack)
    monkeypatch.setattr(segment_kernels, "flash_backward", of_pack_backward)


def check(segments, groups=2, dim=8):
    q, k, v, grad = operands(groups, dim, torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = dense(*inputs, seen_by(segments))
    gradients = torch.autograd.grad(expected, inputs, grad)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        given = [x.to(dtype) for x in (q, k, v)]
        out, lse = segments_forward(*given, segments)
        assert out.dtype == lse.dtype == dtype
        grads = segments_backward(grad.to(dtype), *given, out, lse, segments)
        pairs = [(out, expected), (lse, expected_lse), *zip(grads, gradients, strict=True)]
        for found, wanted in pairs:
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=4 * tolerance)


CASES = {
    "none": [],
    "causal": [Segment(0, (0, 40), (0, 40)), Segment(1, (3, 23), (7, 27), 4)],
    "one token": [Segment(0, (5, 6), (5, 6)), Segment(0, (6, 7), (9, 10), 3)],
    "rectangle": [Segment(1, (10, 30), (20, 49), KEYS)],
    "later keys": [Segment(0, (10, 30), (10, 30), -50)],
    "earlier keys, in no window": [Segment(0, (10, 30), (0, 5), 0, 3)],
    "some see nothing": [Segment(0, (0, 40), (10, 30), 0, 4), Segment(1, (0, 40), (20, 50))],
    "causal after other keys": [Segment(0, (0, 40), (0, 50), 10), Segment(1, (3, 20), (2, 45), 9)],
    "window of one": [Segment(0, (0, 40), (0, 40), 0, 1), Segment(1, (5, 6), (5, 6), 0, 1)],
    "window": [Segment(0, (0, 40), (0, 40), 0, 7), Segment(1, (4, 40), (3, 50), 11, 13)],
    "window as long": [Segment(0, (0, 40), (0, 40), 0, 40), Segment(1, (0, 40), (0, 40), 0, 39)],
    "window of a rectangle": [Segment(0, (0, 40), (0, 20), 25, 30)],
}


@pytest.mark.parametrize("name", CASES)
def test_segments_equal_dense_attention(name, monkeypatch):
    monkeypatch.setattr(segment_kernels, "MIN_BLOCK", 4)
    monkeypatch.setattr(segment_kernels, "MAX_BLOCK", 8)
    check(CASES[name])


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", CASES)
def test_packed_segments_equal_dense_attention(name):
    check(CASES[name])


def random_segments(rng):
    segments = []
    for row in range(BATCH):
        for queries in itertools.pairwise(sorted(rng.sample(range(QUERIES + 1), 4))):
            first, last = sorted(rng.sample(range(KEYS + 1), 2))
            window = rng.choice((0, rng.randint(1, 60)))
            shift = rng.randint(-30, 50)
            segments.append(Segment(row, queries, (first, last), shift, window))
    return segments


def test_any_segments_equal_dense_attention(monkeypatch):
    rng = random.Random(0)
    for _ in range(50):
        monkeypatch.setattr(segment_kernels, "MIN_BLOCK", rng.randint(1, 20))
        check(random_segments(rng), groups=rng.choice((1, 2, 4)))


@pytest.mark.usefixtures("packed")
def test_any_packed_segments_equal_dense_attention():
    rng = random.Random(0)
    for _ in range(50):
        check(random_segments(rng), groups=rng.choice((1, 2, 4)))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("window", [0, 5])
def test_whole_documents_are_one_call_without_copies(window, monkeypatch):
    kernel = Mock(wraps=of_pack)
    monkeypatch.setattr(segment_kernels, "flash_forward", kernel)
    q, k, v, _ = operands(2, 8, torch.float64)
    spans = [(0, 3), (3, 4), (4, QUERIES)]
    documents = [Segment(row, s, s, 0, window) for row in range(BATCH) for s in spans]
    segments_forward(q, k[:, :, :QUERIES], v[:, :, :QUERIES], documents)
    [call] = kernel.call_args_list
    assert call.args[0].data_ptr() == q.data_ptr()


@pytest.mark.parametrize("way", ["loop", "packed"])
def test_contributions_of_parts_of_the_keys_add_up(way, request):
    """With the output and the normalizer of all keys."""
    if way == "packed":
        request.getfixturevalue("packed")
    q, k, v, grad = operands(2, 16, torch.float64)
    whole = [Segment(row, (0, 40), (0, 40), 0, 30) for row in range(BATCH)]
    out, lse = segments_forward(q, k, v, whole)
    expected = segments_backward(grad, q, k, v, out, lse, whole)
    parts = [
        [segment._replace(keys=keys) for segment in whole] for keys in ((0, 13), (13, 25), (25, 40))
    ]
    found = [segments_backward(grad, q, k, v, out, lse, part) for part in parts]
    for wanted, *shares in zip(expected, *found, strict=True):
        torch.testing.assert_close(sum(shares), wanted)


WHOLE = [Segment(row, (0, QUERIES), (0, QUERIES), 0, QUERIES) for row in range(BATCH)]


@pytest.mark.parametrize(
    ("names", "backend", "kernel"),
    [
        (("window", "causal after other keys", "rectangle"), "CUDNN_ATTENTION", "_flash"),
        (("whole",), "FLASH_ATTENTION", "_scaled_dot_product_flash"),
        (("whole",), "CUDNN_ATTENTION", "_scaled_dot_product_cudnn"),
    ],
)
def test_kernels_of_cuda_take_what_they_are_given(names, backend, kernel, monkeypatch):
    """By its shapes, on tensors without values, as there is no such kernel on a CPU."""
    monkeypatch.setattr(segment_kernels, "has_varlen_kernels", lambda *_: True)
    chosen = getattr(SDPBackend, backend).value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: chosen)
    q, k, v, grad = (x.to("meta") for x in operands(2, 8, torch.bfloat16))
    for name in names:
        segments = WHOLE if name == "whole" else CASES[name]
        if name == "whole":
            k, v = (x[:, :, :QUERIES] for x in (k, v))
        with FlopCounterMode(display=False) as counter:
            out, lse = segments_forward(q, k, v, segments)
            grads = segments_backward(grad, q, k, v, out, lse, segments)
        called = {f"aten.{kernel}_attention{way}" for way in ("_forward", "", "_backward")}
        assert {str(each) for each in counter.get_flop_counts()["Global"]} < called
        for found, like in zip((out, *grads), (q, q, k, v), strict=True):
            assert (found.shape, found.dtype) == (like.shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)

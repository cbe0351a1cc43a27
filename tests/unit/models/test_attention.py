"""Attention inside of documents and windows, against a dense mask."""

import itertools
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.dense import dense_attention
from torchtitan.models import attention
from torchtitan.models.attention import causal_attention, document_attention
from torchtitan.torch_private import segment_kernels

LENGTH = 150
DOCUMENTS = {
    "none": None,
    "one": torch.zeros(3, LENGTH, dtype=torch.int64),
    "one token each": torch.arange(LENGTH).expand(3, -1),
    "any": (torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.05).cumsum(1),
    "padding": torch.tensor([[0, 1, -1], [0, 2, -2], [4, 3, 2]]).repeat_interleave(50, dim=1),
}


def operands(heads=4, groups=2, dim=16, length=LENGTH, batch=3):
    """q, k, v and the gradient of the output, as a projection makes them."""
    sizes = (heads, groups, groups, heads)
    return [torch.randn(batch, length, n, dim).transpose(1, 2) for n in sizes]


def differentiate(core, given, *mask):
    inputs = [x.detach().clone().requires_grad_() for x in given[:3]]
    out = core(*inputs, *mask)
    return [out.detach(), *torch.autograd.grad(out, inputs, given[3].to(out))]


def check(given, documents, window):
    found = differentiate(causal_attention, given, documents, window)
    exact = differentiate(dense_attention, [x.double() for x in given], documents, window)
    for x, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(
            x.double(), wanted, rtol=1e-6, atol=4e-6, msg=lambda m: f"window {window}: {m}"
        )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_and_windows_equal_a_dense_mask(name):
    for window in (0, 1, 2, 7, LENGTH - 1, LENGTH, LENGTH + 1):
        check(operands(), DOCUMENTS[name], window)


def test_heads_of_any_number_and_size():
    for heads, groups, dim in ((4, 4, 8), (4, 1, 24), (6, 3, 64), (2, 1, 128)):
        for window in (0, 20):
            check(operands(heads, groups, dim), DOCUMENTS["any"], window)


def test_a_window_in_a_long_document_is_cut_into_blocks():
    for window in (0, 70):
        check(operands(length=700, batch=1), torch.arange(700)[None] // 600, window)


def test_a_short_sequence():
    for length, window in itertools.product((1, 2, 3), (0, 1, 2)):
        check(operands(length=length), torch.arange(length).expand(3, -1) // 2, window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_close_as_with_a_dense_mask(dtype):
    given = [x.to(dtype) for x in operands()]
    mask = (DOCUMENTS["any"], 30)
    exact = differentiate(dense_attention, [x.double() for x in given], *mask)
    dense = differentiate(dense_attention, given, *mask)
    for x, other, wanted in zip(
        differentiate(causal_attention, given, *mask), dense, exact, strict=True
    ):
        assert x.dtype == dtype
        assert (x - wanted).norm() <= 1.2 * (other - wanted).norm()


def test_plain_causal_attention_is_that_of_torch_to_the_bit(monkeypatch):
    """So is that of rows of one document, all in one call, where others would be packed, too."""
    given, kernel = operands(), Mock(wraps=segment_kernels.attention_forward)
    monkeypatch.setattr(segment_kernels, "attention_forward", kernel)
    monkeypatch.setattr(segment_kernels, "has_varlen_kernels", lambda *_: True)

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    expected = differentiate(torchs, given)
    for documents in (None, DOCUMENTS["one"]):
        for window in (0, LENGTH, LENGTH + 1):
            found = differentiate(causal_attention, given, documents, window)
            assert all(torch.equal(x, wanted) for x, wanted in zip(found, expected, strict=True))
    calls = [(call.args[0].shape, call.kwargs) for call in kernel.call_args_list]
    assert calls == 3 * [(given[0].shape, {"causal": True, "bias": None})]


def largest_tensor(core, length, size, window):
    """Number of float32 elements of the largest tensor, forward and backward, in kernels too."""
    given = operands(1, 1, 8, length, batch=1)
    documents = torch.arange(length)[None] // size if size else None
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        differentiate(core, given, documents, window)
    return max(event.self_cpu_memory_usage for event in profile.events()) // 4


@pytest.mark.parametrize(("size", "window"), [(100, 0), (0, 64), (500, 64)])
def test_memory_is_linear_in_the_sequence(size, window):
    for length in (1024, 2048):  # q is larger than the mask of 64 queries with 127 keys
        assert largest_tensor(causal_attention, length, size, window) == 8 * length
        assert largest_tensor(dense_attention, length, size, window) >= length**2


def test_the_documents_of_a_batch_are_read_once():
    attention._starts.cache_clear()
    given, documents = operands(), DOCUMENTS["any"].clone()
    microbatches = [documents[:2], documents[2:]]
    for _ in range(3):  # layers
        for rows, microbatch in zip((slice(2), slice(2, 3)), microbatches, strict=True):
            differentiate(causal_attention, [x[rows] for x in given], microbatch)
    assert attention._starts.cache_info().misses == 2


def test_documents_that_change_in_place_are_read_again():
    given, documents = operands(), DOCUMENTS["any"].clone()
    check(given, documents, 0)
    documents.copy_(DOCUMENTS["padding"])
    check(given, documents, 0)


def test_documents_on_a_device_are_refused():
    with pytest.raises(AssertionError, match="read without waiting"):
        causal_attention(*operands()[:3], DOCUMENTS["any"].to("meta"))


def test_evaluation_keeps_nothing():
    q, k, v, _ = operands()
    q.requires_grad_()
    with torch.no_grad():
        assert not causal_attention(q, k, v, DOCUMENTS["any"]).requires_grad
    assert causal_attention(q, k, v, DOCUMENTS["any"]).requires_grad


@pytest.mark.parametrize(("name", "window"), [("any", 0), ("any", 20), ("one", 0)])
def test_the_compiler_is_told_the_truth(name, window):
    """Shapes, strides, dtypes, and that nothing is an alias of an input."""
    inputs = [x.requires_grad_() for x in operands()[:3]]
    torch.library.opcheck(document_attention, (*inputs, DOCUMENTS[name], window))


@pytest.mark.parametrize("window", [0, 20])
def test_floating_point_operations_are_counted(window):
    given = operands(heads=4, dim=16)
    with FlopCounterMode(display=False) as counter:
        differentiate(causal_attention, given, DOCUMENTS["any"], window)
    product = 2 * 3 * 4 * LENGTH * (window or LENGTH) * 16
    assert counter.get_total_flops() == (2 + 5) * product

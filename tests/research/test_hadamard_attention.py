"""Attention in 8 bits: the rotation against scipy's matrix, the rounding, and what it does."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch

from tests import tiny
from torchtitan import convert
from torchtitan.models.attention import SelfAttention
from torchtitan.models.decoder import Decoder
from torchtitan.models.spec import build_empty
from torchtitan.research import hadamard_attention as module
from torchtitan.research.hadamard_attention import (
    LowPrecisionAttention,
    RoundedAttention,
    hadamard,
    largest_elements,
    straight_through,
)


def test_the_transform_is_that_of_scipy():
    """Whole numbers, whose sums are exact: what is left is how the result is scaled."""
    for size in (2**power for power in range(1, 16)):
        x = torch.randint(-8, 9, (2, size), generator=torch.Generator().manual_seed(size)).double()
        columns = np.arange(0, size, max(size // 64, 1))
        # A large matrix is the Kronecker product of two.
        inner = min(size, 1024)
        matrices = [scipy.linalg.hadamard(n, dtype="int8") for n in (size // inner, inner)]
        halves = (matrices[0][:, columns // inner], matrices[1][:, columns % inner])
        matrix = torch.from_numpy(np.einsum("ac,bc->abc", *halves).reshape(size, -1))
        y = x @ matrix.double() / math.sqrt(size)
        torch.testing.assert_close(hadamard(x)[:, columns], y, rtol=2e-15, atol=2e-15)
        torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=2e-15, atol=2e-15 * 8)


def test_the_gradient_of_the_transform():
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(hadamard, x)


def on_tensor_cores(patch):
    """Products in 16 bits that are summed in float32, as on CUDA; a CPU has no such operator."""
    patch.setattr(module, "_sums_in_float32", lambda x: x.dtype != torch.float64)
    patch.setattr(module, "_product", lambda a, b: (a.double() @ b.double()).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 64, 256])
def test_a_transform_in_16_bits_is_exact_on_tensor_cores(size, dtype, monkeypatch):
    x = heads(5, size).to(dtype)
    expected = hadamard(x.double())
    on_tensor_cores(monkeypatch)
    assert hadamard(x).dtype == torch.float32
    torch.testing.assert_close(hadamard(x).double(), expected, rtol=0, atol=2e-7 * 4)


@pytest.mark.parametrize("size", [64, 512, 32768])
def test_a_transform_in_32_bits_keeps_16_of_24_on_tensor_cores(size, monkeypatch):
    x = heads(3, size).float().requires_grad_()
    on_tensor_cores(monkeypatch)
    y = hadamard(x)
    expected = hadamard(x.detach().double())
    # An element is off by 2^-17 of itself at most, and the sum of as many divides by their root.
    assert 1e-8 < float((y.detach() - expected).norm() / expected.norm()) < 2 * 2**-17
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(gradient, hadamard(torch.ones_like(y)), rtol=0, atol=0)


def test_the_transform_wants_a_power_of_two():
    with pytest.raises(ValueError, match="the last dim is 24"):
        hadamard(torch.ones(24))


def heads(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("format", ["float8", "int8"])
@pytest.mark.parametrize("scale", ["token", "head", "tensor"])
def test_rounding_is_that_of_the_formats(format, scale):
    """By hand: a scale for each slice, and the nearest of all numbers of the format."""
    x = heads(2, 3, 5, 8).requires_grad_()
    found = straight_through(x, largest_elements(x.detach(), scale), format)
    found.backward(gradient := heads(2, 3, 5, 8))
    assert torch.equal(x.grad, gradient)
    numbers = torch.arange(-127.0, 128.0, dtype=torch.float64)
    if format == "float8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        numbers = codes[codes.isfinite()]
    shared = {"token": 8, "head": 5 * 8, "tensor": 3 * 5 * 8}[scale]
    for own, rounded in zip(
        x.detach().reshape(-1, shared), found.detach().reshape(-1, shared), strict=True
    ):
        step = own.abs().max() / numbers.max()
        off = (own[:, None] / step - numbers).abs().amin(1) * step
        torch.testing.assert_close((own - rounded).abs(), off, rtol=1e-9, atol=1e-12)


def test_nothing_is_rounded_to_nothing():
    x = torch.zeros(1, 1, 2, 4)
    assert torch.equal(straight_through(x, largest_elements(x, "head"), "float8"), x)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("rotation", ["qk", "v", "qkv"])
def test_a_rotation_alone_changes_nothing(rotation, documents, monkeypatch):
    """Of causal attention with grouped queries and sinks, as long as nothing is rounded."""
    q, k, v = heads(2, 4, 6, 8), heads(2, 2, 6, 8), heads(2, 2, 6, 8)
    kept = torch.tensor([[0, 0, 0, 1, 1, 1]]).repeat(2, 1) if documents else None
    inputs = q, k, v, kept, torch.linspace(-1, 1, 4, dtype=torch.float64)
    module = RoundedAttention(LowPrecisionAttention(rotation=rotation), [])
    rounded, expected = module(*inputs), SelfAttention()(*inputs)
    monkeypatch.setattr(module, "rounded", lambda *tensors: list(tensors))
    torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=1e-12)
    assert 1e-3 < (rounded - expected).norm() / expected.norm() < 0.2


def error(rotation, format, largest):
    """Of attention with one scale for the tensor, two of whose channels are so much larger."""
    q, k, v = (heads(1, 4, 64, 64).roll(shift, 2) for shift in range(3))
    for x in (q, k):
        x[..., :2] *= largest
    config = LowPrecisionAttention(rotation=rotation, dtype=format, scale="tensor")
    expected = SelfAttention()(q, k, v, None)
    return float((RoundedAttention(config, [])(q, k, v, None) - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", ["float8", "int8"])
def test_a_rotation_helps_where_channels_stand_out(format):
    assert error("qk", format, 10) < 0.75 * error("none", format, 10)
    assert error("qk", format, 1) == pytest.approx(error("none", format, 1), rel=0.2)


def test_it_says_what_it_converted():
    model = build_empty(Decoder, replace(tiny.FLAVORS["tiny"], sliding_window=5), 32)
    config = LowPrecisionAttention(filter_fqns=("layers.0",), rotation="qk", scale="head")
    (done,) = convert.apply(model, [config], None, has_fsdp=False)
    assert convert.describe(config, done) == (
        "low_precision_attention (float8, a scale for each head, qk rotated): 1 of 2 attention "
        "modules; skipped layers.0.attention.attend (filter)"
    )
    found = [block.attention.attend for block in model.layers.values()]
    assert [type(each) for each in found] == [SelfAttention, RoundedAttention]
    assert [each.window for each in found] == [5, 5]


def recipe(*converters, **sections):
    return tiny.job(**sections).model_copy(update={"convert": converters})


def test_a_scale_that_looks_ahead_is_told():
    assert not tiny.problems(recipe(LowPrecisionAttention()), severity="note")
    (note,) = tiny.problems(recipe(LowPrecisionAttention(scale="head")), severity="note")
    assert note.path == "convert.0.scale"
    assert "depends on later tokens" in note.message

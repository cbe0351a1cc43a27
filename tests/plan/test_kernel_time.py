"""The time of a kernel follows from its shape, in the order and about the size of measured ones."""

import math

import pytest
import torch

from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.kernel_time import kernel_seconds
from torchtitan.plan.recording import Kernel

H100 = find_hardware("h100")


def product(m, n, k, dtype=torch.bfloat16, name="aten.mm", batch=()):
    times, size = math.prod(batch), dtype.itemsize
    shapes = ((*batch, m, k), (*batch, k, n))
    read, written = times * (m * k + k * n) * size, times * m * n * 2
    return Kernel(name, 2 * times * m * n * k, read, written, dtype, shapes)


def attention(tokens, head_dim=128, heads=32, is_causal=True, backward=False):
    shape, name = (1, heads, tokens, head_dim), "aten._scaled_dot_product_flash_attention"
    flops = 4 * heads * tokens**2 * head_dim
    if backward:
        name, flops = f"{name}_backward", flops * 5 // 2
    size = 2 * math.prod(shape)
    return Kernel(name, flops, 3 * size, size, torch.bfloat16, (shape,) * 4, is_causal)


def rate(kernel, hardware=H100):
    return kernel.flops / kernel_seconds(kernel, hardware) / 1e12


def test_a_large_product_takes_what_it_took_in_a_step():
    assert rate(product(16384, 128256, 4096)) == pytest.approx(732, rel=0.03)


def test_small_narrow_and_short_products_are_slower():
    large = rate(product(8192, 8192, 8192))
    assert rate(product(8192, 4096, 256)) < 0.7 * large
    assert rate(product(1024, 1024, 1024)) < 0.7 * large
    assert rate(product(8, 4096, 4096)) < 0.05 * large


def test_a_last_wave_with_one_tile_costs_as_much_as_a_full_one():
    full, more = product(1536, 2816, 1536), product(1537, 2816, 1536)  # 132 and 143 tiles
    assert kernel_seconds(more, H100) > 1.2 * kernel_seconds(full, H100)


def test_float8_is_faster_where_the_device_has_it():
    shape = 8192, 14336, 4096
    fast = product(*shape, torch.float8_e4m3fn, "aten._scaled_mm")
    assert 1.6 < rate(fast) / rate(product(*shape)) < 2
    by_row = fast._replace(shapes=(*fast.shapes, (8192, 1), (1, 14336)))
    assert rate(by_row) == pytest.approx(0.75 * rate(fast), rel=0.01)
    a100 = find_hardware("a100-80")
    assert rate(fast, a100) == pytest.approx(rate(product(*shape), a100), rel=0.01)


def test_batches_and_experts_count():
    shape = 512, 512, 512
    one, many = product(*shape), product(*shape, name="aten.bmm", batch=(64,))
    assert rate(many) > 2 * rate(one)
    like = kernel_seconds(product(1024, 14336, 4096, name="aten.bmm", batch=(8,)), H100)
    x, weight, gradient, ends = (8192, 4096), (8, 14336, 4096), (8192, 14336), (8,)
    for name, shapes in (("products", (x, weight, ends)), ("gradients", (gradient, x, ends))):
        experts = product(8192, 14336, 4096, name=f"torchtitan.expert_{name}")
        assert kernel_seconds(experts._replace(shapes=shapes), H100) == pytest.approx(like, rel=0.1)


def test_causal_attention_computes_half_and_the_backward_is_as_measured():
    causal, whole = attention(8192), attention(8192, is_causal=False)
    ratio = kernel_seconds(causal, H100) / kernel_seconds(whole, H100)
    assert ratio == pytest.approx(0.5, rel=0.02)
    assert rate(attention(8192, backward=True)) / 2 == pytest.approx(480, rel=0.02)
    assert rate(attention(8192, head_dim=64)) < rate(causal)


def test_short_sequences_lose_at_the_diagonal():
    rates = [rate(attention(tokens)) / 2 for tokens in (512, 1024, 2048, 8192, 16384)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(380, rel=0.1)  # arXiv:2407.08608, figure 5


def test_a_copy_takes_its_bytes_and_a_small_kernel_its_launch():
    size = 2**28
    copy = Kernel("aten.copy_", 0, 2 * size, size, torch.bfloat16, ((size // 2,),) * 2)
    assert kernel_seconds(copy, H100) == pytest.approx(193e-6, rel=0.03)  # as measured
    empty = Kernel("aten.add", 0, 8, 4, torch.float32, ((), ()))
    assert kernel_seconds(empty, H100) == pytest.approx(2e-6, rel=0.01)


def test_an_update_takes_what_it_took_in_a_step():
    parameters = 2_795_200_000
    kernels = [
        Kernel("aten._fused_adamw_", 0, 16 * parameters, 16 * parameters, torch.float32, ()),
        Kernel("aten._foreach_norm", 0, 4 * parameters, 0, torch.float32, ()),
        Kernel("aten._foreach_mul_", 0, 4 * parameters, 4 * parameters, torch.float32, ()),
    ]
    seconds = sum(kernel_seconds(kernel, H100) for kernel in kernels)
    assert seconds == pytest.approx(0.0436, rel=0.03)  # 8B, 8 layers: 11.6 % of a step of 0.3755 s


def test_a_lookup_reads_its_rows_only():
    table, out = 2 * 128256 * 4096, 2 * 8192 * 4096
    lookup = Kernel("aten.embedding", 0, table, out, torch.bfloat16, ((128256, 4096), (1, 8192)))
    assert kernel_seconds(lookup, H100) < 1.1 * (2 * out / 2780e9 + 2e-6)

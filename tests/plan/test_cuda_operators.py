"""What a recording for a CUDA device has in place of a CPU's operators."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from tests import tiny
from torchtitan.models import MODELS
from torchtitan.plan.cuda_operators import pairs_of_band
from torchtitan.plan.fake_rank import MAX_PASSES, record
from torchtitan.plan.recording import Kernel

BF16 = {"training": {**tiny.SECTIONS["training"], "mixed_precision_param": "bfloat16"}}
ONE_BATCH = {"training": {**BF16["training"], "global_batch_size": 2}}
SHORT = {**tiny.SECTIONS["model"], "flavor": "short"}
NORMS = 3
"""Of its one block, and at the end."""


def kernels(device_type, ranks=1, rank=0, **sections):
    job = tiny.job(**({"model": SHORT} | ONE_BATCH | sections))
    recorded = record(job, ranks, rank, device_type=device_type)
    return [event for event in recorded.recording.events if isinstance(event, Kernel)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_norm_is_one_kernel_on_cuda(tp):
    split = {"parallelism": {"tensor_parallel_degree": tp}}
    cuda = Counter(kernel.name for kernel in kernels("cuda", tp, **split))
    assert cuda["aten._fused_rms_norm"] == cuda["aten._fused_rms_norm_backward"] == NORMS
    assert not cuda["aten.rsqrt"]
    cpu = Counter(kernel.name for kernel in kernels("cpu", tp, **split))
    assert not cpu["aten._fused_rms_norm"]
    assert cpu["aten.rsqrt"] == NORMS


def test_attention_has_the_products_and_the_name_of_the_device():
    """Two products forward, five backward; each of all pairs of tokens."""
    for device, suffix in (("cuda", ""), ("cpu", "_for_cpu")):
        found = {kernel.name: kernel for kernel in kernels(device)}
        product = 2 * 2 * 4 * 32 * 32 * 8
        name = f"aten._scaled_dot_product_flash_attention{suffix}"
        assert found[name].flops == 2 * product
        assert found[f"{name}_backward"].flops == 5 * product
        assert found[name].is_causal
        assert found[name].shapes == ((2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8))


def test_products_have_the_flops_that_the_model_is_said_to_have():
    """Six a parameter and token, as in MFU; attention is counted with its recomputed scores."""
    sections = BF16 | {"model": tiny.SECTIONS["model"]}
    args, tokens = tiny.job(**sections).model_args(), 2 * 32
    found = [kernel for kernel in kernels("cuda", **sections) if kernel.flops]
    attention = sum(kernel.flops for kernel in found if "attention" in kernel.name)
    products = sum(kernel.flops for kernel in found if "attention" not in kernel.name)
    of_norms = 6 * 5 * args.dim  # no products
    a_unit = MODELS["tiny"].flops_per_unit(args, 32) - of_norms
    assert products + attention * 12 / 14 == a_unit * tokens * MAX_PASSES


@pytest.mark.parametrize("enable", [False, True])
def test_chunks_of_the_loss_are_recorded_one_by_one(enable):
    chunks = {"loss": {"vocabulary_chunk": 100}, "compile": {"enable": enable}}
    found = Counter(kernel.name for kernel in kernels("cuda", **chunks))
    assert found["aten.mm"] == 21 + 3 * (1 + 3)
    assert bool(found["inductor.fused"]) is enable


SPLIT = {"parallelism": {"context_parallel_degree": 2}}


def test_context_attention_is_recorded_tile_by_tile():
    found = kernels("cuda", 2, **SPLIT)
    tiles = [kernel for kernel in found if "attention" in kernel.name]
    assert tiles
    assert all(kernel.flops for kernel in tiles)
    assert not any("context" in kernel.name for kernel in found)


def test_segments_of_documents_are_packed_on_cuda():
    """The FLOPs of both ranks are those of the pairs that see each other."""
    sections = SPLIT | {"model": SHORT | {"attn_mask_type": "block_causal", "sliding_window": 9}}
    flash = "aten._flash_attention_"
    assert not any(kernel.name.startswith(flash) for kernel in kernels("cpu", 2, **sections))
    found = [kernel for rank in range(2) for kernel in kernels("cuda", 2, rank, **sections)]
    assert not any("scaled_dot_product" in kernel.name for kernel in found)
    for way, products in (("forward", 2), ("backward", 5)):
        own = [kernel for kernel in found if kernel.name == flash + way]
        assert not any(kernel.is_causal for kernel in own), "which would halve their time"
        seen = sum(min(token + 1, 9) for token in range(32))
        product = 2 * 8 * 4 * 2 * seen  # of the heads of two sequences, on both ranks
        assert sum(kernel.flops for kernel in own) == products * product


@given(integers(1, 12), integers(1, 12), integers(-1, 12), integers(-1, 12))
def test_pairs_are_those_of_the_band(queries, keys, left, right):
    offsets = [n + keys - queries - m for n in range(queries) for m in range(keys)]
    seen = [(left < 0 or at <= left) and (right < 0 or -at <= right) for at in offsets]
    assert pairs_of_band(queries, keys, left, right) == sum(seen)

"""A run says which mask its attention has, and which kernel computes it."""

import dataclasses
import logging

import pytest
import torch

from tests import tiny
from tests.runs import train
from torchtitan.models.attention import describe
from torchtitan.models.llama3 import LLAMA3


@pytest.mark.parametrize(
    ("window", "length", "device", "dtype", "head_dim", "documents", "expected"),
    [
        (0, 32, "cpu", "float32", 64, False, None),
        (12, 12, "cpu", "float32", 64, False, None),
        (
            12,
            32,
            "cpu",
            "float32",
            64,
            False,
            "in a window of 12 tokens, by fused kernels, segment",
        ),
        (0, 32, "cuda", "float32", 64, True, "within documents, by fused kernels, segment"),
        (0, 32, "cuda", "bfloat16", 64, True, "within documents, by varlen flash attention"),
        (0, 32, "cuda", "bfloat16", 12, True, "within documents, by fused kernels, segment"),
        (0, 32, "cuda", "bfloat16", 512, True, "within documents, by fused kernels, segment"),
        (12, 32, "cuda", "bfloat16", 64, True, "within documents, in a window of 12 tokens, by v"),
    ],
)
def test_only_other_masks_than_causal_are_described(
    window, length, device, dtype, head_dim, documents, expected
):
    shape = LLAMA3.attention(dataclasses.replace(tiny.ARGS, sliding_window=window))
    assert shape is not None
    found = describe(
        *(shape.window_in(length), device, getattr(torch, dtype), head_dim),
        separates_documents=documents,
    )
    assert found == expected or (found and expected and found.startswith(expected))


def test_a_run_says_it_at_its_start(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan")
    model = {"attn_mask_type": "block_causal", "sliding_window": 12}
    train(tiny.job(str(tmp_path), model=model, training={"steps": 1}))
    said = [line for line in caplog.messages if line.startswith("attention: ")]
    assert len(said) == 1
    assert said[0].startswith("attention: within documents, in a window of 12 tokens, by ")

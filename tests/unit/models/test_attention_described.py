"""A run says which mask its attention has, and which kernel computes it."""

import dataclasses
import logging

import pytest
import torch

from tests import tiny
from tests.runs import train
from tests.tables import table
from torchtitan.models.attention import describe
from torchtitan.models.llama3 import LLAMA3


@pytest.mark.parametrize("row", table(__file__, "attentions.txt"), ids=str)
def test_only_other_masks_than_causal_are_described(row):
    window, length, device, dtype, head_dim, documents, expected = row
    shape = LLAMA3.attention(dataclasses.replace(tiny.ARGS, sliding_window=int(window)))
    assert shape is not None
    found = describe(
        *(shape.window_in(int(length)), device, getattr(torch, dtype), int(head_dim)),
        separates_documents=documents == "true",
    )
    assert (found or "nothing").startswith(expected)


def test_a_run_says_it_at_its_start(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan")
    model = {"attn_mask_type": "block_causal", "sliding_window": 12}
    train(tiny.job(str(tmp_path), model=model, training={"steps": 1}))
    said = [line for line in caplog.messages if line.startswith("attention: ")]
    assert len(said) == 1
    assert said[0].startswith("attention: within documents, in a window of 12 tokens, by ")

"""Facts about GPT-OSS: its flavors, as published (https://arxiv.org/abs/2508.10925, table 1).

Of `20B` and `120B` a token uses 3.6 and 5.1 billion parameters, the embedding not counted.
`debugmodel` is small enough for a laptop and still has every part.
"""

from dataclasses import replace
from typing import Any

from torchtitan.models.decoder_spec import attention
from torchtitan.models.gpt_oss.block import OssArgs, OssBlock
from torchtitan.models.gpt_oss.hugging_face import HUGGING_FACE
from torchtitan.models.gpt_oss.settings import GptOssConfig
from torchtitan.models.layers import Yarn
from torchtitan.models.sparse_decoder import SPARSE_PLAN, sparse_decoder_spec, sparse_shrink
from torchtitan.models.spec import AttentionShape, MinShape

PUBLISHED: dict[str, Any] = {
    "dim": 2880,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 64,
    "ffn_dim": 2880,
    "expert_dim": 2880,
    "top_k": 4,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_scaling": Yarn(factor=32.0, truncate=False),
}
FLAVORS = {
    "debugmodel": OssArgs(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=64,
        ffn_dim=192,
        expert_dim=192,
        n_experts=8,
        top_k=2,
        vocab_size=2048,
        sliding_window=64,
        rope_theta=150_000.0,
    ),
    "20B": OssArgs(**PUBLISHED, n_layers=24, n_experts=32),
    "120B": OssArgs(**PUBLISHED, n_layers=36, n_experts=128),
}


def shape(args: Any) -> AttentionShape:
    """Return the sizes of attention; every second block has no window."""
    is_mixed = args.sliding_window > 0 and args.n_layers > 1
    return attention(args)._replace(has_sinks=True, is_mixed=is_mixed)


def shrink(args: Any, needed: MinShape) -> Any:
    """Return the same structure, with a window of at most 8 tokens."""
    small = sparse_shrink(args, needed)
    window = min(args.sliding_window, 8)
    return replace(small, ffn_dim=small.expert_dim, sliding_window=window)


GPT_OSS = replace(
    sparse_decoder_spec(
        name="gpt_oss",
        flavors=FLAVORS,
        settings=GptOssConfig,
        formats={"hf": HUGGING_FACE},
        open_vocabulary=("debugmodel",),
        block=OssBlock,  # type: ignore[arg-type]
        block_plan={**SPARSE_PLAN, "attention.sinks": "sinks"},
    ),
    attention=shape,
    queries_and_keys=None,
    shrink=shrink,
)

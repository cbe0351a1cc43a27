"""Facts about Qwen3-MoE: its flavors, as published (https://arxiv.org/abs/2505.09388, table 2).

Attention is that of Qwen3 (`torchtitan.models.qwen3`). A token has 8 of 128 experts, whose scores
are renormalized, and there is no shared expert. Of 30B-A3B and 235B-A22B a token uses 3 and 22
billion parameters. `debugmodel` is small enough for a laptop and still has every part.
"""

from torchtitan.models.qwen3.spec import flavor
from torchtitan.models.qwen3_moe.hugging_face import HUGGING_FACE
from torchtitan.models.qwen3_moe.settings import Qwen3MoeConfig
from torchtitan.models.sparse_decoder import SparseArgs, sparse_decoder_spec

FLAVORS = {
    "debugmodel": SparseArgs(
        **vars(flavor(*(256, 6, 8, 768), n_kv_heads=4, head_dim=64, vocab_size=2048)),
        n_experts=8,
        top_k=2,
        expert_dim=192,
    ),
    "30B-A3B": SparseArgs(
        **vars(flavor(*(2048, 48, 32, 6144), n_kv_heads=4)), n_experts=128, top_k=8, expert_dim=768
    ),
    "235B-A22B": SparseArgs(
        **vars(flavor(*(4096, 94, 64, 12_288), n_kv_heads=4)),
        n_experts=128,
        top_k=8,
        expert_dim=1536,
    ),
}

QWEN3_MOE = sparse_decoder_spec(
    name="qwen3_moe",
    flavors=FLAVORS,
    settings=Qwen3MoeConfig,
    formats={"hf": HUGGING_FACE},
    open_vocabulary=("debugmodel",),
)

"""Qwen3 with mixtures of experts: settings, flavors, and its format, `Qwen3MoeForCausalLM`.

The flavors are as published (https://arxiv.org/abs/2505.09388, table 2). Attention is that of Qwen3
(`torchtitan.models.qwen3`). A token has 8 of 128 experts, whose scores are renormalized, and there
is no shared expert. Of 30B-A3B and 235B-A22B a token uses 3 and 22 billion parameters. `debugmodel`
is small enough for a laptop and still has every part.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.config import RecipeError, show
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible
from torchtitan.models.qwen3 import CONTEXT, flavor
from torchtitan.models.sparse_decoder import SparseArgs, SparseConfig, sparse_decoder_spec


class Qwen3MoeConfig(SparseConfig):
    """Qwen3 with mixtures of experts in place of the feed-forward."""

    hub: ClassVar[Mapping[str, str]] = {"qwen3_moe": "Qwen/Qwen3-30B-A3B-Base"}
    theirs: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "renormalize": "norm_topk_prob",
        "dense_layers": "mlp_only_layers",
    }


FIXED = {"decoder_sparse_step": 1, "shared_expert_intermediate_size": None}
"""Options of the architecture with the only values supported here."""
HAS: dict[str, Any] = {
    "shared_dim": 0,
    "router_scores": "softmax",
    "router_scale": 1.0,
    "router_bias": False,
    "expert_groups": 1,
}
"""Our options of which the architecture has only one value."""
EXPERTS = ("num_experts", "num_local_experts")
"""Names of the number of experts, of which transformers 5 writes the second."""


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    if problems := [*inexpressible(args, HAS, "Qwen3MoeForCausalLM")]:
        raise RecipeError(problems)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **config_of(args, seq_len or CONTEXT),
        "use_sliding_window": args.sliding_window > 0,
        "sliding_window": args.sliding_window or None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(args.dense_layers)),
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.expert_dim,
        "norm_topk_prob": args.renormalize,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    config = {"num_key_value_heads": 4, **config}
    dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
    width = dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads else None
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise RecipeError([f"mlp_only_layers: got {show(dense)}; wanted the first blocks, or none"])
    return args_in(
        {key: value for key, value in config.items() if key not in EXPERTS},
        Qwen3MoeConfig,
        FIXED,
        window=config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
        head_dim=config.get("head_dim") or width,
        n_kv_heads=config["num_key_value_heads"],
        head_norms=True,
        n_experts=next((config[key] for key in EXPERTS if key in config), 128),
        top_k=config.get("num_experts_per_tok", 8),
        expert_dim=config.get("moe_intermediate_size", 768),
        renormalize=config.get("norm_topk_prob", False),
        dense_layers=len(dense),
    )


HUGGING_FACE = decoder_format(
    architectures=["Qwen3MoeForCausalLM"],
    config=to_config,
    args=from_config,
    near={"Qwen3NextForCausalLM": "most of its blocks have linear attention"},
)


FLAVORS = {
    "debugmodel": SparseArgs(
        **vars(flavor(256, 6, 8, 768, n_kv_heads=4, head_dim=64, vocab_size=2048)),
        n_experts=8,
        top_k=2,
        expert_dim=192,
    ),
    "30B-A3B": SparseArgs(
        **vars(flavor(2048, 48, 32, 6144, n_kv_heads=4)), n_experts=128, top_k=8, expert_dim=768
    ),
    "235B-A22B": SparseArgs(
        **vars(flavor(4096, 94, 64, 12_288, n_kv_heads=4)), n_experts=128, top_k=8, expert_dim=1536
    ),
}

QWEN3_MOE = sparse_decoder_spec(
    name="qwen3_moe",
    flavors=FLAVORS,
    settings=Qwen3MoeConfig,
    formats={"hf": HUGGING_FACE},
    open_vocabulary=("debugmodel",),
)

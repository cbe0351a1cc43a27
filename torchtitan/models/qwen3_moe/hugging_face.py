"""Qwen3-MoE in Hugging Face transformers' format: `Qwen3MoeForCausalLM`."""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import RecipeError, show
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible
from torchtitan.models.qwen3.hugging_face import CONTEXT
from torchtitan.models.qwen3_moe.settings import Qwen3MoeConfig

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
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise RecipeError([f"mlp_only_layers: got {show(dense)}; wanted the first blocks, or none"])
    return args_in(
        {key: value for key, value in config.items() if key not in EXPERTS},
        Qwen3MoeConfig,
        FIXED,
        window=config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        head_norms=True,
        n_experts=next((config[key] for key in EXPERTS if key in config), 128),
        top_k=config.get("num_experts_per_tok", 8),
        expert_dim=config.get("moe_intermediate_size", 768),
        renormalize=config.get("norm_topk_prob", False),
        dense_layers=len(dense),
    )


HUGGING_FACE = decoder_format(
    architectures=["Qwen3MoeForCausalLM"], config=to_config, args=from_config
)

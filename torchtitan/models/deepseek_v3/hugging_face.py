"""DeepSeek-V3 in Hugging Face transformers' format: `DeepseekV3ForCausalLM`.

Neighbouring rotated elements form a pair there, too (`rope_interleave`), so rows have our order.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import RecipeError, show
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.deepseek_v3.settings import DeepSeekV3Config
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible

CONTEXT = 8192
"""Context of Moonlight, whose frequencies are not scaled."""
FIXED = {
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Options of the architecture with the only values supported here."""
HAS: dict[str, Any] = {"router_scores": "sigmoid", "router_bias": True, "sliding_window": 0}
"""Our options of which the architecture has only one value."""
SIZES = {
    ours: theirs
    for ours, theirs in DeepSeekV3Config.theirs.items()
    if ours not in ("query_rank", "shared_dim")  # which have other units there
}
DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
"""Values of absent keys."""


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    problems = [*inexpressible(args, HAS, "DeepseekV3ForCausalLM")]
    if args.shared_dim % args.expert_dim:
        problems.append(
            f"shared_dim: got {args.shared_dim}; DeepseekV3ForCausalLM has a multiple of "
            f"expert_dim {args.expert_dim}"
        )
    if problems:
        raise RecipeError(problems)
    scaling = args.rope_scaling
    published = round(scaling.factor * scaling.original_context) if scaling else CONTEXT
    about = config_of(args, seq_len or published)
    del about["head_dim"]  # not that of queries there
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **about,
        "q_lora_rank": args.query_rank or None,
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "n_shared_experts": args.shared_dim // args.expert_dim,
        **FIXED,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    config = {**DEFAULTS, **config}
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads", heads) != heads:
        got, wanted = show(config["num_key_value_heads"]), show(heads)
        raise RecipeError([f"num_key_value_heads: got {got}; each of the {wanted} heads has one"])
    sizes = {ours: config[theirs] for ours, theirs in SIZES.items()}
    return args_in(
        {key: value for key, value in config.items() if key != "n_routed_experts"},
        DeepSeekV3Config,
        FIXED,
        query_rank=config["q_lora_rank"] or 0,
        shared_dim=(config["n_shared_experts"] or 0) * config["moe_intermediate_size"],
        **HAS,
        **sizes,
    )


HUGGING_FACE = decoder_format(
    architectures=["DeepseekV3ForCausalLM"],
    config=to_config,
    args=from_config,
    rows=lambda args, name: None,
)

"""GPT-OSS in Hugging Face transformers' format: `GptOssForCausalLM`.

One tensor holds the experts of a block, with inputs before outputs, and the outputs of w1 and w3
in turn. Published weights are in blocks of 4 bits (MXFP4), which cannot be read.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import RecipeError, show
from torchtitan.models import hugging_face
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.gpt_oss.settings import GptOssConfig
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible
from torchtitan.models.spec import TensorShare

WINDOW = 128
"""Window of networks that do not set it, or have none; transformers requires a number."""
FIXED = {"attention_bias": True, "swiglu_alpha": 1.702}
"""Options of the architecture with the only values supported here."""
DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
"""Values of absent keys."""
SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""Scaling of a config without one."""
HAS: dict[str, Any] = {
    "router_scores": "softmax",
    "renormalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "expert_groups": 1,
}
"""Our options of which the architecture has only one value."""
WEIGHTS = {
    "experts.w1": "experts.gate_up_proj",
    "experts.w3": "experts.gate_up_proj",
    "experts.b1": "experts.gate_up_proj_bias",
    "experts.b3": "experts.gate_up_proj_bias",
    "experts.w2": "experts.down_proj",
    "experts.b2": "experts.down_proj_bias",
    "router.weight": "router.weight",
    "router.logit_bias": "router.bias",
}
"""Their names in `mlp` by ours in `mixture`."""
SHARES = {
    "w1": TensorShare(0, 2),
    "w3": TensorShare(1, 2),
    "b1": TensorShare(0, 2),
    "b3": TensorShare(1, 2),
    "w2": TensorShare(),
}
QUANTIZED = (
    "weights in MXFP4 cannot be read; write a copy in bf16 with transformers: from_pretrained(..., "
    "quantization_config=Mxfp4Config(dequantize=True)), then save_pretrained"
)


def name(ours: str) -> str:
    block, _, inner = ours.partition(".mixture.")
    if inner in WEIGHTS:
        return f"model.{block}.mlp.{WEIGHTS[inner]}"
    if ours.endswith(".sinks.weight"):
        return f"model.{block.removesuffix('.attention.sinks.weight')}.self_attn.sinks"
    return hugging_face.name(ours)


def share(ours: str) -> TensorShare | None:
    return SHARES.get(ours.rpartition(".")[2])


def kinds(n_layers: Any, window: Any) -> list[str]:
    """Return the kind of attention of each block."""
    first = "sliding_attention" if window else "full_attention"
    return [first if number % 2 == 0 else "full_attention" for number in range(n_layers)]


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    if problems := [*inexpressible(args, HAS, "GptOssForCausalLM")]:
        raise RecipeError(problems)
    about = config_of(args, seq_len or 131_072)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **about,
        **FIXED,
        **{theirs: getattr(args, ours) for ours, theirs in GptOssConfig.theirs.items()},
        "rope_scaling": about["rope_scaling"] or {"rope_type": "default"},
        "sliding_window": args.sliding_window or WINDOW,
        "layer_types": kinds(args.n_layers, args.sliding_window),
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    if config.get("quantization_config"):
        raise RecipeError([f"quantization_config: {QUANTIZED}"])
    config = {**DEFAULTS, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = SCALING
    usual = kinds(config["num_hidden_layers"], True)
    found = config.pop("layer_types", None) or usual
    if found not in (usual, kinds(len(usual), False)):
        message = f"layer_types: got {show(found)}; wanted sliding_attention in every second block"
        raise RecipeError([f"{message} from the first, or in none"])
    n_experts = config.pop("num_local_experts")
    return args_in(
        config,
        GptOssConfig,
        FIXED,
        window=config["sliding_window"] if "sliding_attention" in found else None,
        head_dim=config["head_dim"],
        expert_dim=config["intermediate_size"],
        n_experts=n_experts,
        top_k=config["num_experts_per_tok"],
        swiglu_limit=config["swiglu_limit"],
        **HAS,
    )


HUGGING_FACE = decoder_format(
    architectures=["GptOssForCausalLM"],
    config=to_config,
    args=from_config,
    name=name,
    share=share,
    fused={},
    unreadable={r".*\.mlp\.experts\..*_(blocks|scales)": QUANTIZED},
)

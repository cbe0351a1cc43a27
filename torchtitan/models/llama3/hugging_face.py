"""Llama 3 in Hugging Face transformers' format: `LlamaForCausalLM`.

The weights are the same under other names, except for the rows of the query and key projections.
There the rotary embedding pairs element i of a head with element i + E/2; Meta's, and ours, pairs
neighbours. So within each head the even rows come first there, then the odd ones.

`config.json` is written in the older form (`rope_theta` and `rope_scaling`), which every version of
transformers reads; the newer one (`rope_parameters`) is read too.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import RecipeError, show
from torchtitan.models.llama3.model import Llama3Args, RopeScaling
from torchtitan.models.llama3.settings import Llama3Config
from torchtitan.models.spec import WeightFormat

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Their module names by ours; `*` is the number of a block."""

SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Options of that architecture with the only values supported here."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def name(ours: str) -> str:
    module, _, kind = ours.rpartition(".")
    block = re.search(r"\.(\d+)\.", module)
    theirs = MODULES[re.sub(r"\.\d+\.", ".*.", module)]
    return f"{theirs.replace('*', block[1]) if block else theirs}.{kind}"


def rows(args: Llama3Args, ours: str) -> Tensor | None:
    """Return the row permutation of queries and keys: row 2i of a head to i, 2i + 1 to i + E/2."""
    heads = {"wq": args.n_heads, "wk": args.n_kv_heads}.get(ours.split(".")[-2])
    if heads is None:
        return None
    theirs = torch.arange(heads * args.head_dim).view(heads, 2, args.head_dim // 2)
    return theirs.transpose(1, 2).flatten()


def to_config(args: Llama3Args, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    scaling = args.rope_scaling
    published = 8192 if scaling is None else 131_072
    return {
        "architectures": [HUGGING_FACE.architecture],
        "model_type": "llama",
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": seq_len or published,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            **{theirs: getattr(scaling, ours) for ours, theirs in SCALING.items()},
        },
        "tie_word_embeddings": args.tied,
        **FIXED,
    }


def from_config(config: Mapping[str, Any]) -> Llama3Args:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    problems = [
        f"{key}: got {show(config[key])}; llama3 has {show(value)}"
        for key, value in FIXED.items()
        if config.get(key, value) != value
    ]
    if config.get("quantization_config"):
        problems.append("quantization_config: quantized weights cannot be read")
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    for ours, theirs in SIZES.items():
        if not isinstance(sizes[ours], int):
            problems.append(f"{theirs}: got {show(sizes[ours])}; wanted a number")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        problems.append(f"rope_scaling: got {show(rope)}; wanted an object")
        rope = {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    try:
        scaling = rope_scaling(rope)
    except RecipeError as error:
        problems += error.lines
    if not isinstance(theta, int | float):
        problems.append(f"rope_theta: got {show(theta)}; wanted a number")
    if problems:
        raise RecipeError(problems)
    args = Llama3Args(
        **sizes,
        n_kv_heads=config.get("num_key_value_heads") or sizes["n_heads"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        rope_scaling=scaling,
        tied=config.get("tie_word_embeddings", False),
    )
    args = Llama3Config.checked(args)
    head_dim = config.get("head_dim") or args.head_dim
    if head_dim != args.head_dim:
        raise RecipeError([f"head_dim: got {head_dim}; llama3 has {args.head_dim} = dim / heads"])
    return args


def rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise RecipeError([f'rope_scaling: got {show(kind)}; llama3 has "llama3", or none'])
    if absent := [theirs for theirs in SCALING.values() if theirs not in rope]:
        raise RecipeError([f"rope_scaling: it has no {', '.join(absent)}"])
    return RopeScaling(**{ours: rope[theirs] for ours, theirs in SCALING.items()})


HUGGING_FACE = WeightFormat(
    architecture="LlamaForCausalLM",
    config=to_config,
    args=from_config,
    name=name,
    rows=rows,
    repeated=lambda args: {"lm_head.weight": "tok_embeddings.weight"} if args.tied else {},
    computed=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)

"""Qwen3 in Hugging Face transformers' format: `Qwen3ForCausalLM`."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import args_in, config_of, decoder_format
from torchtitan.models.qwen3.settings import Qwen3Config

CONTEXT = 32_768
"""Context of the published base models."""


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json; blocks from `max_window_layers` on have windows."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **config_of(args, seq_len or CONTEXT),
        "use_sliding_window": args.sliding_window > 0,
        "sliding_window": args.sliding_window or None,
        "max_window_layers": 0 if args.sliding_window else args.n_layers,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    kinds = layer_types(config)
    windowed = config.get("use_sliding_window") and "sliding_attention" in kinds
    window = config.get("sliding_window", 4096) if windowed else None
    key = "layer_types" if config.get("layer_types") else "max_window_layers"
    own = {"head_dim": config.get("head_dim", 128), "head_norms": True}
    config = {**config, "layer_types": kinds}
    return args_in(config, Qwen3Config, {}, window=window, layers_key=key, **own)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of attention in the blocks."""
    if (kinds := config.get("layer_types")) or not config.get("use_sliding_window"):
        return kinds if isinstance(kinds, list) else [str(kinds or "full_attention")]
    n_layers, first = config.get("num_hidden_layers"), config.get("max_window_layers", 28)
    if not (isinstance(n_layers, int) and isinstance(first, int)):
        return [str(first)]
    return ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < n_layers)


HUGGING_FACE = decoder_format(
    architectures=["Qwen3ForCausalLM"], config=to_config, args=from_config
)

"""Qwen3 (dense): settings, flavors, and its format in transformers, `Qwen3ForCausalLM`.

The flavors are as published (https://arxiv.org/abs/2505.09388, table 1). Queries and keys are
normalized in each head, heads have 128 elements whatever the width, and the small models tie the
output to the embedding. `debugmodel` is small enough for a laptop and still has every part.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, window_of


class Qwen3Config(DecoderConfig):
    """Qwen3 (dense): a decoder of Llama's kind with a norm on each head's queries and keys."""

    hub: ClassVar[Mapping[str, str]] = {"qwen3": "Qwen/Qwen3-8B-Base"}
    theirs: ClassVar[Mapping[str, str]] = {"head_dim": "head_dim"}


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
    own = {"head_dim": config.get("head_dim", 128), "head_norms": True}
    return args_with_window(config, Qwen3Config, **own)


def args_with_window(
    config: Mapping[str, Any], settings: type[DecoderConfig], **own: Any
) -> DecoderArgs:
    """Read arguments from config.json, whose window is that of all blocks or of none."""
    kinds = layer_types(config)
    usual = {"sliding_window": 4096, **config}
    window = window_of(usual, kinds) if config.get("use_sliding_window") else None
    key = "layer_types" if config.get("layer_types") else "max_window_layers"
    config = {**config, "layer_types": kinds}
    return args_in(config, settings, {}, window=window, layers_key=key, **own)


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


def flavor(
    dim: int,
    n_layers: int,
    n_heads: int,
    ffn_dim: int,
    *,
    tied: bool = False,
    n_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 151_936,
) -> DecoderArgs:
    return DecoderArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        head_norms=True,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=tied,
    )


FLAVORS = {
    "debugmodel": flavor(256, 6, 8, 768, tied=True, n_kv_heads=4, head_dim=64, vocab_size=2048),
    "0.6B": flavor(1024, 28, 16, 3072, tied=True),
    "1.7B": flavor(2048, 28, 16, 6144, tied=True),
    "4B": flavor(2560, 36, 32, 9728, tied=True),
    "8B": flavor(4096, 36, 32, 12_288),
    "14B": flavor(5120, 40, 40, 17_408),
    "32B": flavor(5120, 64, 64, 25_600),
}

QWEN3 = decoder_spec(
    name="qwen3",
    flavors=FLAVORS,
    settings=Qwen3Config,
    formats={"hf": HUGGING_FACE},
    open_vocabulary=("debugmodel",),
)

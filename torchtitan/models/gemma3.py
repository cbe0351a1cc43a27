"""Gemma 3 (text): settings, flavors, and its format in transformers, `Gemma3ForCausalLM`.

Of six blocks, five attend to a window, with rotary frequencies of another base than those that
attend to all tokens (https://arxiv.org/abs/2503.19786, section 2). Attention and feed-forward have
a norm before and one after them, and factors of norms are 1 + weight. Embeddings are multiplied by
sqrt(dim), and the feed-forward is GeGLU (https://arxiv.org/abs/2002.05202). The flavors are as
published (table 1, and 270M); those from 4B on are without the vision tower. `debugmodel` still has
every part.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from torchtitan.config import RecipeError
from torchtitan.models import hugging_face
from torchtitan.models.decoder import DecoderArgs, SandwichBlock
from torchtitan.models.decoder_settings import LinearRopeConfig
from torchtitan.models.decoder_spec import SANDWICH_PLAN, decoder_spec
from torchtitan.models.hugging_face import args_in, config_of, decoder_format
from torchtitan.models.layers import Linear


class Gemma3Config(LinearRopeConfig):
    """Gemma 3 (text): attention to a window in most blocks, and norms around all its parts."""

    hub: ClassVar[Mapping[str, str]] = {"gemma3": "google/gemma-3-1b-pt"}
    theirs: ClassVar[Mapping[str, str]] = {
        "head_dim": "head_dim",
        "full_every": "sliding_window_pattern",
        "local_rope_theta": "rope_local_base_freq",
        "query_scalar": "query_pre_attn_scalar",
    }
    local_rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies of blocks with a window (default: the flavor's)."""
    full_every: int | None = Field(None, ge=0)
    """Period of the blocks without a window, 6 for every sixth; 0: none (default: the flavor's)."""
    query_scalar: int | None = Field(None, gt=0)
    """Number whose square root divides the attention logits (default: the flavor's)."""


EXTENDED = "its blocks have embeddings of their own, and share keys and values"
NEAR = {
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), EXTENDED),
    "Gemma3ForConditionalGeneration": "it has a vision tower; docs/weights.md shows how to write a "
    "copy of the text alone",
    "GemmaForCausalLM": "it has no windows and no norms after attention and feed-forward",
    "Gemma2ForCausalLM": "it has soft caps of logits (attn_logit_softcapping)",
}
GELU = "gelu_pytorch_tanh"
FIXED = {"hidden_act": GELU, "hidden_activation": GELU, "use_bidirectional_attention": False}
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
HAS: dict[str, Any] = {"head_norms": True, "norm": "offset", "block_norms": 4}
HAS |= {"activation": "gelu_tanh", "scaled_embeddings": True}
"""Facts of every network of this architecture."""
MODULES = hugging_face.MODULES | {
    "layers.*.attention_out_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.ffn_out_norm": "model.layers.*.post_feedforward_layernorm",
}


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    about = config_of(args, seq_len or 32_768)
    del about["hidden_act"]
    full_every = args.full_every if args.sliding_window else 1
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **{theirs: getattr(args, ours) for ours, theirs in Gemma3Config.theirs.items()},
        **about,
        "hidden_activation": GELU,
        "sliding_window": args.sliding_window or DEFAULTS["sliding_window"],
        "layer_types": hugging_face.layer_types(args.n_layers, full_every),
        "pad_token_id": None,  # or transformers would take a token for padding
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    pattern, config = config.get("sliding_window_pattern"), {**DEFAULTS, **config}
    full_every, window = hugging_face.windows(config, 6 if pattern is None else pattern)
    config["layer_types"] = None  # which `windows` has read
    if pattern not in (None, full_every):
        got = f"sliding_window_pattern {pattern} and layer_types of every {full_every}"
        raise RecipeError([f"{got} are one fact with two values; make them equal, or remove one"])
    return args_in(
        config,
        Gemma3Config,
        FIXED,
        window=window,
        full_every=full_every,
        local_rope_theta=config.pop(hugging_face.LOCAL_BASE),
        query_scalar=config["query_pre_attn_scalar"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        **HAS,
    )


def flavor(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **own: Any
) -> DecoderArgs:
    sizes: dict[str, Any] = {"dim": dim, "n_layers": n_layers, "ffn_dim": ffn_dim}
    sizes |= {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": 256, "query_scalar": 256}
    sizes |= {"vocab_size": 262_208, "sliding_window": 1024, "full_every": 6, "norm_eps": 1e-6}
    sizes |= {"rope_theta": 1e6, "local_rope_theta": 1e4, "rope_scaling": Linear(factor=8.0)}
    return DecoderArgs(**HAS | sizes | {"tied": True} | own)


SMALL: dict[str, Any] = {"rope_scaling": None, "vocab_size": 262_144, "sliding_window": 512}
DEBUG = SMALL | {"head_dim": 64, "query_scalar": 64, "vocab_size": 2048, "sliding_window": 64}
FLAVORS = {
    "debugmodel": flavor(256, 6, 4, 2, 768, **DEBUG),
    "270M": flavor(640, 18, 4, 1, 2048, **SMALL),
    "1B": flavor(1152, 26, 4, 1, 6912, **SMALL),
    "4B": flavor(2560, 34, 8, 4, 10_240),
    "12B": flavor(3840, 48, 16, 8, 15_360),
    "27B": flavor(5376, 62, 32, 16, 21_504, head_dim=128, query_scalar=168),
}

GEMMA3 = decoder_spec(
    name="gemma3",
    flavors=FLAVORS,
    settings=Gemma3Config,
    formats={
        "hf": decoder_format(
            architectures=["Gemma3ForCausalLM"],
            config=to_config,
            args=from_config,
            name=partial(hugging_face.name, modules=MODULES),
            near=NEAR,
        )
    },
    open_vocabulary=("debugmodel",),
    block=SandwichBlock,
    block_plan=SANDWICH_PLAN,
)

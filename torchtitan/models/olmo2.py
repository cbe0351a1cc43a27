"""OLMo 2: settings, flavors, and its format in transformers, `Olmo2ForCausalLM`.

Attention and feed-forward have no norm before them but one after, and the queries of all heads are
normalized together, as are the keys (https://arxiv.org/abs/2501.00656, section 3.2). The flavors
are as published (table 1, and 1B of 2025). `debugmodel` is small enough for a laptop and still has
every part.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torchtitan.config import RecipeError
from torchtitan.models import hugging_face
from torchtitan.models.decoder import DecoderArgs, NormAfterBlock
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.hugging_face import (
    args_in,
    config_of,
    decoder_format,
    inexpressible,
    with_usual_heads,
)


class Olmo2Config(DecoderConfig):
    """OLMo 2: a decoder with norms after attention and feed-forward, and of all queries or keys."""

    hub: ClassVar[Mapping[str, str]] = {"olmo2": "allenai/OLMo-2-1124-7B"}


NEAR = {
    "OlmoForCausalLM": "its norms have no weights, and stand before attention and feed-forward",
    "OlmoeForCausalLM": "it has mixtures of experts, and norms before attention and experts",
    "Olmo3ForCausalLM": "most of its blocks attend to a window",
}


MODULES = hugging_face.MODULES | {
    "layers.*.attention_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "model.layers.*.post_feedforward_layernorm",
}


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    if problems := [*inexpressible(args, {"sliding_window": 0}, "Olmo2ForCausalLM")]:
        raise RecipeError(problems)
    about = config_of(args, seq_len or 4096)
    # Without the last, transformers would take a token for padding.
    network = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    return {**network, **about, "pad_token_id": None}


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    fixed = {"sliding_window": None, "clip_qkv": None}
    config = {"rms_norm_eps": 1e-5, **config}
    own: dict[str, Any] = {"head_dim": config.get("head_dim"), "joint_norms": True}
    return with_usual_heads(args_in(config, Olmo2Config, fixed, **own))


def flavor(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, vocab_size: int = 100_352
) -> DecoderArgs:
    return DecoderArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        joint_norms=True,
    )


FLAVORS = {
    "debugmodel": flavor(256, 6, 8, 4, 768, vocab_size=2048),
    "1B": flavor(2048, 16, 16, 16, 8192),
    "7B": flavor(4096, 32, 32, 32, 11_008),
    "13B": flavor(5120, 40, 40, 40, 13_824),
    "32B": flavor(5120, 64, 40, 8, 27_648),
}

OLMO2 = decoder_spec(
    name="olmo2",
    flavors=FLAVORS,
    settings=Olmo2Config,
    formats={
        "hf": decoder_format(
            architectures=["Olmo2ForCausalLM"],
            config=to_config,
            args=from_config,
            name=partial(hugging_face.name, modules=MODULES),
            near=NEAR,
        )
    },
    open_vocabulary=("debugmodel",),
    block=NormAfterBlock,
)

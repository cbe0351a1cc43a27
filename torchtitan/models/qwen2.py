"""Qwen2 and Qwen2.5 (dense): settings, flavors, and its format in transformers, `Qwen2ForCausalLM`.

The network is Llama's, with biases of the projections to queries, keys and values
(https://arxiv.org/abs/2407.10671, section 2.2.1). The flavors are Qwen2.5 as published
(https://arxiv.org/abs/2412.15115, table 1); small models tie the output to the embedding.
`debugmodel` is small enough for a laptop and still has every part.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.models import qwen3
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.hugging_face import decoder_format, with_usual_heads


class Qwen2Config(DecoderConfig):
    """Qwen2.5 (dense): a decoder of Llama's kind with biases of queries, keys and values."""

    hub: ClassVar[Mapping[str, str]] = {"qwen2": "Qwen/Qwen2.5-7B"}


VISION = "it has a vision tower, and rotary positions in three dimensions"
NEAR = {
    "Qwen2MoeForCausalLM": "it has mixtures of experts, with a gate of the shared one",
    "Qwen2VLForConditionalGeneration": VISION,
    "Qwen2_5_VLForConditionalGeneration": VISION,
}


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    about = qwen3.to_config(args, seq_len)
    del about["attention_bias"]  # which the architecture has, without a key
    return about | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    own = {"head_dim": config.get("head_dim"), "qkv_bias": True}
    config = {"num_key_value_heads": 32, **config}
    return with_usual_heads(qwen3.args_with_window(config, Qwen2Config, **own))


def flavor(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **own: Any
) -> DecoderArgs:
    usual: dict[str, Any] = {
        "vocab_size": 152_064,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "qkv_bias": True,
    }
    return DecoderArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=ffn_dim,
        **usual | own,
    )


SMALL: dict[str, Any] = {"vocab_size": 151_936, "tied": True}
FLAVORS = {
    "debugmodel": flavor(256, 6, 8, 4, 768, vocab_size=2048, tied=True),
    "0.5B": flavor(896, 24, 14, 2, 4864, **SMALL),
    "1.5B": flavor(1536, 28, 12, 2, 8960, **SMALL),
    "3B": flavor(2048, 36, 16, 2, 11_008, **SMALL),
    "7B": flavor(3584, 28, 28, 4, 18_944),
    "14B": flavor(5120, 48, 40, 8, 13_824, norm_eps=1e-5),
    "32B": flavor(5120, 64, 40, 8, 27_648, norm_eps=1e-5),
    "72B": flavor(8192, 80, 64, 8, 29_568, norm_eps=1e-5),
}

QWEN2 = decoder_spec(
    name="qwen2",
    flavors=FLAVORS,
    settings=Qwen2Config,
    formats={
        "hf": decoder_format(
            architectures=["Qwen2ForCausalLM"], config=to_config, args=from_config, near=NEAR
        )
    },
    open_vocabulary=("debugmodel",),
)

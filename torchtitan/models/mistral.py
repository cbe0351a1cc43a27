"""Mistral: settings, flavors, and its format in transformers, `MistralForCausalLM`.

The network is Llama's, in which tokens may attend to a window (https://arxiv.org/abs/2310.06825,
section 2). The flavors are 7B v0.3 and v0.1, of which only v0.1 has a window, Nemo and Small 2501,
whose heads are narrower than dim / n_heads. `debugmodel` is small enough for a laptop and still has
every part.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, with_usual_heads


class MistralConfig(DecoderConfig):
    """Mistral: a decoder of Llama's kind whose tokens may attend to a window."""

    hub: ClassVar[Mapping[str, str]] = {"mistral": "mistralai/Mistral-7B-v0.3"}


NEAR = {
    "MinistralForCausalLM": "only some of its blocks attend to a window",
    "Ministral3ForCausalLM": "its queries grow with their position, and frequencies are scaled by "
    "YaRN",
    "Mistral3ForConditionalGeneration": "it has a vision tower",
    "Phi3ForCausalLM": "its queries, keys and values are one matrix, as are the two inner ones of "
    "the feed-forward",
}


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **config_of(args, seq_len or 32_768),
        "sliding_window": args.sliding_window or None,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    args = args_in(
        config,
        MistralConfig,
        {},
        window=config["sliding_window"],
        head_dim=config.get("head_dim"),
        n_kv_heads=config["num_key_value_heads"],
    )
    return with_usual_heads(args)


def flavor(dim: int, n_layers: int, ffn_dim: int, vocab_size: int, **own: Any) -> DecoderArgs:
    usual: dict[str, Any] = {"n_heads": 32, "n_kv_heads": 8, "rope_theta": 1e6}
    return DecoderArgs(
        dim=dim, n_layers=n_layers, ffn_dim=ffn_dim, vocab_size=vocab_size, **usual | own
    )


FLAVORS = {
    "debugmodel": flavor(256, 6, 640, 2048, n_heads=8, n_kv_heads=4, sliding_window=64),
    "7B": flavor(4096, 32, 14_336, 32_768),
    "7B-v0.1": flavor(4096, 32, 14_336, 32_000, rope_theta=1e4, sliding_window=4096),
    "Nemo-12B": flavor(5120, 40, 14_336, 131_072, head_dim=128),
    "Small-24B": flavor(5120, 40, 32_768, 131_072, head_dim=128, rope_theta=1e8),
}

MISTRAL = decoder_spec(
    name="mistral",
    flavors=FLAVORS,
    settings=MistralConfig,
    formats={
        "hf": decoder_format(
            architectures=["MistralForCausalLM"], config=to_config, args=from_config, near=NEAR
        )
    },
    open_vocabulary=("debugmodel",),
)

"""Llama 3, and networks like it, in Hugging Face transformers' format.

`LlamaForCausalLM` is also Llama 2, SmolLM and TinyLlama. `MistralForCausalLM` differs from it only
in that tokens may attend to a window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtitan.config import RecipeError
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible
from torchtitan.models.llama3.settings import Llama3Config

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
FIXED = {"mlp_bias": False}
"""Options of the architecture with the only values supported here."""


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json.

    Raises:
        RecipeError: if it is a network without norms.
    """
    if problems := [*inexpressible(args, {"norm": "rms"}, LLAMA)]:
        raise RecipeError(problems)
    about = config_of(args, seq_len) | FIXED
    if args.sliding_window:
        mistral = {"architectures": [MISTRAL], "model_type": "mistral"}
        return {**mistral, **about, "sliding_window": args.sliding_window}
    return {"architectures": [LLAMA], "model_type": "llama", **about}


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    fixed: dict[str, Any] = FIXED | {"sliding_window": None}
    if config.get("architectures") in (MISTRAL, [MISTRAL]):
        fixed = FIXED
        config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    window = None if "sliding_window" in fixed else config["sliding_window"]
    args = args_in(config, Llama3Config, fixed, window=window, head_dim=config.get("head_dim"))
    usual = replace(args, head_dim=None)
    return usual if usual.head_size == args.head_size else args


HUGGING_FACE = decoder_format(architectures=[LLAMA, MISTRAL], config=to_config, args=from_config)

"""Llama 3, 3.1 and 3.2 (text): settings, flavors, and its formats in transformers and of Meta.

8B, 70B and 405B are Llama 3.1 (https://arxiv.org/abs/2407.21783, table 3), 1B and 3B are
Llama 3.2; `debugmodel` is small enough for a laptop and still has every part.

In transformers, `LlamaForCausalLM` is also Llama 2, SmolLM and TinyLlama. A network with a window
is written as Mistral's, the only one of the two that has it.

Meta publishes `params.json` and `consolidated.*.pth`, whose names and order of rows are ours.
`params.json` has fewer facts than our arguments: not whether the output is tied to the embedding
(Meta's files repeat the matrix either way), and only a flag for rotary scaling. So a model that is
not a flavor of ours gets Meta's constants.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torchtitan.config import RecipeError, show
from torchtitan.models import mistral
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.hugging_face import (
    args_in,
    config_of,
    decoder_format,
    inexpressible,
    with_usual_heads,
)
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import WeightFormat


class Llama3Config(DecoderConfig):
    """Llama 3, 3.1 and 3.2: a decoder with rotary positions, grouped queries and SwiGLU."""

    hub: ClassVar[Mapping[str, str]] = {"llama3": "meta-llama/Llama-3.1-8B"}
    norm: Literal["rms", "none"] | None = None
    """Norms of the residual stream, before attention, feed-forward and output. none: no norms
    (default: the flavor's)."""


LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"


def to_config(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json.

    Raises:
        RecipeError: if it is a network without norms.
    """
    if problems := [*inexpressible(args, {"norm": "rms"}, LLAMA)]:
        raise RecipeError(problems)
    if args.sliding_window:
        return mistral.to_config(args, seq_len)
    about = config_of(args, seq_len)
    return {"architectures": [LLAMA], "model_type": "llama", **about, "mlp_bias": False}


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    if config.get("architectures") in (MISTRAL, [MISTRAL]):
        return mistral.from_config(config)
    fixed = {"sliding_window": None}
    return with_usual_heads(args_in(config, Llama3Config, fixed, head_dim=config.get("head_dim")))


NEAR = {
    "SmolLM3ForCausalLM": "every fourth of its blocks has no positions",
    "Llama4ForCausalLM": "it has mixtures of experts, and blocks without positions",
    "Llama4ForConditionalGeneration": "it has a vision tower, mixtures of experts, and blocks "
    "without positions",
}
HUGGING_FACE = decoder_format(
    architectures=[LLAMA, MISTRAL], config=to_config, args=from_config, near=NEAR
)


SIZES = ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of")
META_SCALING = RopeScaling(factor=8.0)


def ffn_dim(dim: int, multiplier: float, multiple_of: int) -> int:
    """Return the width of the feed-forward, as Meta's code computes it."""
    width = int(multiplier * int(2 * 4 * dim / 3))
    return -(-width // multiple_of) * multiple_of


def to_params(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the content of params.json for a network.

    Meta rounds a width up to a multiple of `multiple_of`, which is the width itself here, so that
    any width is possible.

    Raises:
        RecipeError: if it is a network that Meta's code cannot build.
    """
    if problems := [*inexpressible(args, {"norm": "rms"}, "Meta's Llama")]:
        raise RecipeError(problems)
    unknown = {
        "sliding_window": args.sliding_window,
        "head_dim": args.head_size * args.n_heads != args.dim and args.head_size,
        "head_norms": args.head_norms,
    }
    if found := {key: value for key, value in unknown.items() if value}:
        raise RecipeError(
            f"{key}: got {show(value)}; Meta's params.json has no such size; use the format hf"
            for key, value in found.items()
        )
    return {
        "dim": args.dim,
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "multiple_of": args.ffn_dim,
        "ffn_dim_multiplier": args.ffn_dim / int(2 * 4 * args.dim / 3),
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": args.rope_scaling is not None,
    }


def from_params(params: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from params.json."""
    problems = [
        f"{key}: got {show(params.get(key))}; wanted a number above 0"
        for key in SIZES
        if not isinstance(params.get(key), int) or params[key] < 1
    ]
    multiplier = params.get("ffn_dim_multiplier") or 1.0
    if not isinstance(multiplier, int | float):
        problems.append(f"ffn_dim_multiplier: got {show(multiplier)}; wanted a number")
    if not isinstance(params.get("rope_theta"), int | float):
        got = show(params.get("rope_theta"))
        problems.append(f"rope_theta: got {got}; wanted the base of the rotary embedding")
    if not isinstance(params.get("use_scaled_rope", False), bool):
        got = show(params["use_scaled_rope"])
        problems.append(f"use_scaled_rope: got {got}; wanted true or false")
    for key in ("moe_args", "vision_chunk_size", "quantization_args", "lora_args"):
        if params.get(key) not in (None, -1):
            problems.append(f"{key}: not supported by llama3")
    if problems:
        raise RecipeError(problems)
    args = DecoderArgs(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_dim=ffn_dim(params["dim"], multiplier, params["multiple_of"]),
        vocab_size=params["vocab_size"],
        norm_eps=params.get("norm_eps", 1e-5),
        rope_theta=float(params["rope_theta"]),
        rope_scaling=META_SCALING if params.get("use_scaled_rope") else None,
    )
    return Llama3Config.checked(args)


META = WeightFormat(
    config=to_params,
    args=from_params,
    name=str,
    repeated=lambda args: {"output.weight": "tok_embeddings.weight"} if args.tied else {},
    must_repeat=True,
    computed=r"rope\.freqs",
)


def flavor(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, *, factor: float, tied: bool = False
) -> DecoderArgs:
    return DecoderArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128_256,
        rope_scaling=RopeScaling(factor=factor),
        tied=tied,
    )


FLAVORS = {
    "debugmodel": DecoderArgs(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=8, ffn_dim=768, vocab_size=2048
    ),
    "1B": flavor(2048, 16, 32, 8192, factor=32.0, tied=True),
    "3B": flavor(3072, 28, 24, 8192, factor=32.0, tied=True),
    "8B": flavor(4096, 32, 32, 14_336, factor=8.0),
    "70B": flavor(8192, 80, 64, 28_672, factor=8.0),
    "405B": flavor(16_384, 126, 128, 53_248, factor=8.0),
}

LLAMA3 = decoder_spec(
    name="llama3",
    flavors=FLAVORS,
    settings=Llama3Config,
    formats={"hf": HUGGING_FACE, "meta": META},
    open_vocabulary=("debugmodel",),
)

"""Llama 3 as Meta publishes it: `params.json` and the names of `consolidated.*.pth`.

Names and the order of rows are ours. `params.json` has fewer facts than our arguments: not whether
the output is tied to the embedding (Meta's files repeat the matrix either way), and only a flag for
rotary scaling. So a model that is not a flavor of ours gets Meta's constants.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import RecipeError, show
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import inexpressible
from torchtitan.models.layers import RopeScaling
from torchtitan.models.llama3.settings import Llama3Config
from torchtitan.models.spec import WeightFormat

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

"""Sizes of a Llama 3 that a recipe can set, and the checks that they fit each other."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from torchtitan.config import Problem, RecipeError, show
from torchtitan.models.llama3.model import Llama3Args, RopeScaling
from torchtitan.models.settings import MAX_LAYERS, MAX_SIZE, TextConfig, size

ROPE = {
    "rope_scaling": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_context",
}
"""Fields of `RopeScaling` by key."""


class Llama3Config(TextConfig):
    """Llama 3, 3.1 and 3.2: a decoder with rotary positions, grouped queries and SwiGLU."""

    dim: int | None = size("Width of the residual stream", gt=0)
    n_layers: int | None = size("Number of blocks", gt=0)
    n_heads: int | None = size("Number of query heads, a divisor of dim", gt=0)
    n_kv_heads: int | None = size("Number of key/value heads, a divisor of n_heads", gt=0)
    ffn_dim: int | None = size("Hidden width of the feed-forward layers", gt=0)
    vocab_size: int | None = size(
        "Size of the vocabulary: tokens with an embedding and a logit", gt=0
    )
    norm_eps: float | None = size("Term added to the mean square in a norm", gt=0)
    rope_theta: float | None = size("Base of the rotary frequencies", gt=0)
    rope_scaling: float | None = size(
        "Divisor of low rotary frequencies, as in Llama 3.1; 1: none", ge=1
    )
    rope_low_freq_factor: float | None = size(
        "Limit of turns in the original context below which a frequency is divided by rope_scaling",
        gt=0,
    )
    rope_high_freq_factor: float | None = size(
        "Limit of turns in the original context above which a frequency is unchanged", gt=0
    )
    rope_original_context: int | None = size("Length of the original context, before scaling", gt=0)
    tied: bool | None = size("Use the embedding matrix as the output projection")

    @property
    def repository(self) -> str | None:
        return "meta-llama/Llama-3.1-8B" if self.name == "llama3" else None

    @classmethod
    def sizes_of(cls, args: Llama3Args) -> dict[str, Any]:
        scaling = args.rope_scaling or RopeScaling(factor=1.0)
        plain = {key: getattr(args, key) for key in cls.sizes() if key not in ROPE}
        return plain | {key: getattr(scaling, name) for key, name in ROPE.items()}

    @classmethod
    def checked(cls, args: Llama3Args) -> Llama3Args:
        """Return the settings of arguments written by other software, if they are valid.

        Raises:
            RecipeError: with all invalid arguments.
        """
        sizes = cls.sizes_of(args)
        try:
            config = cls.model_validate(sizes, strict=True)
        except ValidationError as error:
            raise RecipeError(
                f"{details['loc'][0]}: got {show(details['input'])}; {details['msg'].lower()}"
                for details in error.errors()
            ) from None
        problems = [f"{problem.path}: {problem.message}" for problem in config.size_problems(args)]
        for key, value in sizes.items():
            most = MAX_LAYERS if key == "n_layers" else MAX_SIZE
            if isinstance(value, int) and value > most:
                problems.append(f"{key}: got {show(value)}; wanted at most {most:,}")
        if problems:
            raise RecipeError(problems)
        return args

    def over(self, args: Llama3Args) -> Llama3Args:  # type: ignore[override]
        overrides = self.overrides()
        scaling = {name: overrides.pop(key) for key, name in ROPE.items() if key in overrides}
        changed = dataclasses.replace(args.rope_scaling or RopeScaling(factor=1.0), **scaling)
        kept = changed if changed.factor > 1 else None
        return dataclasses.replace(args, **overrides, rope_scaling=kept)

    def size_problems(self, args: Llama3Args) -> Iterator[Problem]:
        dim, heads, kv_heads = args.dim, args.n_heads, args.n_kv_heads
        if dim % heads:
            key = self.origin("n_heads", "dim")
            yield Problem(key, f"the {heads} heads do not divide the dim {dim}")
        elif (dim // heads) % 2:
            message = f"a head of dim {dim} / n_heads {heads} = {dim // heads} elements is odd"
            message += ", and rotary positions need pairs"
            yield Problem(self.origin("n_heads", "dim"), message)
        if heads % kv_heads:
            message = f"the {kv_heads} key/value heads do not divide the {heads} query heads"
            yield Problem(self.origin("n_kv_heads", "n_heads"), message)
        scaling = args.rope_scaling
        if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
            key = self.origin("rope_low_freq_factor", "rope_high_freq_factor", "rope_scaling")
            message = (
                f"the band between rope_low_freq_factor {scaling.low_freq_factor} and "
                f"rope_high_freq_factor {scaling.high_freq_factor} is empty"
            )
            yield Problem(key, message)

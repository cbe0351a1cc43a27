"""Sizes of a decoder that a recipe can set, and the checks that they fit each other."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from torchtitan.config import Problem
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.layers import Linear, RopeScaling, Scaling, Yarn
from torchtitan.models.settings import TextConfig

ROPE = {
    "rope_scaling": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_context",
}
"""Fields of `RopeScaling` by key."""
YARN = {
    "rope_scaling": "factor",
    "rope_original_context": "original_context",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_truncate": "truncate",
}
"""Fields of `Yarn` by key."""


class DecoderConfig(TextConfig):
    """A decoder with rotary positions, grouped queries and SwiGLU."""

    args_type: ClassVar[type[DecoderArgs]] = DecoderArgs
    """Class of the flavors."""
    theirs: ClassVar[Mapping[str, str]] = {}
    """Names of sizes that only this family has in Hugging Face's config.json."""
    rope: ClassVar[Mapping[str, str]] = ROPE
    """Fields of the scaling of rotary frequencies by key."""
    unscaled: ClassVar[Scaling] = RopeScaling(factor=1.0)
    """Scaling with the factor 1, which is none, and otherwise the defaults of the family."""

    dim: int | None = Field(None, gt=0)
    """Width of the residual stream (default: the flavor's)."""
    n_layers: int | None = Field(None, gt=0)
    """Number of blocks (default: the flavor's)."""
    n_heads: int | None = Field(None, gt=0)
    """Number of query heads (default: the flavor's)."""
    n_kv_heads: int | None = Field(None, gt=0)
    """Number of key/value heads, a divisor of n_heads (default: the flavor's)."""
    head_dim: int | None = Field(None, gt=0)
    """Width of a head; if no flavor sets it, dim / n_heads (default: the flavor's)."""
    ffn_dim: int | None = Field(None, gt=0)
    """Hidden width of the feed-forward layers (default: the flavor's)."""
    vocab_size: int | None = Field(None, gt=0)
    """Size of the vocabulary: tokens with an embedding and a logit (default: the flavor's)."""
    norm_eps: float | None = Field(None, gt=0)
    """Term added to the mean square in a norm (default: the flavor's)."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies (default: the flavor's)."""
    rope_scaling: float | None = Field(None, ge=1)
    """Divisor of low rotary frequencies, as in Llama 3.1; 1: none (default: the flavor's)."""
    rope_low_freq_factor: float | None = Field(None, gt=0)
    """Turns in the original context below which a frequency is divided by rope_scaling (default:
    the flavor's)."""
    rope_high_freq_factor: float | None = Field(None, gt=0)
    """Turns in the original context above which a frequency is unchanged (default: the
    flavor's)."""
    rope_original_context: int | None = Field(None, gt=0)
    """Length of the original context, before scaling (default: the flavor's)."""
    sliding_window: int | None = Field(None, ge=0)
    """Number of most recent tokens that a token attends to, itself included; 0: all (default: the
    flavor's)."""
    tied: bool | None = None
    """Use the embedding matrix as the output projection (default: the flavor's)."""
    base_width: int | None = Field(None, gt=0)
    """Dim of the narrower model for which the learning rate was tuned, by muP (default: the
    flavor's)."""

    @classmethod
    def sizes_of(cls, args: DecoderArgs) -> dict[str, Any]:
        scaling = args.rope_scaling or cls.unscaled
        plain = {key: getattr(args, key) for key in cls.sizes() if key not in cls.rope}
        return plain | {key: getattr(scaling, name) for key, name in cls.rope.items()}

    def over(self, args: DecoderArgs) -> DecoderArgs:  # type: ignore[override]
        overrides = self.overrides()
        scaling = {name: overrides.pop(key) for key, name in self.rope.items() if key in overrides}
        changed = dataclasses.replace(args.rope_scaling or self.unscaled, **scaling)
        kept = changed if changed.factor > 1 else None
        return dataclasses.replace(args, **overrides, rope_scaling=kept)

    def size_problems(self, args: DecoderArgs) -> Iterator[Problem]:
        yield from self.head_problems(args)
        scaling = args.rope_scaling
        if isinstance(scaling, RopeScaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            key = self.origin("rope_low_freq_factor", "rope_high_freq_factor", "rope_scaling")
            message = (
                f"the band between rope_low_freq_factor {scaling.low_freq_factor} and "
                f"rope_high_freq_factor {scaling.high_freq_factor} is empty"
            )
            yield Problem(key, message)
        for key, name in self.rope.items() if scaling is None else ():
            if name != "factor" and getattr(self, key) not in (None, getattr(self.unscaled, name)):
                message = "it has no effect without self.rope_scaling above 1; leave it out"
                yield Problem(key, message, ("rope_scaling",))

    def head_problems(self, args: DecoderArgs) -> Iterator[Problem]:
        """Find sizes of heads that are invalid."""
        dim, heads, kv_heads = args.dim, args.n_heads, args.n_kv_heads
        if args.head_dim is None and dim % heads:
            key = self.origin("n_heads", "dim")
            yield Problem(key, f"the {heads} heads do not divide the dim {dim}")
        elif args.head_size % 2:
            why = f"dim {dim} / n_heads {heads} = " if args.head_dim is None else ""
            message = f"a head of {why}{args.head_size} elements is odd"
            message += ", and rotary positions need pairs"
            yield Problem(self.origin("head_dim", "n_heads", "dim"), message)
        if args.base_width and args.head_dim is None and args.base_width % heads:
            message = f"the {heads} heads do not divide it; use a multiple, or set self.head_dim"
            yield Problem("base_width", message, ("n_heads",))
        if heads % kv_heads:
            message = f"the {kv_heads} key/value heads do not divide the {heads} query heads"
            yield Problem(self.origin("n_kv_heads", "n_heads"), message)


class LinearRopeConfig(DecoderConfig):
    """A decoder whose rotary frequencies are all scaled alike."""

    rope: ClassVar[Mapping[str, str]] = {"rope_scaling": "factor"}
    unscaled: ClassVar[Scaling] = Linear(factor=1.0)
    # Not keys of this family, so they are refused as unknown.
    rope_low_freq_factor: ClassVar[None] = None  # type: ignore[misc]
    rope_high_freq_factor: ClassVar[None] = None  # type: ignore[misc]
    rope_original_context: ClassVar[None] = None  # type: ignore[misc]

    rope_scaling: float | None = Field(None, ge=1)
    """Divisor of rotary frequencies; 1: none (default: the flavor's)."""


class YarnConfig(DecoderConfig):
    """A decoder whose rotary frequencies are scaled by YaRN."""

    rope: ClassVar[Mapping[str, str]] = YARN
    unscaled: ClassVar[Scaling] = Yarn(factor=1.0)
    # Not keys of this family, so they are refused as unknown.
    rope_low_freq_factor: ClassVar[None] = None  # type: ignore[misc]
    rope_high_freq_factor: ClassVar[None] = None  # type: ignore[misc]

    rope_scaling: float | None = Field(None, ge=1)
    """Divisor of low rotary frequencies, by YaRN; 1: none (default: the flavor's)."""
    rope_beta_fast: float | None = Field(None, gt=0)
    """Turns in the original context above which a frequency is unchanged (default: the
    flavor's)."""
    rope_beta_slow: float | None = Field(None, gt=0)
    """Turns in the original context below which a frequency is divided by rope_scaling (default:
    the flavor's)."""
    rope_mscale: float | None = Field(None, gt=0)
    """Growth of rotated elements with rope_scaling; 1 if rope_mscale_all_dim is 0 (default: the
    flavor's)."""
    rope_mscale_all_dim: float | None = Field(None, ge=0)
    """Growth of all elements of queries and keys with rope_scaling, by which that of rotated ones
    is divided (default: the flavor's)."""
    rope_truncate: bool | None = None
    """Round the indices of the first and the last pair between the limits outwards (default: the
    flavor's)."""

    def size_problems(self, args: DecoderArgs) -> Iterator[Problem]:
        yield from super().size_problems(args)
        scaling = args.rope_scaling
        if not isinstance(scaling, Yarn):
            return
        if args.rope_theta <= 1:
            message = f"rotary frequencies of base {args.rope_theta} cannot be scaled by YaRN"
            yield Problem(self.origin("rope_theta", "rope_scaling"), f"{message}; use more than 1")
        if scaling.mscale != 1 and not scaling.mscale_all_dim:
            key = self.origin("rope_mscale", "rope_mscale_all_dim", "rope_scaling")
            message = f"rope_mscale {scaling.mscale} needs a rope_mscale_all_dim above 0; use 1"
            yield Problem(key, message)
        if scaling.beta_fast <= scaling.beta_slow:
            key = self.origin("rope_beta_slow", "rope_beta_fast", "rope_scaling")
            message = (
                f"the band between rope_beta_slow {scaling.beta_slow} and rope_beta_fast "
                f"{scaling.beta_fast} is empty"
            )
            yield Problem(key, message)

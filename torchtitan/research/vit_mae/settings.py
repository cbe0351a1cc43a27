"""Sizes of a ViT-MAE that a recipe can set, and the checks of their combinations."""

from collections.abc import Iterator

from pydantic import Field

from torchtitan.config import Problem
from torchtitan.models.settings import MAX_LAYERS, ModelConfig
from torchtitan.research.vit_mae.model import ViTMAEArgs

MAX_WIDTH, MAX_SIDE, MAX_BANDS = 2**20, 2**14, 2**12
"""Limits beyond any model's sizes, at which derived numbers can still be computed."""


class ViTMAEConfig(ModelConfig):
    """ViT-MAE: a vision transformer, and the decoder of a masked autoencoder."""

    dim: int | None = Field(None, gt=0, le=MAX_WIDTH)
    """Width of the encoder; a multiple of 4 (default: the flavor's)."""
    n_layers: int | None = Field(None, gt=0)
    """Number of blocks of the encoder (default: the flavor's)."""
    n_heads: int | None = Field(None, gt=0)
    """Number of heads of the encoder, a divisor of dim (default: the flavor's)."""
    ffn_dim: int | None = Field(None, gt=0, le=MAX_WIDTH)
    """Hidden width of the encoder's feed-forward layers (default: the flavor's)."""
    image_size: int | None = Field(None, gt=0, le=MAX_SIDE)
    """Height and width of an image, in pixels (default: the flavor's)."""
    patch_size: int | None = Field(None, gt=0)
    """Height and width of a patch, a divisor of image_size (default: the flavor's)."""
    channels: int | None = Field(None, gt=0, le=MAX_BANDS)
    """Number of channels of an image: 3 for a photograph, more for a raster (default: the
    flavor's)."""
    mask_ratio: float | None = Field(None, gt=0, lt=1)
    """Fraction of the patches that is masked (default: the flavor's)."""
    decoder_dim: int | None = Field(None, gt=0, le=MAX_WIDTH)
    """Width of the decoder; a multiple of 4 (default: the flavor's)."""
    decoder_layers: int | None = Field(None, gt=0, le=MAX_LAYERS)
    """Number of blocks of the decoder (default: the flavor's)."""
    decoder_heads: int | None = Field(None, gt=0)
    """Number of heads of the decoder, a divisor of decoder_dim (default: the flavor's)."""
    decoder_ffn_dim: int | None = Field(None, gt=0, le=MAX_WIDTH)
    """Hidden width of the decoder's feed-forward layers (default: the flavor's)."""
    norm_eps: float | None = Field(None, gt=0)
    """Term added to the variance in a norm (default: the flavor's)."""
    pixel_mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted from it (default: the flavor's)."""
    pixel_std: tuple[float, ...] | None = None
    """Standard deviation of each channel, a divisor of it (default: the flavor's)."""

    def size_problems(self, args: ViTMAEArgs) -> Iterator[Problem]:
        for prefix, heads in (("", args.n_heads), ("decoder_", args.decoder_heads)):
            key, name = f"{prefix}dim", f"{prefix}heads" if prefix else "n_heads"
            dim = getattr(args, key)
            if dim % heads:
                message = f"the {heads} heads do not divide the {key} {dim}"
                yield Problem(self.origin(name, key), message)
            if dim % 4:
                message = (
                    f"got {dim}; wanted a multiple of 4, as a position is a sine and a cosine of "
                    "a row and of a column"
                )
                yield Problem(self.origin(key), message)
        image, patch = args.image_size, args.patch_size
        if image % patch:
            near = max(round(image / patch), 1) * patch
            message = f"patches of {patch} pixels do not divide an image of {image}; use {near}"
            yield Problem(self.origin("image_size", "patch_size"), message)
        elif not 0 < args.visible < args.patches:
            left = "nothing to see" if args.visible == 0 else "nothing to restore"
            key = self.origin("mask_ratio", "image_size", "patch_size")
            message = f"mask_ratio {args.mask_ratio} of {args.patches} patches leaves {left}"
            yield Problem(key, message)
        for key in ("pixel_mean", "pixel_std"):
            numbers = getattr(args, key)
            if len(numbers) != args.channels:
                message = (
                    f"{key} has {len(numbers)} numbers; wanted one for each of {args.channels} "
                )
                yield Problem(self.origin(key, "channels"), f"{message}channels")
        if any(number <= 0 for number in args.pixel_std):
            yield Problem(self.origin("pixel_std"), "wanted numbers > 0")

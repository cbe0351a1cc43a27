"""ViT-MAE: a vision transformer that is trained to restore the patches hidden from it.

The network of "Masked Autoencoders Are Scalable Vision Learners" (https://arxiv.org/abs/2111.06377)
as one plain `nn.Module`. The encoder (https://arxiv.org/abs/2010.11929) sees only the visible
patches, after a class token. The bridge inserts a learned token for each hidden patch and restores
the order of the image; a narrower decoder follows. A sample includes its `order`: the patches of
the image, visible ones first.

Shapes: B batch, N patches, V visible and M masked patches (N = V + M), P numbers of a patch
(channels x patch x patch), D encoder dim, W decoder dim, S positions, H heads, E head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from torchtitan.config import Problem
from torchtitan.models.settings import MAX_LAYERS, ModelConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class ViTMAEArgs:
    """Shape of one flavor."""

    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    mask_ratio: float = 0.75
    decoder_dim: int = 512
    decoder_layers: int = 8
    decoder_heads: int = 16
    decoder_ffn_dim: int = 2048
    norm_eps: float = 1e-6
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN
    pixel_std: tuple[float, ...] = IMAGENET_STD

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def grid(self) -> int:
        """Number of patches along a side."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def visible(self) -> int:
        """Number of patches that the encoder sees, rounded down, ignoring float errors."""
        return int(self.patches * (1 - self.mask_ratio) + 1e-6)

    @property
    def masked(self) -> int:
        return self.patches - self.visible

    @property
    def patch_numbers(self) -> int:
        return self.channels * self.patch_size**2


def patchify(images: Tensor, size: int) -> Tensor:
    """Convert (B, C, height, width) to (B, N, P): patches row by row, each channel by channel."""
    batch, channels, height, width = images.shape
    rows, columns = height // size, width // size
    cut = images.view(batch, channels, rows, size, columns, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * size**2)


def unpatchify(patches: Tensor, size: int) -> Tensor:
    """Invert `patchify` for square images (B, C, height, width)."""
    batch, count, _ = patches.shape
    side = math.isqrt(count)
    cut = patches.view(batch, side, side, -1, size, size)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * size, side * size)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows (B, I, ...) of `x` (B, S, D) at `index` (B, I) in each sample."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def position_table(grid: int, dim: int) -> Tensor:
    """Return sines and cosines of each patch's column, then row: (N, dim) fp32 on the CPU."""
    frequencies = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64, device="cpu") * 4 / dim)
    place = torch.arange(grid, dtype=torch.float64, device="cpu")
    angles = torch.outer(place, frequencies)
    along = torch.cat((angles.sin(), angles.cos()), 1)  # (grid, dim / 2)
    columns, rows = along.repeat(grid, 1), along.repeat_interleave(grid, 0)
    return torch.cat((columns, rows), 1).float()


class Positions(nn.Module):
    """Fixed table of positions, which is not in checkpoints."""

    table: Tensor  # (N, dim) fp32

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = grid, dim
        table = torch.empty(grid**2, dim, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the table, the same on every device."""
        if not self.table.is_meta:
            self.table = position_table(self.grid, self.dim).to(self.table.device)


class PatchEmbedding(nn.Module):
    """Patch embedding: a convolution whose stride is its kernel, as one matrix product."""

    def __init__(self, args: ViTMAEArgs) -> None:
        super().__init__()
        kernel = (args.channels, args.patch_size, args.patch_size)
        self.weight = nn.Parameter(torch.empty(args.dim, *kernel))
        self.bias = nn.Parameter(torch.empty(args.dim))

    def forward(self, patches: Tensor) -> Tensor:
        """Map (B, V, P) to (B, V, D)."""
        return F.linear(patches, self.weight.flatten(1), self.bias)


class LearnedToken(nn.Module):
    """Token that is learned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, dim))

    def forward(self, x: Tensor, count: int) -> Tensor:
        """Return `count` copies for each sample of `x` (B, S, dim): (B, count, dim)."""
        return self.token.type_as(x).expand(len(x), count, -1)


class Embeddings(nn.Module):
    """Embeddings of visible patches and their positions, after the class token."""

    def __init__(self, args: ViTMAEArgs) -> None:
        super().__init__()
        self.patch = PatchEmbedding(args)
        self.positions = Positions(args.grid, args.dim)
        self.cls = LearnedToken(args.dim)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Map (B, V, P) at `places` (B, V) to (B, V + 1, D)."""
        x = self.patch(patches)
        x = x + self.positions.table[places].type_as(x)
        return torch.cat((self.cls(x, 1), x), 1)


class Attention(nn.Module):
    """Self-attention without a mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, dim)
        self.wv = nn.Linear(dim, dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, since with tensor parallelism a rank has some of them.
        heads = (-1, self.head_dim)
        q, k, v = (
            project(x).unflatten(-1, heads).transpose(1, 2)  # (B, H, S, E)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """Two linears with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x)))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added to the residual stream."""

    def __init__(self, dim: int, heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=eps)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim, eps=eps)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Bridge(nn.Module):
    """Bridge from the encoder to the decoder: all patches, in the order of the image."""

    def __init__(self, args: ViTMAEArgs) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.project = nn.Linear(args.dim, args.decoder_dim)
        self.fill = LearnedToken(args.decoder_dim)
        self.positions = Positions(args.grid, args.decoder_dim)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        """Map (B, V + 1, D) and the order of the patches (B, N) to (B, N + 1, W)."""
        x = self.project(self.norm(x))
        hidden = self.fill(x, order.shape[1] + 1 - x.shape[1])
        patches = take(torch.cat((x[:, 1:], hidden), 1), order.argsort(1))
        return torch.cat((x[:, :1], patches + self.positions.table.type_as(x)), 1)


class ViTMAE(nn.Module):
    """ViT-MAE network.

    Build it under `torch.device("meta")`, then call `to_empty` and `init_buffers`, and draw the
    weights. A pipeline stage is this module without some parts: without `embeddings` it takes
    hidden states, without `output` it returns them.
    """

    def __init__(self, args: ViTMAEArgs, seq_len: int = 1) -> None:
        """Create the modules; `seq_len` is for text models and ignored."""
        super().__init__()
        self.args = args
        self.embeddings: Embeddings | None = Embeddings(args)
        encoder = (args.dim, args.n_heads, args.ffn_dim, args.norm_eps)
        self.layers = nn.ModuleDict({str(i): Block(*encoder) for i in range(args.n_layers)})
        self.bridge: Bridge | None = Bridge(args)
        decoder = (args.decoder_dim, args.decoder_heads, args.decoder_ffn_dim, args.norm_eps)
        self.decoder = nn.ModuleDict({str(i): Block(*decoder) for i in range(args.decoder_layers)})
        self.decoder_norm: nn.LayerNorm | None = nn.LayerNorm(args.decoder_dim, eps=args.norm_eps)
        self.output: nn.Linear | None = nn.Linear(args.decoder_dim, args.patch_numbers)

    def init_buffers(self) -> None:
        """Fill the buffers; call it after `to_empty` or a change of dtype."""
        for part in (self.embeddings, self.bridge):
            if part is not None:
                part.positions.init_buffers()

    def forward(self, patches: Tensor, order: Tensor) -> Tensor:
        """Predict the masked patches: (B, M, P), in the order of `order[:, V:]`.

        Args:
            patches: patches (B, V, P) at `order[:, :V]`; or hidden states for a later stage of a
                pipeline.
            order: indices of patches in the image (B, N), int64, visible ones first.
        """
        x = self._decode(self._encode(patches, order), order)
        if self.output is None:
            return x
        return self._predict(take(x, order[:, self.args.visible :] + 1))

    def _encode(self, x: Tensor, order: Tensor) -> Tensor:
        if self.embeddings is not None:
            x = self.embeddings(x, order[:, : x.shape[1]])
        for block in self.layers.values():
            x = block(x)
        return x

    def _decode(self, x: Tensor, order: Tensor) -> Tensor:
        if self.bridge is not None:
            x = self.bridge(x, order)
        for block in self.decoder.values():
            x = block(x)
        return x

    def _predict(self, x: Tensor) -> Tensor:
        assert self.decoder_norm is not None, "it is on the stage of the output"
        assert self.output is not None, "it was asked for"
        predicted: Tensor = self.output(self.decoder_norm(x))
        return predicted

    def encode(self, images: Tensor) -> Tensor:
        """Return features of whole images, unmasked: the class token's, then the patches'.

        Args:
            images: (B, C, height, width), as `normalize` makes them.

        Returns:
            (B, N + 1, D), normalised.
        """
        assert self.bridge is not None, "a whole network"
        patches = patchify(images, self.args.patch_size)
        order = torch.arange(self.args.patches, device=images.device).expand(len(images), -1)
        features: Tensor = self.bridge.norm(self._encode(patches, order))
        return features


def normalize(images: Tensor, args: ViTMAEArgs) -> Tensor:
    """Normalise images in 0..1, (..., C, height, width), for the network."""
    mean, std = _pixels(images, args)
    return (images - mean) / std


def restore(images: Tensor, args: ViTMAEArgs) -> Tensor:
    """Invert `normalize`."""
    mean, std = _pixels(images, args)
    return images * std + mean


def _pixels(images: Tensor, args: ViTMAEArgs) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, (C, 1, 1), on the images' device."""
    mean, std = (
        torch.tensor(numbers, dtype=images.dtype, device=images.device)[:, None, None]
        for numbers in (args.pixel_mean, args.pixel_std)
    )
    return mean, std


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
        wanted = f"wanted one for each of {args.channels} channels"
        for key in ("pixel_mean", "pixel_std"):
            if (count := len(getattr(args, key))) != args.channels:
                message = f"{key} has {count} numbers; {wanted}"
                yield Problem(self.origin(key, "channels"), message)
        if any(number <= 0 for number in args.pixel_std):
            yield Problem(self.origin("pixel_std"), "wanted numbers > 0")

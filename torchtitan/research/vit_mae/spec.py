"""Facts about ViT-MAE: its flavors, the initialization of its weights, and the cost of an image.

The sizes are those of "Pretraining Billion-scale Geospatial Foundational Models on Frontier"
(https://arxiv.org/abs/2404.11706), with the published numbers of parameters, of the encoder and its
table of positions. Base and huge are also those of the MAE paper, whose decoder all flavors have.
`debugmodel` is small enough for a laptop and still has every part.
"""

import dataclasses
import math

import torch
from torch import nn

from torchtitan.models.spec import (
    InitialWeight,
    MinShape,
    ModelSpec,
    SampleShapes,
    TensorRole,
    TensorSplits,
)
from torchtitan.research.vit_mae.hugging_face import HUGGING_FACE
from torchtitan.research.vit_mae.model import ViTMAE, ViTMAEArgs, ViTMAEConfig

FLAVORS = {
    "debugmodel": ViTMAEArgs(
        dim=64,
        n_layers=4,
        n_heads=4,
        ffn_dim=256,
        image_size=32,
        patch_size=4,
        decoder_dim=32,
        decoder_layers=2,
        decoder_heads=4,
        decoder_ffn_dim=128,
        pixel_mean=(0.5, 0.5, 0.5),
        pixel_std=(0.25, 0.25, 0.25),
    ),
    "base": ViTMAEArgs(dim=768, n_layers=12, n_heads=12, ffn_dim=3072),
    "huge": ViTMAEArgs(dim=1280, n_layers=32, n_heads=16, ffn_dim=5120),
    "1B": ViTMAEArgs(dim=1536, n_layers=32, n_heads=16, ffn_dim=6144),
    "3B": ViTMAEArgs(dim=2816, n_layers=32, n_heads=32, ffn_dim=11264),
    "5B": ViTMAEArgs(dim=2816, n_layers=56, n_heads=32, ffn_dim=11264),
    "15B": ViTMAEArgs(dim=5040, n_layers=48, n_heads=48, ffn_dim=20160),
}

DECODER = ("bridge", "decoder.*")


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the encoder's blocks, the bridge to the decoder, and the decoder's blocks."""
    encoder, decoder = model.get_submodule("layers"), model.get_submodule("decoder")
    found = {f"layers.{name}": block for name, block in encoder.named_children()}
    bridge = dict(model.named_children()).get("bridge")
    if bridge is not None:
        found["bridge"] = bridge
    return found | {f"decoder.{name}": block for name, block in decoder.named_children()}


def init_std(args: ViTMAEArgs, name: str) -> InitialWeight:
    """Return Xavier's deviation for a matrix, by its inputs and outputs; 0.02 for learned tokens.

    The published network draws its matrices from a uniform distribution with the same deviation.
    """
    module, _, kind = name.rpartition(".")
    if kind == "token":
        return 0.02
    if kind == "bias":
        return "zeros"
    if module.endswith("norm"):
        return "ones"
    of_encoder = module.startswith("layers.")
    dim = args.dim if of_encoder else args.decoder_dim
    ffn_dim = args.ffn_dim if of_encoder else args.decoder_ffn_dim
    ends = {
        "embeddings.patch": args.patch_numbers + args.dim,
        "bridge.project": args.dim + args.decoder_dim,
        "output": args.decoder_dim + args.patch_numbers,
    }
    in_ffn = module.endswith((".w1", ".w2"))
    return math.sqrt(2 / ends.get(module, dim + ffn_dim if in_ffn else 2 * dim))


def shapes(args: ViTMAEArgs, seq_len: int) -> SampleShapes:
    """Return shapes of an image: class token and visible patches (encoder), or all (decoder)."""
    return SampleShapes(
        inputs=(args.visible, args.patch_numbers),
        hidden=(args.visible + 1, args.dim),
        outputs=(args.masked, args.patch_numbers),
        input_dtype=torch.float32,
        others=dict.fromkeys(DECODER, (args.patches + 1, args.decoder_dim)),
    )


def flops_of(args: ViTMAEArgs, seq_len: int, name: str) -> float:
    """Return the floating-point operations of a part, forward and backward, for an image.

    A weight costs 6 for each position that it is multiplied with, and attention 12 for each element
    of a position and each position: 4 in the forward, 8 in the backward.
    """
    sizes = {
        "layers": (args.dim, args.ffn_dim, args.visible + 1),
        "decoder": (args.decoder_dim, args.decoder_ffn_dim, args.patches + 1),
    }
    if found := sizes.get(name.partition(".")[0]):
        dim, ffn_dim, positions = found
        return positions * (6 * (4 * dim**2 + 2 * dim * ffn_dim) + 12 * positions * dim)
    products = {
        "embeddings": args.visible * args.patch_numbers * args.dim,
        "bridge": (args.visible + 1) * args.dim * args.decoder_dim,
        "output": args.masked * args.decoder_dim * args.patch_numbers,
    }
    return 6 * products.get(name, 0)


def flops_per_unit(args: ViTMAEArgs, seq_len: int) -> int:
    """Return the operations of all parts for an image; the encoder sees only visible patches."""
    layers = args.n_layers * flops_of(args, seq_len, "layers.0")
    layers += args.decoder_layers * flops_of(args, seq_len, "decoder.0")
    return int(layers + sum(flops_of(args, seq_len, n) for n in ("embeddings", "bridge", "output")))


def tensor_splits(args: ViTMAEArgs) -> TensorSplits:
    return TensorSplits(
        heads={"heads": args.n_heads, "decoder heads": args.decoder_heads},
        dims={"dim": args.dim, "decoder_dim": args.decoder_dim},
    )


def shrink(args: ViTMAEArgs, needed: MinShape) -> ViTMAEArgs:
    """Return the same structure with heads of 8, on images of 8 x 8 patches of 4 x 4 pixels."""
    heads = 4 * needed.tensor_ranks
    return dataclasses.replace(
        args,
        dim=8 * heads,
        n_layers=needed.n_layers,
        n_heads=heads,
        ffn_dim=32 * heads,
        image_size=32,
        patch_size=4,
        decoder_dim=8 * heads,
        decoder_heads=heads,
        decoder_layers=min(args.decoder_layers, 2),
        decoder_ffn_dim=32 * heads,
    )


BLOCK: dict[str, TensorRole] = {
    "attention_norm": "norm",
    "attention": "input_gather",
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "ffn_norm": "norm",
    "feed_forward": "input_gather",
    "feed_forward.w1": "colwise",
    "feed_forward.w2": "rowwise",
}
TENSOR_PLAN: dict[str, TensorRole] = {
    "embeddings.patch": "whole",
    "embeddings.cls": "whole",
    **{f"layers.*.{name}": role for name, role in BLOCK.items()},
    "bridge.norm": "norm",
    "bridge.project": "whole",
    "bridge.fill": "whole",
    **{f"decoder.*.{name}": role for name, role in BLOCK.items()},
    "decoder_norm": "norm",
    "output": "logits",
}

VIT_MAE = ModelSpec(
    name="vit_mae",
    task="masked_autoencoder",
    flavors=FLAVORS,
    settings=ViTMAEConfig,
    build=ViTMAE,
    blocks=blocks,
    init_std=init_std,
    before_blocks=("embeddings",),
    after_blocks=("decoder_norm", "output"),
    tensor_plan=TENSOR_PLAN,
    tensor_splits=tensor_splits,
    roles={"*.token": "embedding"},
    shapes=shapes,
    flops_per_unit=flops_per_unit,
    flops_of=flops_of,
    shrink=shrink,
    formats={"hf": HUGGING_FACE},
)

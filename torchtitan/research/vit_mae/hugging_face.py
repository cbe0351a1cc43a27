"""ViT-MAE as Hugging Face transformers has it: `ViTMAEForPreTraining`.

The weights are the same under other names, but for the rows of the last matrix: a patch there has
its channels together for each pixel, and ours has its pixels together for each channel, as the
convolution of the first. The tables of positions are tensors there: they are written, and where
they are read they have to be ours, since versions of transformers fill new ones differently.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from torchtitan.config import RecipeError, show
from torchtitan.models.spec import WeightFormat
from torchtitan.research.vit_mae.model import ViTMAEArgs, position_table
from torchtitan.research.vit_mae.settings import ViTMAEConfig

MODULES = {
    "embeddings.patch": "vit.embeddings.patch_embeddings.projection",
    "bridge.norm": "vit.layernorm",
    "bridge.project": "decoder.decoder_embed",
    "decoder_norm": "decoder.decoder_norm",
    "output": "decoder.decoder_pred",
}
TOKENS = {
    "embeddings.cls.token": "vit.embeddings.cls_token",
    "bridge.fill.token": "decoder.mask_token",
}
BLOCKS = {"layers": "vit.encoder.layer", "decoder": "decoder.decoder_layers"}
IN_BLOCK = {
    "attention_norm": "layernorm_before",
    "attention.wq": "attention.attention.query",
    "attention.wk": "attention.attention.key",
    "attention.wv": "attention.attention.value",
    "attention.wo": "attention.output.dense",
    "ffn_norm": "layernorm_after",
    "feed_forward.w1": "intermediate.dense",
    "feed_forward.w2": "output.dense",
}
"""Our modules and theirs, also within a block."""

SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "channels": "num_channels",
    "decoder_dim": "decoder_hidden_size",
    "decoder_layers": "decoder_num_hidden_layers",
    "decoder_heads": "decoder_num_attention_heads",
    "decoder_ffn_dim": "decoder_intermediate_size",
}
FIXED = {"hidden_act": "gelu", "qkv_bias": True}
"""What other networks of that architecture may have, and ours has not."""


def name(ours: str) -> str:
    if ours in TOKENS:
        return TOKENS[ours]
    module, _, kind = ours.rpartition(".")
    block = re.fullmatch(r"(layers|decoder)\.(\d+)\.(.+)", module)
    if block is None:
        return f"{MODULES[module]}.{kind}"
    return f"{BLOCKS[block[1]]}.{block[2]}.{IN_BLOCK[block[3]]}.{kind}"


def rows(args: ViTMAEArgs, ours: str) -> Tensor | None:
    """Of what is predicted: channel c of pixel i of a patch is row i C + c there."""
    if not ours.startswith("output."):
        return None
    theirs = torch.arange(args.patch_numbers).view(args.patch_size**2, args.channels)
    return theirs.T.flatten()


def constants(args: ViTMAEArgs) -> dict[str, Tensor]:
    """The tables of positions, behind zeros for the class token."""
    places = {
        "vit.embeddings.position_embeddings": args.dim,
        "decoder.decoder_pos_embed": args.decoder_dim,
    }
    return {
        theirs: torch.cat((torch.zeros(1, dim), position_table(args.grid, dim)))[None]
        for theirs, dim in places.items()
    }


def to_config(args: ViTMAEArgs, seq_len: int | None) -> dict[str, Any]:
    """The model's part of config.json."""
    return {
        "architectures": [HUGGING_FACE.architecture],
        "model_type": "vit_mae",
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "mask_ratio": args.mask_ratio,
        "layer_norm_eps": args.norm_eps,
        "norm_pix_loss": True,
        **FIXED,
    }


def from_config(config: Mapping[str, Any]) -> ViTMAEArgs:
    """Arguments from config.json; where it may leave something out, transformers' default."""
    problems = [
        f"{key}: got {show(config[key])}; vit_mae has {show(value)}"
        for key, value in FIXED.items()
        if config.get(key, value) != value
    ]
    defaults = to_config(ViTMAEArgs(dim=768, n_layers=12, n_heads=12, ffn_dim=3072), None)
    said = {ours: config.get(theirs, defaults[theirs]) for ours, theirs in SIZES.items()}
    said |= {
        "mask_ratio": config.get("mask_ratio", 0.75),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
    }
    try:
        ViTMAEConfig.model_validate({"name": "vit_mae", **said}, strict=True)
    except ValidationError as error:
        theirs = SIZES | {"mask_ratio": "mask_ratio", "norm_eps": "layer_norm_eps"}
        problems += [
            f"{theirs[str(details['loc'][0])]}: got {show(details['input'])}; "
            f"{details['msg'].lower()}"
            for details in error.errors()
        ]
    if problems:
        raise RecipeError(problems)
    args = ViTMAEArgs(**said)
    if args.channels != len(args.pixel_mean):
        # What the pixels were divided by is in no config.json.
        args = ViTMAEArgs(
            **said, pixel_mean=(0.5,) * args.channels, pixel_std=(0.25,) * args.channels
        )
    if misfits := [f"{each.path}: {each.message}" for each in ViTMAEConfig().size_problems(args)]:
        raise RecipeError(misfits)
    return args


HUGGING_FACE = WeightFormat(
    architecture="ViTMAEForPreTraining",
    config=to_config,
    args=from_config,
    name=name,
    rows=rows,
    constants=constants,
    has_tokens=False,
)

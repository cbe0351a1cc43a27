"""ViT-MAE in the format of Hugging Face transformers: `ViTMAEForPreTraining`.

The weights are the same under other names, except for the rows of the last matrix: a patch there is
ordered by pixel, then channel, and ours by channel, then pixel, as in the first layer's
convolution. The position tables are tensors there: they are written, and when read they must equal
ours, since versions of transformers initialize them differently.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import show
from torchtitan.models.spec import WeightFormat
from torchtitan.research.vit_mae.model import MAX_BANDS, ViTMAEArgs, ViTMAEConfig, position_table

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
"""Names of modules within a block, ours and theirs."""

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
"""Options of that architecture that our network does not vary."""


def name(ours: str) -> str:
    if ours in TOKENS:
        return TOKENS[ours]
    module, _, kind = ours.rpartition(".")
    block = re.fullmatch(r"(layers|decoder)\.(\d+)\.(.+)", module)
    if block is None:
        return f"{MODULES[module]}.{kind}"
    return f"{BLOCKS[block[1]]}.{block[2]}.{IN_BLOCK[block[3]]}.{kind}"


def rows(args: ViTMAEArgs, ours: str) -> Tensor | None:
    """Return the order of the output's rows: there, channel c of pixel i is row i C + c."""
    if not ours.startswith("output."):
        return None
    theirs = torch.arange(args.patch_numbers).view(args.patch_size**2, args.channels)
    return theirs.T.flatten()


def constants(args: ViTMAEArgs) -> dict[str, Tensor]:
    """Return the position tables, after zeros for the class token."""
    places = {
        "vit.embeddings.position_embeddings": args.dim,
        "decoder.decoder_pos_embed": args.decoder_dim,
    }
    return {
        theirs: torch.cat((torch.zeros(1, dim), position_table(args.grid, dim)))[None]
        for theirs, dim in places.items()
    }


def to_config(args: ViTMAEArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    return {
        "architectures": [*HUGGING_FACE.architectures],
        "model_type": "vit_mae",
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "mask_ratio": args.mask_ratio,
        "layer_norm_eps": args.norm_eps,
        "norm_pix_loss": True,
        **FIXED,
    }


def from_config(config: Mapping[str, Any]) -> ViTMAEArgs:
    """Read arguments from config.json, with transformers' defaults for optional keys."""
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
    channels = said["channels"]
    if isinstance(channels, int) and channels != 3 and channels <= MAX_BANDS:
        # config.json does not have the normalisation of pixels.
        said |= {"pixel_mean": (0.5,) * channels, "pixel_std": (0.25,) * channels}
    theirs = SIZES | {"mask_ratio": "mask_ratio", "norm_eps": "layer_norm_eps"}
    return ViTMAEConfig.checked(ViTMAEArgs(**said), theirs, problems)


HUGGING_FACE = WeightFormat(
    architectures=["ViTMAEForPreTraining"],
    config=to_config,
    args=from_config,
    name=name,
    rows=rows,
    constants=constants,
    has_tokens=False,
)

"""Mixtral: settings, flavors, and its format in transformers, `MixtralForCausalLM`.

Mistral with mixtures of experts (https://arxiv.org/abs/2401.04088, section 2): a token has 2 of 8,
weighted by the softmax over the logits of the two. Of 8x7B and 8x22B a token uses 13 and 39 billion
parameters. `debugmodel` is small enough for a laptop and still has every part.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.config import RecipeError
from torchtitan.models import hugging_face
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.hugging_face import (
    args_in,
    config_of,
    decoder_format,
    inexpressible,
    with_usual_heads,
)
from torchtitan.models.sparse_decoder import (
    SOFTMAX_OF_CHOSEN,
    AllSparseConfig,
    SparseArgs,
    sparse_decoder_spec,
)


class MixtralConfig(AllSparseConfig):
    """Mixtral: Mistral with mixtures of experts in place of the feed-forward."""

    hub: ClassVar[Mapping[str, str]] = {"mixtral": "mistralai/Mixtral-8x7B-v0.1"}
    theirs: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "intermediate_size",
    }


OTHER_RULE = "its router chooses experts by another rule, and norms have biases"
NEAR = {"PhimoeForCausalLM": OTHER_RULE, "PhiMoEForCausalLM": OTHER_RULE}
EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def name(ours: str) -> str:
    """Return the published name, which transformers writes, too."""
    theirs = hugging_face.name(ours).replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"\w+_proj(?=\.weight)", lambda found: EXPERTS.get(found[0], found[0]), theirs)


FUSED = {
    ".experts.gate_up_proj": (".experts.*.w1.weight", ".experts.*.w3.weight"),
    ".experts.down_proj": (".experts.*.w2.weight",),
}


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    if problems := [*inexpressible(args, SOFTMAX_OF_CHOSEN, "MixtralForCausalLM")]:
        raise RecipeError(problems)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **config_of(args, seq_len or 32_768),
        **{theirs: getattr(args, ours) for ours, theirs in MixtralConfig.theirs.items()},
        "sliding_window": args.sliding_window or None,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    usual = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    config = {**usual, "num_local_experts": 8, **config}
    n_experts = config.pop("num_local_experts")
    args = args_in(
        config,
        MixtralConfig,
        {},
        window=config.get("sliding_window"),
        head_dim=config.get("head_dim"),
        n_kv_heads=config["num_key_value_heads"],
        n_experts=n_experts,
        top_k=config.get("num_experts_per_tok", 2),
        expert_dim=config.get("intermediate_size"),
    )
    return with_usual_heads(args)


def flavor(dim: int, n_layers: int, n_heads: int, expert_dim: int, **own: Any) -> SparseArgs:
    usual: dict[str, Any] = {
        "n_kv_heads": 8,
        "vocab_size": 32_000,
        "rope_theta": 1e6,
        "n_experts": 8,
        "top_k": 2,
    }
    return SparseArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        ffn_dim=expert_dim,
        expert_dim=expert_dim,
        **usual | own,
    )


FLAVORS = {
    "debugmodel": flavor(256, 6, 8, 192, n_kv_heads=4, vocab_size=2048),
    "8x7B": flavor(4096, 32, 32, 14_336),
    "8x22B": flavor(6144, 56, 48, 16_384),
}

MIXTRAL = sparse_decoder_spec(
    name="mixtral",
    flavors=FLAVORS,
    settings=MixtralConfig,
    formats={
        "hf": decoder_format(
            architectures=["MixtralForCausalLM"],
            config=to_config,
            args=from_config,
            name=name,
            fused=FUSED,
            near=NEAR,
        )
    },
    open_vocabulary=("debugmodel",),
)

"""GPT-OSS (2025, arXiv:2508.10925): block, settings, flavors, and `GptOssForCausalLM`.

    attention    softmax over the visible tokens and a learned logit of the head, its sink, which
                 has no value (Xiao et al., 2023, arXiv:2309.17453, section 3.3); every second
                 block, from the first, sees a window
    expert       w2 ((u + 1) g sigmoid(1.702 g)) + b2,  g = min(w1 x + b1, 7),
                 u = w3 x + b3 between -7 and 7
    router       softmax over the logits of the chosen experts, which is what renormalized scores
                 are; the logits have a bias

All linear layers have biases, except for the output. The flavors are as published (table 1): of
`20B` and `120B` a token uses 3.6 and 5.1 billion parameters, the embedding not counted.
`debugmodel` is small enough for a laptop and still has every part.

In transformers, one tensor holds the experts of a block, with inputs before outputs, and the
outputs of w1 and w3 in turn. Published weights are in blocks of 4 bits (MXFP4), which cannot be
read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from torchtitan.config import RecipeError, show
from torchtitan.models import hugging_face
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import YarnConfig
from torchtitan.models.decoder_spec import attention
from torchtitan.models.experts import ExpertForm, Routing
from torchtitan.models.hugging_face import (
    args_in,
    config_of,
    decoder_format,
    inexpressible,
    layer_types,
    window_of,
)
from torchtitan.models.layers import Attention, RotaryEmbedding, Scaling, Yarn
from torchtitan.models.sparse_decoder import (
    SOFTMAX_OF_CHOSEN,
    SPARSE_PLAN,
    AllSparseConfig,
    SparseArgs,
    sparse_decoder_spec,
    sparse_shrink,
)
from torchtitan.models.spec import AttentionShape, MinShape, TensorShare


@dataclass(frozen=True, kw_only=True)
class GptOssArgs(SparseArgs):
    """Sizes of one flavor; `ffn_dim` equals `expert_dim`, and all blocks have experts."""

    qkv_bias: bool = True
    full_every: int = 2
    swiglu_limit: float = 7.0

    def build_attention(self, rope: RotaryEmbedding) -> nn.Module:
        return Attention(
            self.dim,
            self.n_heads,
            self.n_kv_heads,
            self.head_size,
            rope,
            window=self.sliding_window,
            qkv_bias=True,
            out_bias=True,
            scale=self.query_factor,
            has_sinks=True,
        )

    @property
    def routing(self) -> Routing:
        return replace(super().routing, has_logit_bias=True)

    @property
    def expert_form(self) -> ExpertForm:
        return ExpertForm(has_biases=True, limit=self.swiglu_limit)

    @property
    def attention_parameters(self) -> int:
        return super().attention_parameters + self.dim + self.n_heads

    @property
    def ffn_parameters(self) -> int:
        biases = self.top_k * (2 * self.expert_dim + self.dim) + self.n_experts
        return super().ffn_parameters + biases


class GptOssConfig(YarnConfig, AllSparseConfig):
    """GPT-OSS: attention with sinks, in every second block to a window, and experts with biases."""

    hub: ClassVar[Mapping[str, str]] = {"gpt_oss": "openai/gpt-oss-20b"}
    args_type: ClassVar[type[DecoderArgs]] = GptOssArgs
    unscaled: ClassVar[Scaling] = Yarn(factor=1.0, truncate=False)
    theirs: ClassVar[Mapping[str, str]] = {
        "head_dim": "head_dim",
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "intermediate_size",
        "swiglu_limit": "swiglu_limit",
    }

    sliding_window: int | None = Field(None, ge=0)
    """Number of most recent tokens that a token attends to, itself included, in every second block
    from the first; 0: all (default: the flavor's)."""
    swiglu_limit: float | None = Field(None, gt=0)
    """Limit of the two factors in an expert; the first is limited only from above (default: the
    flavor's)."""


WINDOW = 128
"""Window of networks that do not set it, or have none; transformers requires a number."""
FIXED = {"attention_bias": True, "swiglu_alpha": 1.702}
"""Options of the architecture with the only values supported here."""
DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
"""Values of absent keys."""
SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""Scaling of a config without one."""
WEIGHTS = {
    "experts.w1": "experts.gate_up_proj",
    "experts.w3": "experts.gate_up_proj",
    "experts.b1": "experts.gate_up_proj_bias",
    "experts.b3": "experts.gate_up_proj_bias",
    "experts.w2": "experts.down_proj",
    "experts.b2": "experts.down_proj_bias",
    "router.weight": "router.weight",
    "router.logit_bias": "router.bias",
}
"""Their names in `mlp` by ours in `mixture`."""
SHARES = {
    "w1": TensorShare(0, 2),
    "w3": TensorShare(1, 2),
    "b1": TensorShare(0, 2),
    "b3": TensorShare(1, 2),
    "w2": TensorShare(),
}
QUANTIZED = (
    "weights in MXFP4 cannot be read; write a copy in bf16 with transformers: from_pretrained(..., "
    "quantization_config=Mxfp4Config(dequantize=True)), then save_pretrained"
)


def name(ours: str) -> str:
    block, _, inner = ours.partition(".mixture.")
    if inner in WEIGHTS:
        return f"model.{block}.mlp.{WEIGHTS[inner]}"
    if ours.endswith(".sinks.weight"):
        return f"model.{block.removesuffix('.attention.sinks.weight')}.self_attn.sinks"
    return hugging_face.name(ours)


def share(ours: str) -> TensorShare | None:
    return SHARES.get(ours.rpartition(".")[2])


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    if problems := [*inexpressible(args, SOFTMAX_OF_CHOSEN, "GptOssForCausalLM")]:
        raise RecipeError(problems)
    about = config_of(args, seq_len or 131_072)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **about,
        **FIXED,
        **{theirs: getattr(args, ours) for ours, theirs in GptOssConfig.theirs.items()},
        "head_dim": args.head_size,
        "rope_scaling": about["rope_scaling"] or {"rope_type": "default"},
        "sliding_window": args.sliding_window or WINDOW,
        "layer_types": layer_types(args.n_layers, 2 if args.sliding_window else 1),
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    if config.get("quantization_config"):
        raise RecipeError([f"quantization_config: {QUANTIZED}"])
    config = {**DEFAULTS, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = SCALING
    usual = layer_types(config["num_hidden_layers"] or 0, 2)
    found = config.pop("layer_types", None) or usual
    if usual and found not in (usual, layer_types(len(usual), 1)):
        message = f"layer_types: got {show(found)}; wanted sliding_attention in every second block"
        raise RecipeError([f"{message} from the first, or in none"])
    n_experts = config.pop("num_local_experts")
    return args_in(
        config,
        GptOssConfig,
        FIXED,
        window=window_of(config, found),
        head_dim=config["head_dim"],
        n_kv_heads=config["num_key_value_heads"],
        expert_dim=config["intermediate_size"],
        n_experts=n_experts,
        top_k=config["num_experts_per_tok"],
        swiglu_limit=config["swiglu_limit"],
        **SOFTMAX_OF_CHOSEN,
    )


HUGGING_FACE = decoder_format(
    architectures=["GptOssForCausalLM"],
    config=to_config,
    args=from_config,
    name=name,
    share=share,
    fused={},
    unreadable={r".*\.mlp\.experts\..*_(blocks|scales)": QUANTIZED},
)


PUBLISHED: dict[str, Any] = {
    "dim": 2880,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 64,
    "ffn_dim": 2880,
    "expert_dim": 2880,
    "top_k": 4,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_scaling": Yarn(factor=32.0, truncate=False),
}
FLAVORS = {
    "debugmodel": GptOssArgs(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=64,
        ffn_dim=192,
        expert_dim=192,
        n_experts=8,
        top_k=2,
        vocab_size=2048,
        sliding_window=64,
        rope_theta=150_000.0,
    ),
    "20B": GptOssArgs(**PUBLISHED, n_layers=24, n_experts=32),
    "120B": GptOssArgs(**PUBLISHED, n_layers=36, n_experts=128),
}


def shape(args: Any) -> AttentionShape:
    """Return the sizes of attention."""
    return attention(args)._replace(has_sinks=True)


def shrink(args: Any, needed: MinShape) -> Any:
    """Return the same structure, with a window of at most 8 tokens."""
    small = sparse_shrink(args, needed)
    window = min(args.sliding_window, 8)
    return replace(small, ffn_dim=small.expert_dim, sliding_window=window)


GPT_OSS = replace(
    sparse_decoder_spec(
        name="gpt_oss",
        flavors=FLAVORS,
        settings=GptOssConfig,
        formats={"hf": HUGGING_FACE},
        open_vocabulary=("debugmodel",),
        block_plan={**SPARSE_PLAN, "attention.sinks": "sinks"},
    ),
    attention=shape,
    shrink=shrink,
)

"""DeepSeek-V3 (arXiv:2412.19437) and models of its architecture, `DeepseekV3ForCausalLM`.

`671B` is DeepSeek-V3, of which a token uses 37 billion parameters, without its module of
multi-token prediction; a recipe adds one. `16B` is Moonlight-16B-A3B (arXiv:2502.16982), of which a
token uses 3 billion: the sizes of DeepSeek-V2-Lite with the router of DeepSeek-V3. `debugmodel` is
small enough for a laptop and still has every part.

Neighbouring rotated elements form a pair in transformers, too (`rope_interleave`), so rows have our
order. Attention is in `latent_attention`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from torchtitan.config import Problem, RecipeError, show
from torchtitan.models import width
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import YarnConfig
from torchtitan.models.hugging_face import args_in, config_of, decoder_format, inexpressible
from torchtitan.models.latent_attention import LatentArgs
from torchtitan.models.layers import Scaling, Yarn
from torchtitan.models.sparse_decoder import (
    SPARSE_PLAN,
    SparseConfig,
    sparse_decoder_spec,
    sparse_shrink,
    sparse_splits,
)
from torchtitan.models.spec import MinShape, TensorRole, TensorSplits


class DeepSeekV3Config(YarnConfig, SparseConfig):
    """DeepSeek-V3: latent attention, and mixtures of experts after the first blocks."""

    hub: ClassVar[Mapping[str, str]] = {"deepseek_v3": "deepseek-ai/DeepSeek-V3-Base"}
    args_type: ClassVar[type[DecoderArgs]] = LatentArgs
    unscaled: ClassVar[Scaling] = Yarn(factor=1.0, mscale_all_dim=1.0)
    theirs: ClassVar[Mapping[str, str]] = {
        "query_rank": "q_lora_rank",
        "latent_rank": "kv_lora_rank",
        "plain_dim": "qk_nope_head_dim",
        "rotated_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
        "n_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "shared_dim": "n_shared_experts",
        "renormalize": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
        "expert_groups": "n_group",
        "top_groups": "topk_group",
        "dense_layers": "first_k_dense_replace",
    }

    # Not keys of this family, so they are refused as unknown: each query head has its key, and a
    # head has plain_dim + rotated_dim elements.
    n_kv_heads: ClassVar[None] = None  # type: ignore[misc]
    head_dim: ClassVar[None] = None  # type: ignore[misc]
    query_rank: int | None = Field(None, ge=0)
    """Width of the latent vector of queries; 0: none (default: the flavor's)."""
    latent_rank: int | None = Field(None, gt=0)
    """Width of the latent vector of keys and values (default: the flavor's)."""
    plain_dim: int | None = Field(None, gt=0)
    """Elements of a head's queries and keys that are not rotated (default: the flavor's)."""
    rotated_dim: int | None = Field(None, gt=0)
    """Elements of a head's queries and keys that are rotated, an even number; all heads share the
    rotated part of a key (default: the flavor's)."""
    value_dim: int | None = Field(None, gt=0)
    """Elements of a head's values, at most plain_dim + rotated_dim (default: the flavor's)."""

    def over(self, args: Any) -> Any:
        changed: Any = super().over(args)
        return replace(changed, n_kv_heads=changed.n_heads)

    def head_problems(self, args: Any) -> Iterator[Problem]:
        if args.rotated_dim % 2:
            message = f"got {args.rotated_dim}, which is odd, and rotary positions need pairs"
            yield Problem(self.origin("rotated_dim"), message)
        if args.value_dim > args.head_size:
            key = self.origin("value_dim", "plain_dim", "rotated_dim")
            message = (
                f"values of {args.value_dim} elements are wider than queries and keys of "
                f"{args.head_size} (plain_dim + rotated_dim), and kernels need equal widths"
            )
            yield Problem(key, message)


CONTEXT = 8192
"""Context of Moonlight, whose frequencies are not scaled."""
FIXED = {
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Options of the architecture with the only values supported here."""
HAS: dict[str, Any] = {"router_scores": "sigmoid", "router_bias": True, "sliding_window": 0}
"""Our options of which the architecture has only one value."""
SIZES = {
    ours: theirs
    for ours, theirs in DeepSeekV3Config.theirs.items()
    if ours not in ("query_rank", "shared_dim")  # which have other units there
}
DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
"""Values of absent keys."""


def to_config(args: Any, seq_len: int | None) -> dict[str, Any]:
    """Return the model's part of config.json."""
    problems = [*inexpressible(args, HAS, "DeepseekV3ForCausalLM")]
    if args.shared_dim % args.expert_dim:
        problems.append(
            f"shared_dim: got {args.shared_dim}; DeepseekV3ForCausalLM has a multiple of "
            f"expert_dim {args.expert_dim}"
        )
    if problems:
        raise RecipeError(problems)
    scaling = args.rope_scaling
    published = round(scaling.factor * scaling.original_context) if scaling else CONTEXT
    about = config_of(args, seq_len or published)
    del about["head_dim"]  # not that of queries there
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **about,
        "q_lora_rank": args.query_rank or None,
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "n_shared_experts": args.shared_dim // args.expert_dim,
        **FIXED,
    }


def from_config(config: Mapping[str, Any]) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults."""
    config = {**DEFAULTS, **config}
    heads = config.get("num_attention_heads")
    if heads is not None and config.get("num_key_value_heads") not in (None, heads):
        got, wanted = show(config["num_key_value_heads"]), show(heads)
        raise RecipeError([f"num_key_value_heads: got {got}; each of the {wanted} heads has one"])
    sizes = {ours: config[theirs] for ours, theirs in SIZES.items()}
    shared, width = config["n_shared_experts"] or 0, config["moe_intermediate_size"]
    return args_in(
        {key: value for key, value in config.items() if key != "n_routed_experts"},
        DeepSeekV3Config,
        FIXED,
        query_rank=config["q_lora_rank"] or 0,
        shared_dim=shared * width if isinstance(width, int) else 0,
        **HAS,
        **sizes,
    )


HUGGING_FACE = decoder_format(
    architectures=["DeepseekV3ForCausalLM"],
    config=to_config,
    args=from_config,
    rows=lambda args, name: None,
)


SHARED: dict[str, Any] = {"router_scores": "sigmoid", "router_bias": True, "latent_rank": 512}
HEADS: dict[str, Any] = {"plain_dim": 128, "rotated_dim": 64, "value_dim": 128}

FLAVORS = {
    "debugmodel": LatentArgs(
        **SHARED | {"latent_rank": 128},
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=8,
        query_rank=192,
        plain_dim=32,
        rotated_dim=16,
        value_dim=32,
        ffn_dim=768,
        vocab_size=2048,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        dense_layers=1,
        n_experts=16,
        top_k=4,
        expert_dim=96,
        shared_dim=96,
        router_scale=2.5,
        expert_groups=4,
        top_groups=2,
    ),
    "16B": LatentArgs(
        **SHARED,
        **HEADS,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=11_264,
        vocab_size=163_840,
        norm_eps=1e-5,
        rope_theta=50_000.0,
        dense_layers=1,
        n_experts=64,
        top_k=6,
        expert_dim=1408,
        shared_dim=2 * 1408,
        router_scale=2.446,
    ),
    "671B": LatentArgs(
        **SHARED,
        **HEADS,
        dim=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        query_rank=1536,
        ffn_dim=18_432,
        vocab_size=129_280,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=Yarn(factor=40.0, mscale_all_dim=1.0),
        dense_layers=3,
        n_experts=256,
        top_k=8,
        expert_dim=2048,
        shared_dim=2048,
        router_scale=2.5,
        expert_groups=8,
        top_groups=4,
    ),
}

LATENT_PLAN: dict[str, TensorRole] = {
    "attention.wq": "gathered_colwise",
    "attention.wq_a": "whole",
    "attention.wq_a_norm": "norm",
    "attention.wq_b": "gathered_colwise",
    "attention.wkv_a": "whole",
    "attention.wkv_a_norm": "norm",
    "attention.wkv_b": "gathered_colwise",
    "attention.shared_key": "gathered",
    "attention.wo": "rowwise",
}
OF_QUERIES = [name for name in LATENT_PLAN if ".wq" in name]


def splits(args: Any) -> TensorSplits:
    """Return the sizes that tensor-parallel ranks and FSDP must divide."""
    heads, dims = sparse_splits(args)
    of_queries = {"query_rank": args.query_rank} if args.query_rank else {}
    return TensorSplits(heads, {**dims, "latent_rank": args.latent_rank, **of_queries})


def growth(args: Any, name: str) -> tuple[float, float]:
    """Return the growth of a parameter's inputs and outputs; latent vectors do not grow."""
    of_latent = {"a": (args.growth, 1.0), "b": (1.0, args.growth), "norm": (1.0, 1.0)}
    kind = re.search(r"\.wk?[qv]_(?:a_)?(a|b|norm)\.", name)
    return of_latent[kind[1]] if kind else width.growth(args, name)


def shrink(args: Any, needed: MinShape) -> Any:
    """Return the same structure, with heads of 12 elements, of which 4 are rotated."""
    some = replace(args, n_kv_heads=args.n_heads // min(args.n_heads, 4))  # for several on a rank
    small, multiple = sparse_shrink(some, needed), needed.tensor_ranks * 8
    groups = min(args.expert_groups, 4)
    return replace(
        small,
        n_kv_heads=small.n_heads,
        query_rank=2 * multiple if args.query_rank else 0,
        latent_rank=multiple,
        plain_dim=8,
        rotated_dim=4,
        value_dim=8,
        expert_groups=groups,
        top_groups=min(args.top_groups, max(groups // 2, 1)),
    )


DEEPSEEK_V3 = replace(
    sparse_decoder_spec(
        name="deepseek_v3",
        flavors=FLAVORS,
        settings=DeepSeekV3Config,
        formats={"hf": HUGGING_FACE},
        open_vocabulary=("debugmodel",),
        block_plan={
            **{n: role for n, role in SPARSE_PLAN.items() if n.partition(".")[0] != "attention"},
            **LATENT_PLAN,
        },
        optional=OF_QUERIES,
    ),
    growth=growth,
    queries_and_keys=None,
    tensor_splits=splits,
    shrink=shrink,
)

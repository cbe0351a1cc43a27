"""Facts about DeepSeek-V3 (arXiv:2412.19437) and models of its architecture.

`671B` is DeepSeek-V3, of which a token uses 37 billion parameters, without its module of
multi-token prediction; a recipe adds one. `16B` is Moonlight-16B-A3B (arXiv:2502.16982), of which a
token uses 3 billion: the sizes of DeepSeek-V2-Lite with the router of DeepSeek-V3. `debugmodel` is
small enough for a laptop and still has every part.
"""

from dataclasses import replace
from typing import Any

from torchtitan.models.deepseek_v3.hugging_face import HUGGING_FACE
from torchtitan.models.deepseek_v3.latent_attention import LatentArgs, LatentBlock
from torchtitan.models.deepseek_v3.settings import DeepSeekV3Config
from torchtitan.models.layers import Yarn
from torchtitan.models.sparse_decoder import (
    SPARSE_PLAN,
    sparse_decoder_spec,
    sparse_shrink,
    sparse_splits,
)
from torchtitan.models.spec import MinShape, TensorRole, TensorSplits

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
        block=LatentBlock,  # type: ignore[arg-type]
        block_plan={
            **{n: role for n, role in SPARSE_PLAN.items() if n.partition(".")[0] != "attention"},
            **LATENT_PLAN,
        },
        optional=OF_QUERIES,
    ),
    queries_and_keys=None,
    tensor_splits=splits,
    shrink=shrink,
)

"""The section `[model]` for DeepSeek-V3."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from torchtitan.config import Problem
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import YarnConfig
from torchtitan.models.deepseek_v3.latent_attention import LatentArgs
from torchtitan.models.layers import RopeScaling, Yarn
from torchtitan.models.sparse_decoder import SparseConfig


class DeepSeekV3Config(YarnConfig, SparseConfig):
    """DeepSeek-V3: latent attention, and mixtures of experts after the first blocks."""

    args_type: ClassVar[type[DecoderArgs]] = LatentArgs
    unscaled: ClassVar[RopeScaling | Yarn] = Yarn(factor=1.0, mscale_all_dim=1.0)
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
    """Width of the latent vector of queries; 0: there is none (default: the flavor's)."""
    latent_rank: int | None = Field(None, gt=0)
    """Width of the latent vector of keys and values (default: the flavor's)."""
    plain_dim: int | None = Field(None, gt=0)
    """Elements of a head's queries and keys that are not rotated (default: the flavor's)."""
    rotated_dim: int | None = Field(None, gt=0)
    """Elements of a head's queries and keys that are rotated, an even number; such a part of a key
    is that of all heads (default: the flavor's)."""
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

    @property
    def repository(self) -> str | None:
        return "deepseek-ai/DeepSeek-V3-Base" if self.name == "deepseek_v3" else None

"""The section `[model]` for Qwen3-MoE."""

from collections.abc import Mapping
from typing import ClassVar

from torchtitan.models.sparse_decoder import SparseConfig


class Qwen3MoeConfig(SparseConfig):
    """Qwen3 with mixtures of experts in place of the feed-forward."""

    theirs: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "renormalize": "norm_topk_prob",
        "dense_layers": "mlp_only_layers",
    }

    @property
    def repository(self) -> str | None:
        return "Qwen/Qwen3-30B-A3B-Base" if self.name == "qwen3_moe" else None

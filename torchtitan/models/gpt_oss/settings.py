"""The section `[model]` for GPT-OSS."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import YarnConfig
from torchtitan.models.gpt_oss.block import OssArgs
from torchtitan.models.layers import RopeScaling, Yarn
from torchtitan.models.sparse_decoder import SparseConfig


class GptOssConfig(YarnConfig, SparseConfig):
    """GPT-OSS: attention with sinks, in every second block to a window, and experts with biases."""

    args_type: ClassVar[type[DecoderArgs]] = OssArgs
    unscaled: ClassVar[RopeScaling | Yarn] = Yarn(factor=1.0, truncate=False)
    theirs: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "intermediate_size",
        "swiglu_limit": "swiglu_limit",
    }

    # Not keys of this family, so they are refused as unknown: all blocks have experts, and no
    # expert computes all tokens.
    ffn_dim: ClassVar[None] = None  # type: ignore[misc]
    dense_layers: ClassVar[None] = None  # type: ignore[misc]
    shared_dim: ClassVar[None] = None  # type: ignore[misc]
    sliding_window: int | None = Field(None, ge=0)
    """Number of most recent tokens that a token attends to, itself included, in every second block
    from the first; 0: all (default: the flavor's)."""
    swiglu_limit: float | None = Field(None, gt=0)
    """Limit of the two factors in an expert, the first of which is limited above only (default:
    the flavor's)."""

    def over(self, args: Any) -> Any:
        changed: Any = super().over(args)
        return replace(changed, ffn_dim=changed.expert_dim)

    @property
    def repository(self) -> str | None:
        return "openai/gpt-oss-20b" if self.name == "gpt_oss" else None

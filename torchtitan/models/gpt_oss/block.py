"""Arguments and block of GPT-OSS (2025, arXiv:2508.10925).

    attention    softmax over the visible tokens and a learned logit of the head, its sink, which
                 has no value (Xiao et al., 2023, arXiv:2309.17453, section 3.3); every second
                 block, from the first, sees a window
    expert       w2 ((u + 1) g sigmoid(1.702 g)) + b2,  g = min(w1 x + b1, 7),
                 u = w3 x + b3 between -7 and 7
    router       softmax over the logits of the chosen experts, which is what renormalized scores
                 are; the logits have a bias

All linear layers have biases, except for the output.
"""

from dataclasses import dataclass, replace
from typing import Self

from torchtitan.models.experts import ExpertForm, Routing
from torchtitan.models.layers import Attention, RotaryEmbedding
from torchtitan.models.sparse_decoder import SparseArgs, SparseBlock


@dataclass(frozen=True, kw_only=True)
class OssArgs(SparseArgs):
    """Sizes of one flavor; `ffn_dim` equals `expert_dim`, and all blocks have experts."""

    swiglu_limit: float = 7.0

    @property
    def routing(self) -> Routing:
        return replace(super().routing, has_logit_bias=True)

    @property
    def expert_form(self) -> ExpertForm:
        return ExpertForm(has_biases=True, limit=self.swiglu_limit)

    @property
    def attention_parameters(self) -> int:
        biases = (self.n_heads + 2 * self.n_kv_heads) * self.head_size + self.dim
        return super().attention_parameters + biases + self.n_heads

    @property
    def ffn_parameters(self) -> int:
        biases = self.top_k * (2 * self.expert_dim + self.dim) + self.n_experts
        return super().ffn_parameters + biases

    def of_layer(self, number: int) -> Self:
        return replace(self, sliding_window=0) if number % 2 else self


class OssBlock(SparseBlock):
    """A block with biases and sinks."""

    def __init__(self, args: OssArgs, rope: RotaryEmbedding) -> None:
        super().__init__(args, rope)
        self.attention = Attention(
            *(args.dim, args.n_heads, args.n_kv_heads, args.head_size, rope),
            window=args.sliding_window,
            bias=True,
            has_sinks=True,
        )

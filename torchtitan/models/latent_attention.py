"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

Keys and values come from one narrow latent vector of each token, and so may queries:

    c, r = W_kva x                       latent vector, and the rotated part of all heads' keys
    k_h, v_h = W_kvb norm(c)             the rest of a head's key, and its value
    q_h = W_qb norm(W_qa x) or W_q x     of which the last elements are rotated
    scores of head h: q_h . [k_h; RoPE(r)] / sqrt(width of q_h), times YaRN's factor if there is one

All kernels and exchanges take heads of one width, so values are padded to that of queries and keys
with zeros, and the elements that these would mix are dropped. Keys and values are not kept as
latent vectors: this is training, where nothing is cached.

Shapes: B batch, S sequence, D model dim, H heads, N and R elements of a query that are not rotated
and that are, V elements of a value.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention
from torchtitan.models.layers import RotaryEmbedding, Yarn
from torchtitan.models.sparse_decoder import SparseArgs

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of the others is: as in transformers."""


@dataclass(frozen=True, kw_only=True)
class LatentArgs(SparseArgs):
    """Sizes of one flavor; `n_kv_heads` equals `n_heads`, and `head_dim` is None."""

    query_rank: int = 0  # width of the latent vector of queries; 0: there is none
    latent_rank: int  # width of that of keys and values
    plain_dim: int  # elements of queries and keys in a head that are not rotated
    rotated_dim: int  # elements that are
    value_dim: int  # at most as many as the former two together

    @property
    def head_size(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def head_growth(self) -> float:
        return 1.0

    @property
    def rotated_size(self) -> int:
        return self.rotated_dim

    def build_attention(self, rope: RotaryEmbedding) -> nn.Module:
        return LatentAttention(self, rope)

    @property
    def logits_factor(self) -> float:
        """Factor of the logits of attention, beyond that of the width."""
        scaling = self.rope_scaling
        return scaling.logits_factor if isinstance(scaling, Yarn) else 1.0

    @property
    def attention_parameters(self) -> int:
        queries, rank, latent = self.n_heads * self.head_size, self.query_rank, self.latent_rank
        of_queries = rank * (self.dim + 1 + queries) if rank else self.dim * queries
        of_latent = self.dim * (latent + self.rotated_dim) + latent
        of_heads = self.n_heads * (latent * (self.plain_dim + self.value_dim))
        return of_queries + of_latent + of_heads + self.n_heads * self.value_dim * self.dim

    @property
    def attended_size(self) -> int:
        return self.n_heads * (self.head_size + self.value_dim)


class SharedKey(nn.Module):
    """The rotated part of keys, the same for all heads.

    It is a module so that distribution can bring it to all ranks with heads.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_features = dim

    def forward(self, key: Tensor) -> Tensor:
        return key


class LatentAttention(nn.Module):
    """Causal self-attention with keys and values from a latent vector."""

    def __init__(self, args: LatentArgs, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.rope, self.factor = rope, args.logits_factor
        self.query_parts = [args.plain_dim, args.rotated_dim]
        self.key_parts = [args.plain_dim, args.value_dim]
        self.latent_parts = [args.latent_rank, args.rotated_dim]
        queries, rank = args.n_heads * args.head_size, args.query_rank
        self.has_rank = rank > 0
        if self.has_rank:
            self.wq_a = nn.Linear(args.dim, rank, bias=False)
            self.wq_a_norm = nn.RMSNorm(rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(rank, queries, bias=False)
        else:
            self.wq = nn.Linear(args.dim, queries, bias=False)
        self.wkv_a = nn.Linear(args.dim, sum(self.latent_parts), bias=False)
        self.wkv_a_norm = nn.RMSNorm(args.latent_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(args.latent_rank, args.n_heads * sum(self.key_parts), bias=False)
        self.shared_key = SharedKey(args.rotated_dim)
        self.wo = nn.Linear(args.n_heads * args.value_dim, args.dim, bias=False)
        self.attend = SelfAttention(args.sliding_window)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        q: Tensor = self.wq_b(self.wq_a_norm(self.wq_a(x))) if self.has_rank else self.wq(x)
        plain, rotated = _heads(q, self.query_parts)  # (B, S, H, N or R)
        latent, key = torch.split(self.wkv_a(x), self.latent_parts, dim=-1)
        k, v = _heads(self.wkv_b(self.wkv_a_norm(latent)), self.key_parts)  # (B, S, H, N or V)
        key = self.rope(self.shared_key(key)[:, :, None], positions)  # (B, S, 1, R)
        q = torch.cat((plain, self.rope(rotated, positions)), dim=-1)  # (B, S, H, N + R)
        if self.factor != 1:
            q = q * self.factor
        k = torch.cat((k, key.expand(-1, -1, k.shape[2], -1)), dim=-1)
        width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - width))
        mixed = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        out: Tensor = self.wo(mixed[..., :width].transpose(1, 2).flatten(2))
        return out


def _heads(x: Tensor, parts: list[int]) -> tuple[Tensor, ...]:
    """Cut features (B, S, H E) into the two parts of each head.

    The number of heads is inferred, since tensor parallelism leaves only some on this rank.
    """
    return torch.split(torch.unflatten(x, -1, (-1, sum(parts))), parts, dim=-1)

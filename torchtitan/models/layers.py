"""Parts of decoders: rotary positions, norms, attention with grouped queries, gated feed-forward,
output.

Modules are written for one device; distribution is applied from outside.

Shapes: B batch, S sequence, D model dim, H query heads, K key/value heads, E head dim,
F feed-forward dim, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of Llama 3.1's rotary frequencies beyond the original training context."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Scaling of rotary frequencies by YaRN (Peng et al., 2023, arXiv:2309.00071).

    Attention is sharper in longer contexts: with m(s) = 0.1 s ln(factor) + 1, rotated elements of
    queries and keys are multiplied by m(mscale) / m(mscale_all_dim), and all logits by
    m(mscale_all_dim)^2.
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # whether the first and the last pair between are rounded outwards

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated elements."""
        return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)

    @property
    def logits_factor(self) -> float:
        """Factor of all logits of attention."""
        return self._sharper(self.mscale_all_dim) ** 2

    def _sharper(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Scaling of all rotary frequencies alike (Chen et al., 2023, arXiv:2306.15595)."""

    factor: float


Scaling = RopeScaling | Yarn | Linear


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """Return the radians per position of each pair, (E/2,) fp32 on the CPU.

    With `RopeScaling`, a pair that turns more than `high_freq_factor` times within the original
    context keeps its frequency, one that turns less than `low_freq_factor` times is slowed down by
    `factor`, and those between are blended linearly in the number of turns. With YaRN the limits
    are `beta_fast` and `beta_slow`, and those between are blended linearly in the index of the
    pair.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, Linear):
        return frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        # The indices of pairs that turn so many times.
        first, last = (
            head_dim
            * math.log(scaling.original_context / (2 * math.pi * turns))
            / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        indices = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        slow = ((indices - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return frequencies * (1.0 - slow + slow / scaling.factor)
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Rotation of each pair of a head's elements by an angle proportional to the position.

    Neighbouring elements form a pair, as in Meta's checkpoints. One instance is shared by all
    blocks. It is a module, and its table not an argument of theirs, because FSDP's mixed precision
    casts the arguments of a block, and a table in bf16 cannot distinguish distant positions.
    """

    table: Tensor  # (S, E/2, 2) fp32: cosine and sine

    def __init__(self, head_dim: int, theta: float, scaling: Scaling | None, seq_len: int) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        table = torch.empty(seq_len, head_dim // 2, 2, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the table, in fp32 on the CPU, so that it is the same on every device."""
        if self.table.is_meta:
            return
        frequencies = rope_frequencies(self.head_dim, self.theta, self.scaling)
        positions = torch.arange(len(self.table), dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        if isinstance(self.scaling, Yarn):
            table *= self.scaling.rotated_factor
        self.table = table.to(self.table.device)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` (B, S, heads, E) to `positions` (B, S) in at least fp32; keeps its dtype."""
        cos, sin = self.table[positions][:, :, None].unbind(-1)  # (B, S, 1, E/2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = wide.reshape(*x.shape[:-1], -1, 2).unbind(-1)  # (B, S, heads, E/2)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)


class OffsetNorm(nn.RMSNorm):
    """RMS norm whose factors are 1 + weight, as in Gemma; computed in at least fp32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        factors = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, factors, self.eps).type_as(x)


class JointNorm(nn.RMSNorm):
    """RMS norm of all heads together: of (B, S, H E), whose features tensor parallelism splits."""


class Attention(nn.Module):
    """Causal self-attention in which H/K query heads share one key/value head."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope: RotaryEmbedding,
        *,
        window: int = 0,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float = 1.0,
        has_sinks: bool = False,
    ) -> None:
        """
        Args:
            window: number of most recent tokens that a token attends to, itself included; 0: all.
            q_norm, k_norm: norms of the queries and keys of each head, or if they are a
                `JointNorm`, of all heads; None: no such norms.
            qkv_bias: whether the projections to queries, keys and values have a bias.
            out_bias: whether the projection of the result has one.
            scale: factor of queries, besides the usual 1 / sqrt(E) of logits.
            has_sinks: whether each query head has a sink.
        """
        super().__init__()
        self.head_dim = head_dim
        self.rope, self.scale = rope, scale
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = Sinks(n_heads) if has_sinks else None
        self.attend = SelfAttention(window)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        q, k = self._heads(self.wq(x), self.q_norm), self._heads(self.wk(x), self.k_norm)
        if self.scale != 1:
            q = q * self.scale
        q = self.rope(q, positions).transpose(1, 2)  # (B, H, S, E)
        k = self.rope(k, positions).transpose(1, 2)  # (B, K, S, E)
        v = self._heads(self.wv(x), None).transpose(1, 2)  # (B, K, S, E)
        sinks = None if self.sinks is None else self.sinks(q)
        mixed = self.attend(q, k, v, documents, sinks)  # (B, H, S, E)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Divide features into heads (B, S, H or K, E), normalized.

        The number of heads is inferred, since tensor parallelism leaves only some on this rank.
        """
        if isinstance(norm, JointNorm):
            x, norm = norm(x), None
        heads = torch.unflatten(x, -1, (-1, self.head_dim))
        return heads if norm is None else cast(Tensor, norm(heads))


class Sinks(nn.Module):
    """A learned logit of each query head, to which attention can go instead of to tokens.

    It is a module so that it can be distributed with the heads.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self, q: Tensor) -> Tensor:
        """Return the logits (H,) of the heads of `q` (B, H, S, E)."""
        return self.weight


Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


class FeedForward(nn.Module):
    """SwiGLU or GeGLU (https://arxiv.org/abs/2002.05202): `w2(activation(w1 x) * w3 x)`."""

    def __init__(self, dim: int, ffn_dim: int, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.activation(self.w1(x)) * self.w3(x))
        return out


class TiedOutput(nn.Module):
    """Logits from the embedding matrix. A module, so that it can be distributed like any other."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

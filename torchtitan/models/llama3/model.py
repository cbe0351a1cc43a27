"""Llama 3: a decoder with rotary positions, grouped-query attention and SwiGLU.

The network of "The Llama 3 Herd of Models" (https://arxiv.org/abs/2407.21783) as one plain
`nn.Module` for one device; distribution is applied from outside, and it knows no mesh. Parameter
names and the rotary convention (neighbouring elements form a pair) are those of Meta's checkpoints.

Shapes: B batch, S sequence, D model dim, H query heads, K key/value heads, E head dim,
F feed-forward dim, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention
from torchtitan.models.llama3.prediction import AheadModule
from torchtitan.models.output import AuxiliaryHead, LinearLoss


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of Llama 3.1's rotary frequencies beyond the original training context."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Llama3Args:
    """Sizes of one flavor."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # logits come from the embedding matrix; there is no `output.weight`
    multi_token: int = 0  # number of tokens after the next that are predicted in training
    auxiliary_heads: tuple[AuxiliaryHead, ...] = ()  # heads for losses that recipes add

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ahead(self) -> int:
        """Number of tokens after the next that a batch must provide for each token."""
        return max(self.multi_token, *(head.ahead for head in self.auxiliary_heads), 0)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the radians per position of each pair, (E/2,) fp32 on the CPU.

    With scaling, a pair that turns more than `high_freq_factor` times within the original context
    keeps its frequency, one that turns less than `low_freq_factor` times is slowed down by
    `factor`, and those between are blended linearly in the number of turns.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Rotation of each pair of a head's elements by an angle proportional to the position.

    One instance is shared by all blocks. It is a module, and its table not an argument of theirs,
    because FSDP's mixed precision casts the arguments of a block, and a table in bf16 cannot
    distinguish distant positions.
    """

    table: Tensor  # (S, E/2, 2) fp32: cosine and sine

    def __init__(self, args: Llama3Args, seq_len: int) -> None:
        super().__init__()
        self.args = args
        table = torch.empty(seq_len, args.head_dim // 2, 2, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the table, in fp32 on the CPU, so that it is the same on every device."""
        if self.table.is_meta:
            return
        args = self.args
        frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
        positions = torch.arange(len(self.table), dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=-1).to(self.table.device)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` (B, S, heads, E) to `positions` (B, S) in at least fp32; keeps its dtype."""
        cos, sin = self.table[positions][:, :, None].unbind(-1)  # (B, S, 1, E/2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = wide.reshape(*x.shape[:-1], -1, 2).unbind(-1)  # (B, S, heads, E/2)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which H/K query heads share one key/value head."""

    def __init__(self, args: Llama3Args, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.rope = rope
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.attend = SelfAttention()

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        # The number of heads is inferred, since tensor parallelism leaves only some on this rank.
        heads = (-1, self.head_dim)
        q = self.rope(self.wq(x).unflatten(-1, heads), positions).transpose(1, 2)  # (B, H, S, E)
        k = self.rope(self.wk(x).unflatten(-1, heads), positions).transpose(1, 2)  # (B, K, S, E)
        v = self.wv(x).unflatten(-1, heads).transpose(1, 2)  # (B, K, S, E)
        mixed = self.attend(q, k, v, documents)  # (B, H, S, E)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, args: Llama3Args) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added to the residual stream."""

    def __init__(self, args: Llama3Args, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, rope)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, documents)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class TiedOutput(nn.Module):
    """Logits from the embedding matrix. A module, so that it can be distributed like any other."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Llama3(nn.Module):
    """The whole network, for sequences of up to `seq_len` tokens.

    Build it under `torch.device("meta")`, then call `to_empty` and `init_buffers`, and draw the
    weights. A pipeline stage is this module with parts removed: without `tok_embeddings` it takes
    hidden states, without `norm` it returns them. For multi-token prediction they are (B + A B, S,
    D) in training: the embeddings of later tokens pass through all stages unchanged. If weights are
    tied, `tok_embeddings` is read a second time at the end, so it must be sharded with the root,
    not separately.
    """

    def __init__(self, args: Llama3Args, seq_len: int) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(args, seq_len)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dict, so that the first block of a later pipeline stage is still called `layers.16`,
        # say.
        self.layers = nn.ModuleDict({str(i): Block(args, self.rope) for i in range(args.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output: nn.Module | None = (
            TiedOutput() if args.tied else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        self.loss = LinearLoss()
        self.multi_token = args.multi_token
        self.auxiliary_heads = tuple(head.name for head in args.auxiliary_heads)
        self.auxiliary = self._auxiliary(args)

    def _auxiliary(self, args: Llama3Args) -> nn.ModuleDict | None:
        """Build the modules of auxiliary losses, by name; multi-token depths are named from "1"."""
        made: dict[str, nn.Module] = {}
        for depth in range(1, args.multi_token + 1):
            block = Block(args, self.rope)
            made[str(depth)] = AheadModule(depth, args.dim, args.norm_eps, block)
        if made:
            made["ahead_loss"] = LinearLoss(is_main=False)
        made |= {head.name: head.build(args.dim) for head in args.auxiliary_heads}
        return nn.ModuleDict(made) if made else None

    def init_buffers(self) -> None:
        """Fill buffers outside of checkpoints; call it after `to_empty` or a change of dtype."""
        self.rope.init_buffers()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_targets: Tensor | None = None,
    ) -> Tensor:
        """Map token ids to logits (B, S, V), or with targets to the sum of their losses (0-d).

        Args:
            tokens: (B, S) int64, or in a later pipeline stage the output of the one before.
            positions: (B, S) int64, position of each token in its sequence; None: 0 to S - 1.
            documents: (B, S) int64, document of each token, for a mask that separates documents.
            targets: (B, S) int64; unused in all stages but the last.
            ahead_tokens: (B, S, A) int64, the tokens that follow each; for auxiliary losses.
            ahead_targets: (B, S, A) int64, the targets of `ahead_tokens`.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        depths = self.multi_token if torch.is_grad_enabled() else 0
        later: Sequence[Tensor] = ()  # A times (B, S, D)
        if self.tok_embeddings is None:
            x, *later = tokens.chunk(1 + depths)
        else:
            x = self.tok_embeddings(tokens)  # (B, S, D)
            if depths:
                assert ahead_tokens is not None, "a batch tells what follows"
                later = [self.tok_embeddings(each) for each in ahead_tokens.unbind(-1)]
        for block in self.layers.values():
            x = block(x, positions, documents)
        if self.norm is None:
            return torch.cat((x, *later)) if later else x
        hidden, x = x, self.norm(x)
        extra = self.auxiliary if torch.is_grad_enabled() else None
        if extra is not None:
            for head in self.auxiliary_heads:
                x = extra[head](x, ahead_targets)
        assert self.output is not None, "the output stands on the stage of the last norm"
        of_logits, is_tied = self.output, isinstance(self.output, TiedOutput)
        if is_tied:
            assert self.tok_embeddings is not None, "a tied output needs the embedding on its stage"
            of_logits = self.tok_embeddings
        ended: Tensor
        if targets is None:
            ended = self.output(x, of_logits.weight) if is_tied else self.output(x)
            return ended
        weight = cast(Tensor, of_logits.weight)
        ended = self.loss(x, weight, targets)
        if later:
            assert extra is not None, "its modules stand on the stage of the last norm"
            assert ahead_targets is not None, "a batch tells what follows"
            follows = zip(later, ahead_targets.unbind(-1), strict=True)
            for depth, (embedded, of_later) in enumerate(follows, 1):
                module = cast(AheadModule, extra[str(depth)])
                hidden = module(hidden, embedded, positions, documents)
                total = extra["ahead_loss"](module.norm(hidden), weight, of_later.contiguous())
                ended = module.loss(ended, total)
        return ended

"""The decoder: embedding, blocks, norm, output, and its contract with the library.

A family of models is a set of `DecoderArgs`, and a block if its own differs from
`TransformerBlock`. This module has what all of them share: pipeline stages, tied weights, the loss
without stored logits, multi-token prediction and the heads of auxiliary losses. It is one plain
`nn.Module` for one device; distribution is applied from outside, and it knows no mesh.

Shapes: B batch, S sequence, D model dim, V vocabulary, A number of tokens predicted ahead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from torchtitan.models.experts import Router
from torchtitan.models.layers import (
    Attention,
    FeedForward,
    RopeScaling,
    RotaryEmbedding,
    TiedOutput,
    Yarn,
)
from torchtitan.models.output import AuxiliaryHead, AuxiliaryLoss, LinearLoss


class AheadModule(nn.Module):
    """Multi-token prediction of one depth (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2).

    The module of depth k receives the hidden states of depth k - 1 and the embeddings of the tokens
    k positions later, and its result goes through the output of the model:

        h_k = Block(M [RMSNorm(h_(k-1)); RMSNorm(Emb(t_(i+k)))]),  loss_k: that of t_(i+k+1) by h_k

    The modules are chained, so every prediction sees the whole causal chain. The embedding and the
    output are shared with the model.
    """

    def __init__(
        self, depth: int, dim: int, norm: Callable[[], nn.Module], block: nn.Module
    ) -> None:
        super().__init__()
        self.hidden_norm = norm()
        self.token_norm = norm()
        self.project = nn.Linear(2 * dim, dim, bias=False)
        self.block = block
        self.norm = norm()
        self.loss = AuxiliaryLoss(f"multi_token_{depth}", 1.0)

    def forward(self, hidden: Tensor, embedded: Tensor, *of_tokens: Tensor | None) -> Tensor:
        """Compute the hidden states of this depth from those of the one before; all (B, S, D).

        Args:
            embedded: embeddings of the later tokens.
            of_tokens: the other arguments of a block.
        """
        both = torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), -1)
        made: Tensor = self.block(self.project(both), *of_tokens)
        return made


BlockBuilder = Callable[["DecoderArgs", RotaryEmbedding], nn.Module]
"""Function that builds a block, which is called with hidden states, positions and documents, and,
if it has experts, which tokens count."""


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """Sizes of one flavor."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm: Literal["rms", "none"] = "rms"  # norms of the residual stream
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    tied: bool = False  # logits come from the embedding matrix; there is no `output.weight`
    head_dim: int | None = None  # None: dim / n_heads
    head_norms: bool = False  # whether queries and keys of each head are normalized
    sliding_window: int = 0  # number of most recent tokens that a token attends to; 0: all
    multi_token: int = 0  # number of tokens after the next that are predicted in training
    auxiliary_heads: tuple[AuxiliaryHead, ...] = ()  # heads for losses that recipes add

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.dim // self.n_heads

    def build_norm(self) -> nn.Module:
        """Build a norm of the residual stream; without norms, an identity."""
        return nn.RMSNorm(self.dim, eps=self.norm_eps) if self.norm == "rms" else nn.Identity()

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of a norm of the residual stream."""
        return self.dim if self.norm == "rms" else 0

    @property
    def rotated_size(self) -> int:
        """Number of rotated elements of a head."""
        return self.head_size

    @property
    def ahead(self) -> int:
        """Number of tokens after the next that a batch must provide for each token."""
        return max(self.multi_token, *(head.ahead for head in self.auxiliary_heads), 0)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of a block's attention."""
        heads = 2 * (self.n_heads + self.n_kv_heads) * self.head_size
        return self.dim * heads + 2 * self.head_size * self.head_norms

    @property
    def attended_size(self) -> int:
        """Number of elements of a key and its value, for all query heads."""
        return 2 * self.n_heads * self.head_size

    @property
    def ffn_parameters(self) -> int:
        """Number of parameters of a block's feed-forward that a token uses."""
        return 3 * self.dim * self.ffn_dim

    def of_layer(self, number: int) -> Self:
        """Return the arguments of a block, or with `n_layers` those of blocks after the last."""
        return self


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normalized copy and added to the residual stream."""

    def __init__(self, args: DecoderArgs, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = args.build_norm()
        self.attention = Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_size,
            rope,
            window=args.sliding_window,
            norm_eps=args.norm_eps if args.head_norms else None,
        )
        self.ffn_norm = args.build_norm()
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, documents)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A whole network, for sequences of up to `seq_len` tokens.

    Build it under `torch.device("meta")`, then call `to_empty` and `init_buffers`, and draw the
    weights. A pipeline stage is this module with parts removed: without `tok_embeddings` it takes
    hidden states, without `norm` it returns them. For multi-token prediction they are (B + A B, S,
    D) in training: the embeddings of later tokens pass through all stages unchanged. If weights are
    tied, `tok_embeddings` is read a second time at the end, so it must be sharded with the root,
    not separately.
    """

    def __init__(
        self, args: DecoderArgs, seq_len: int, block: BlockBuilder = TransformerBlock
    ) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(args.rotated_size, args.rope_theta, args.rope_scaling, seq_len)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dict, so that the first block of a later pipeline stage is still called `layers.16`,
        # say.
        self.layers = nn.ModuleDict(
            {str(i): block(args.of_layer(i), self.rope) for i in range(args.n_layers)}
        )
        self.norm: nn.Module | None = args.build_norm()
        self.output: nn.Module | None = (
            TiedOutput() if args.tied else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        self.loss = LinearLoss()
        self.multi_token = args.multi_token
        self.auxiliary_heads = tuple(head.name for head in args.auxiliary_heads)
        self.auxiliary = self._auxiliary(args, block)

    def _auxiliary(self, args: DecoderArgs, block: BlockBuilder) -> nn.ModuleDict | None:
        """Build the modules of auxiliary losses, by name; multi-token depths are named from "1"."""
        made: dict[str, nn.Module] = {}
        for depth in range(1, args.multi_token + 1):
            own = block(args.of_layer(args.n_layers), self.rope)
            made[str(depth)] = AheadModule(depth, args.dim, args.build_norm, own)
        if made:
            made["ahead_loss"] = LinearLoss(is_main=False)
        made |= {head.name: head.build(args.dim) for head in args.auxiliary_heads}
        return nn.ModuleDict(made) if made else None

    def init_buffers(self) -> None:
        """Fill buffers outside of checkpoints; call it after `to_empty` or a change of dtype."""
        self.rope.init_buffers()
        for module in self.modules():
            if isinstance(module, Router):
                module.init_buffers()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_targets: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Map token ids to logits (B, S, V), or with targets to the sum of their losses (0-d).

        Args:
            tokens: (B, S) int64, or in a later pipeline stage the output of the one before.
            positions: (B, S) int64, position of each token in its sequence; None: 0 to S - 1.
            documents: (B, S) int64, document of each token, for a mask that separates documents.
            targets: (B, S) int64; unused in all stages but the last.
            ahead_tokens: (B, S, A) int64, the tokens that follow each; for auxiliary losses.
            ahead_targets: (B, S, A) int64, the targets of `ahead_tokens`.
            counted: (B, S) bool, the tokens with a target, for blocks with experts.
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
        of_tokens = (positions, documents) if counted is None else (positions, documents, counted)
        for block in self.layers.values():
            x = block(x, *of_tokens)
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
                hidden = module(hidden, embedded, *of_tokens)
                total = extra["ahead_loss"](module.norm(hidden), weight, of_later.contiguous())
                ended = module.loss(ended, total)
        return ended

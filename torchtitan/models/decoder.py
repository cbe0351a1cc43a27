"""The decoder: embedding, blocks, norm, output, and its contract with the library.

A family of models is a set of `DecoderArgs`, and a block if its own differs from
`TransformerBlock`. This module has what all of them share: pipeline stages, tied weights, the loss
without stored logits, multi-token prediction and the heads of auxiliary losses. It is one plain
`nn.Module` for one device; distribution is applied from outside, and it knows no mesh.

Shapes: B batch, S sequence, D model dim, V vocabulary, A number of tokens predicted ahead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from torchtitan.models.experts import Router
from torchtitan.models.layers import (
    Activation,
    Attention,
    FeedForward,
    JointNorm,
    OffsetNorm,
    RotaryEmbedding,
    Scaling,
    TiedOutput,
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
    """Sizes of one flavor. A family that overrides `build_norm` or `build_attention` also overrides
    `norm_parameters` or `attention_parameters`, which FLOPs are computed from."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm: Literal["rms", "offset", "none"] = "rms"  # norms of the residual stream
    block_norms: int = 2  # number of them in a block
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: Scaling | None = None
    local_rope_theta: float | None = None  # base in blocks with a window, unscaled; None: the same
    tied: bool = False  # logits come from the embedding matrix; there is no `output.weight`
    head_dim: int | None = None  # None: dim / n_heads
    head_norms: bool = False  # whether queries and keys of each head are normalized
    joint_norms: bool = False  # whether those of all heads are normalized together
    qkv_bias: bool = False  # whether the projections to queries, keys and values have a bias
    query_scalar: int | None = None  # logits are divided by its root; None: by that of head_size
    sliding_window: int = 0  # number of most recent tokens that a token attends to; 0: all
    full_every: int = 0  # period of blocks without a window: 6, every sixth; 0: none
    activation: Activation = "silu"  # of the feed-forward
    scaled_embeddings: bool = False  # whether embeddings are multiplied by sqrt(dim)
    multi_token: int = 0  # number of tokens after the next that are predicted in training
    auxiliary_heads: tuple[AuxiliaryHead, ...] = ()  # heads for losses that recipes add
    base_width: int | None = None  # dim of the base model of `torchtitan.models.width`

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def growth(self) -> float:
        """Width relative to that of the base model; 1 if there is none."""
        return self.dim / (self.base_width or self.dim)

    @property
    def head_growth(self) -> float:
        """Dimension of a head relative to that in the base model."""
        return self.growth if self.head_dim is None else 1.0

    @property
    def query_factor(self) -> float:
        """Factor of queries, besides the usual 1 / sqrt(head_size) of logits."""
        return math.sqrt(self.head_size / (self.query_scalar or self.head_size) / self.head_growth)

    def build_norm(self) -> nn.Module:
        """Build a norm of the residual stream; without norms, an identity."""
        return nn.Identity() if self.norm == "none" else self._norm(self.dim)

    def _norm(self, width: int) -> nn.Module:
        return (OffsetNorm if self.norm == "offset" else nn.RMSNorm)(width, eps=self.norm_eps)

    def _head_norm(self, heads: int) -> nn.Module | None:
        """Build a norm of the queries or keys of this number of heads, if they have one."""
        if self.joint_norms:
            return JointNorm(heads * self.head_size, eps=self.norm_eps)
        return self._norm(self.head_size) if self.head_norms else None

    def build_attention(self, rope: RotaryEmbedding) -> nn.Module:
        """Build the attention of a block with these arguments."""
        return Attention(
            self.dim,
            self.n_heads,
            self.n_kv_heads,
            self.head_size,
            rope,
            window=self.sliding_window,
            q_norm=self._head_norm(self.n_heads),
            k_norm=self._head_norm(self.n_kv_heads),
            qkv_bias=self.qkv_bias,
            scale=self.query_factor,
        )

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of a norm of the residual stream."""
        return 0 if self.norm == "none" else self.dim

    @property
    def rotated_size(self) -> int:
        """Number of elements that `rope` rotates: of a whole head, in `Attention`."""
        return self.head_size

    @property
    def ahead(self) -> int:
        """Number of tokens after the next that a batch must provide for each token."""
        return max(self.multi_token, *(head.ahead for head in self.auxiliary_heads), 0)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of a block's attention."""
        queries, keys = self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        biases = (queries + 2 * keys) * self.qkv_bias
        norms = 2 * self.head_size * self.head_norms + (queries + keys) * self.joint_norms
        return 2 * self.dim * (queries + keys) + biases + norms

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
        is_full = self.full_every and (number + 1) % self.full_every == 0
        return replace(self, sliding_window=0) if is_full else self


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normalized copy and added to the residual stream."""

    def __init__(self, args: DecoderArgs, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = args.build_norm()
        self.attention = args.build_attention(rope)
        self.ffn_norm = args.build_norm()
        self.feed_forward = FeedForward(args.dim, args.ffn_dim, args.activation)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, documents)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class NormAfterBlock(TransformerBlock):
    """A block that normalizes what it adds to the residual stream, and not its inputs."""

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention_norm(self.attention(x, positions, documents))
        out: Tensor = x + self.ffn_norm(self.feed_forward(x))
        return out


class SandwichBlock(TransformerBlock):
    """A block that normalizes what it adds to the residual stream as well as its inputs."""

    def __init__(self, args: DecoderArgs, rope: RotaryEmbedding) -> None:
        super().__init__(args, rope)
        self.attention_out_norm = args.build_norm()
        self.ffn_out_norm = args.build_norm()

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        added = self.attention(self.attention_norm(x), positions, documents)
        x = x + self.attention_out_norm(added)
        out: Tensor = x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))
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
        self.local_rope: RotaryEmbedding | None = None
        if (theta := args.local_rope_theta) is not None:
            self.local_rope = RotaryEmbedding(args.rotated_size, theta, None, seq_len)
        width = args.base_width or args.dim
        self.embedding_scale = math.sqrt(width) if args.scaled_embeddings else 1.0
        self.logits_scale = 1 / args.growth
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dict, so that the first block of a later pipeline stage is still called `layers.16`,
        # say.
        self.layers = nn.ModuleDict(
            {str(i): self._block(args.of_layer(i), block) for i in range(args.n_layers)}
        )
        self.norm: nn.Module | None = args.build_norm()
        self.output: nn.Module | None = (
            TiedOutput() if args.tied else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        self.loss = LinearLoss()
        self.multi_token = args.multi_token
        self.auxiliary_heads = tuple(head.name for head in args.auxiliary_heads)
        self.auxiliary = self._auxiliary(args, block)

    def _block(self, args: DecoderArgs, block: BlockBuilder) -> nn.Module:
        local = self.local_rope if args.sliding_window else None
        return block(args, local or self.rope)

    def _auxiliary(self, args: DecoderArgs, block: BlockBuilder) -> nn.ModuleDict | None:
        """Build the modules of auxiliary losses, by name; multi-token depths are named from "1"."""
        made: dict[str, nn.Module] = {}
        for depth in range(1, args.multi_token + 1):
            own = self._block(args.of_layer(args.n_layers), block)
            made[str(depth)] = AheadModule(depth, args.dim, args.build_norm, own)
        if made:
            made["ahead_loss"] = LinearLoss(is_main=False)
        made |= {head.name: head.build(args.dim) for head in args.auxiliary_heads}
        return nn.ModuleDict(made) if made else None

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.tok_embeddings is not None, "the embedding stands on the first stage"
        x: Tensor = self.tok_embeddings(tokens)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def _to_logits(self, x: Tensor) -> Tensor:
        """Return normalized hidden states, scaled as the logits are."""
        return x if self.logits_scale == 1 else x * self.logits_scale

    def init_buffers(self) -> None:
        """Fill buffers outside of checkpoints; call it after `to_empty` or a change of dtype."""
        for module in self.modules():
            if isinstance(module, (RotaryEmbedding, Router)):
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
            x = self._embed(tokens)  # (B, S, D)
            if depths:
                assert ahead_tokens is not None, "a batch tells what follows"
                later = [self._embed(each) for each in ahead_tokens.unbind(-1)]
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
        x = self._to_logits(x)
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
                x = self._to_logits(module.norm(hidden))
                total = extra["ahead_loss"](x, weight, of_later.contiguous())
                ended = module.loss(ended, total)
        return ended

"""Decoders with mixtures of experts: arguments, block, settings, and the facts in which they differ
from other decoders (`torchtitan.models.decoder_spec`).

A family of them is a set of `SparseArgs`. The first blocks may have an ordinary feed-forward.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from torchtitan.config import Problem
from torchtitan.models.decoder import BlockBuilder, DecoderArgs, TransformerBlock
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.decoder_spec import BLOCK_PLAN, decoder_spec, shrink, tensor_splits
from torchtitan.models.experts import ExpertForm, MixtureOfExperts, Routing, Scores
from torchtitan.models.layers import RotaryEmbedding
from torchtitan.models.spec import ExpertShape, MinShape, ModelSpec, TensorRole, TensorSplits


@dataclass(frozen=True, kw_only=True)
class SparseArgs(DecoderArgs):
    """Sizes of one flavor; `ffn_dim` is that of blocks without experts."""

    n_experts: int  # 0: none, in a block without them
    top_k: int  # number of experts of a token
    expert_dim: int
    shared_dim: int = 0  # hidden width of the expert that all tokens use; 0: there is none
    dense_layers: int = 0  # number of first blocks without experts
    router_scores: Scores = "softmax"
    renormalize: bool = True  # whether the scores of the chosen experts sum to 1
    router_scale: float = 1.0  # factor of the scores of the chosen experts
    router_bias: bool = False  # whether a bias of each expert balances the choice
    expert_groups: int = 1
    top_groups: int = 1  # number of groups of experts of a token
    load_balance: bool = False  # whether the loss of this name is computed
    router_z_loss: bool = False

    @property
    def routing(self) -> Routing:
        """Rule of the routers."""
        return Routing(
            top_k=self.top_k,
            scores=self.router_scores,
            renormalizes=self.renormalize,
            scale=self.router_scale,
            groups=self.expert_groups,
            top_groups=self.top_groups,
            has_bias=self.router_bias,
            balances=self.load_balance,
            has_z_loss=self.router_z_loss,
            layers=self.n_layers - self.dense_layers + self.multi_token,
        )

    @property
    def expert_form(self) -> ExpertForm:
        """Biases of experts, and the limit of their activation."""
        return ExpertForm()

    @property
    def ffn_parameters(self) -> int:
        if not self.n_experts:
            return super().ffn_parameters
        of_experts = 3 * (self.top_k * self.expert_dim + self.shared_dim)
        return self.dim * (of_experts + self.n_experts)

    def of_layer(self, number: int) -> Self:
        args = super().of_layer(number)
        return replace(args, n_experts=0) if number < self.dense_layers else args


class SparseBlock(TransformerBlock):
    """A block whose feed-forward is a mixture of experts, if its arguments have experts."""

    def __init__(self, args: SparseArgs, rope: RotaryEmbedding) -> None:
        super().__init__(args, rope)
        self.mixture: nn.Module | None = None
        if args.n_experts:
            del self.feed_forward
            self.mixture = MixtureOfExperts(
                args.dim,
                args.n_experts,
                args.expert_dim,
                args.routing,
                shared_dim=args.shared_dim,
                form=args.expert_form,
            )

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, counted: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, documents)
        normed = self.ffn_norm(x)
        out: Tensor = (
            self.feed_forward(normed) if self.mixture is None else self.mixture(normed, counted)
        )
        return x + out


class SparseConfig(DecoderConfig):
    """A decoder with mixtures of experts."""

    args_type: ClassVar[type[DecoderArgs]] = SparseArgs

    n_experts: int | None = Field(None, gt=0)
    """Number of experts of a block (default: the flavor's)."""
    top_k: int | None = Field(None, gt=0)
    """Number of experts that process each token, at most n_experts (default: the flavor's)."""
    expert_dim: int | None = Field(None, gt=0)
    """Hidden width of an expert (default: the flavor's)."""
    shared_dim: int | None = Field(None, ge=0)
    """Hidden width of an expert that processes all tokens; 0: none (default: the flavor's)."""
    dense_layers: int | None = Field(None, ge=0)
    """Number of initial blocks with a feed-forward of width ffn_dim instead of experts (default:
    the flavor's)."""
    router_scores: Scores | None = None
    """Function from the logits of the router to scores (default: the flavor's)."""
    renormalize: bool | None = None
    """Divide the scores of a token's experts by their sum (default: the flavor's)."""
    router_scale: float | None = Field(None, gt=0)
    """Factor of the scores of a token's experts (default: the flavor's)."""
    router_bias: bool | None = None
    """Choose experts by their score plus a bias, which no gradient changes (default: the
    flavor's)."""
    expert_groups: int | None = Field(None, gt=0)
    """Number of groups of consecutive experts, a divisor of n_experts (default: the flavor's)."""
    top_groups: int | None = Field(None, gt=0)
    """Number of groups from which a token's experts are chosen (default: the flavor's)."""

    def size_problems(self, args: Any) -> Iterator[Problem]:
        yield from super().size_problems(args)
        if args.top_k > args.n_experts:
            message = f"a token cannot have {args.top_k} of {args.n_experts} experts"
            yield Problem(self.origin("top_k", "n_experts"), f"{message}; use at most as many")
        if args.n_experts % args.expert_groups:
            message = f"the {args.expert_groups} groups do not divide the {args.n_experts} experts"
            yield Problem(self.origin("expert_groups", "n_experts"), message)
        elif args.top_groups > args.expert_groups:
            key = self.origin("top_groups", "expert_groups")
            message = f"a token cannot have {args.top_groups} of {args.expert_groups} groups"
            yield Problem(key, f"{message}; use at most as many")
        elif (most := args.n_experts // args.expert_groups * args.top_groups) < min(
            args.top_k, args.n_experts
        ):
            key = self.origin("top_groups", "top_k", "expert_groups")
            message = f"a token cannot have {args.top_k} of the {most} experts in its groups"
            yield Problem(key, f"{message} (top_groups = {args.top_groups}); use more groups")
        if args.dense_layers >= args.n_layers:
            message = (
                f"the first {args.dense_layers} of {args.n_layers} blocks have no experts, so "
                "none has; use fewer, or a dense model"
            )
            yield Problem(self.origin("dense_layers", "n_layers"), message)


class AllSparseConfig(SparseConfig):
    """A decoder whose blocks all have experts, none of which computes all tokens."""

    # Not keys of these families, so they are refused as unknown.
    ffn_dim: ClassVar[None] = None  # type: ignore[misc]
    dense_layers: ClassVar[None] = None  # type: ignore[misc]
    shared_dim: ClassVar[None] = None  # type: ignore[misc]

    def over(self, args: Any) -> Any:
        changed: Any = super().over(args)
        return replace(changed, ffn_dim=changed.expert_dim)


SOFTMAX_OF_CHOSEN: Mapping[str, Any] = {
    "router_scores": "softmax",
    "renormalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "expert_groups": 1,
}
"""Options of a router whose scores are the softmax over the logits of the chosen experts."""
OF_SHARED: dict[str, TensorRole] = {
    "mixture.shared": "input_gather",
    "mixture.shared.w1": "colwise",
    "mixture.shared.w3": "colwise",
    "mixture.shared.w2": "rowwise",
}
OF_DENSE = [name for name in BLOCK_PLAN if name.startswith("feed_forward")]
SPARSE_PLAN: dict[str, TensorRole] = {
    **BLOCK_PLAN,
    "mixture.router": "router",
    "mixture.experts": "experts",
    **OF_SHARED,
}


def sparse_splits(args: Any) -> TensorSplits:
    """Return the sizes that tensor-parallel ranks and FSDP must divide."""
    heads, dims = tensor_splits(args)
    return TensorSplits({**heads, "hidden features of an expert": args.expert_dim}, dims)


def sparse_shrink(args: Any, needed: MinShape) -> Any:
    """Return the same structure, with at most 8 experts, of which a token has at most 2."""
    small, multiple = shrink(args, needed), needed.tensor_ranks * 8
    widths = {
        key: -(-getattr(args, key) * small.dim // (args.dim * multiple)) * multiple
        for key in ("expert_dim", "shared_dim")
    }
    n_experts = min(args.n_experts, 8)
    fewer = {"n_experts": n_experts, "top_k": min(args.top_k, 2)}
    dense_layers = min(args.dense_layers, 1 if needed.n_layers > 1 else 0)
    return replace(small, **widths, **fewer, dense_layers=dense_layers)  # type: ignore[call-arg]


def experts(args: Any) -> ExpertShape:
    """Return the experts of each block that has them."""
    return ExpertShape(args.n_experts, args.top_k, args.router_bias, args.load_balance)


def sparse_decoder_spec(
    *,
    flavors: Mapping[str, SparseArgs],
    settings: type[SparseConfig],
    block: BlockBuilder = SparseBlock,  # type: ignore[assignment]
    block_plan: Mapping[str, TensorRole] = SPARSE_PLAN,
    optional: Collection[str] = (),
    **facts: Any,
) -> ModelSpec[DecoderArgs]:
    """Return the spec of a family; `decoder_spec` describes the arguments."""
    spec = decoder_spec(
        flavors=flavors,
        settings=settings,
        block=block,
        block_plan=block_plan,
        optional=[*OF_SHARED, *OF_DENSE, *optional],
        **facts,
    )
    roles = {
        "*.mixture.router.logit_bias": "bias",
        "*.mixture.router.*": "router",
        "*.mixture.experts.b?": "bias",
        "*.mixture.experts.*": "expert",
    }
    return replace(
        spec, roles=roles, tensor_splits=sparse_splits, experts=experts, shrink=sparse_shrink
    )

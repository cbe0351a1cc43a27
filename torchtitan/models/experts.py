"""Mixture of experts: each token goes to a few of many feed-forward networks (Shazeer et al., 2017,
arXiv:1701.06538), and none is dropped, however uneven the choice (Gale et al., 2022,
arXiv:2211.15841).

    l = W_r x                                 logits of the router, in float32
    s = softmax(l) or sigmoid(l)              scores
    y = sum of s_e w2_e(silu(w1_e x) * w3_e x) over the experts e with the k largest s

The scores of the chosen experts are divided by their sum if the router renormalizes. A shared
expert, which every token uses, is added if there is one. As in DeepSeek-V3 (2024, arXiv:2412.19437,
section 2.1.2), a router may have a bias that affects the choice but not the scores, and may choose
groups of experts first.

Each token has k rows, sorted by expert. An expert multiplies consecutive rows, whose number is
known on the device alone, while the number of all rows is constant: the host waits for nothing. A
score multiplies the hidden features, usually fewer than those of the model, so the results of a
token are only added up. The modules are written for one device; distribution is applied from
outside.

Shapes: B batch, S sequence, D model dim, E experts, K experts of a token, N = B S K rows,
F hidden dim of an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from torchtitan.models.layers import FeedForward
from torchtitan.models.output import AuxiliaryLoss

Scores = Literal["softmax", "sigmoid"]
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function like `Experts.compute` of rows, their scores, and their experts."""
Exchange = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""Function of rows sorted by expert, their scores, these experts, and how to compute rows of the
experts here, that lets all rows be computed where their experts are."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rule by which a router chooses experts and weights their results."""

    top_k: int
    """Number of experts of a token."""
    scores: Scores = "softmax"
    renormalizes: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the scores of the chosen experts."""
    groups: int = 1
    """Number of groups of consecutive experts."""
    top_groups: int = 1
    """Number of groups of a token: those with the largest sums of their two best scores."""
    has_bias: bool = False
    """Whether the choice is by score plus a bias of each expert."""
    has_logit_bias: bool = False
    """Whether a trained bias is added to the logits."""
    balances: bool = False
    """Whether the loss `load_balance` is computed."""
    has_z_loss: bool = False
    """Whether the loss `router_z_loss` is computed."""
    layers: int = 1
    """Number of layers with experts, over which these losses are averaged."""


class Router(nn.Module):
    """Choice of K experts for each token, and their scores.

    Two losses keep experts in use and logits small. With P the mean of the scores, of which those
    of a token sum to 1, over the global batch, and f the share of each expert in the choices:

        load_balance    E sum of f_e P_e, 1 if balanced (Fedus et al., 2021, arXiv:2101.03961)
        router_z_loss   mean of logsumexp(l)^2 (Zoph et al., 2022, arXiv:2202.08906)

    Both, and the loads, are of the tokens with a target, whose number divides all losses of a step:
    padding is routed, but does not count.

    f is of the global batch, as balance within a microbatch would keep experts from specializing
    (Qiu et al., 2025, arXiv:2501.11873), and of the step before: that of the present one is known
    after its last microbatch, when the first have had their gradients.
    """

    logit_bias: Tensor | None
    """(E,)"""
    bias: Tensor | None
    """(E,) float32, no parameter: it is changed between steps, to balance the experts."""
    share: Tensor | None
    """(E,) float32, share of each expert in the choices of the last step; uniform at first. It is
    state of training, not one of the weights."""

    def __init__(self, dim: int, n_experts: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        logit_bias = nn.Parameter(torch.empty(n_experts)) if routing.has_logit_bias else None
        self.register_parameter("logit_bias", logit_bias)
        bias = torch.zeros(n_experts, dtype=torch.float32) if routing.has_bias else None
        self.register_buffer("bias", bias)
        share = torch.empty(n_experts, dtype=torch.float32) if routing.balances else None
        self.register_buffer("share", share, persistent=False)
        self.balance = AuxiliaryLoss("load_balance", 0.0) if routing.balances else None
        self.z_loss = AuxiliaryLoss("router_z_loss", 0.0) if routing.has_z_loss else None
        self.count: Callable[[Router, Tensor, Tensor | None], None] | None = None
        """Called with each choice of experts, and which tokens count, once set."""
        self.tally: Tensor
        """(E,) int64, for `count`."""
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill the buffers as before the first step."""
        if self.bias is not None:
            self.bias.zero_()
        if self.share is not None:
            self.share.fill_(1 / len(self.share))

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.route(x, self.weight, self.logit_bias, counted)

    def route(
        self, x: Tensor, weight: Tensor, logit_bias: Tensor | None, counted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts with the largest scores; of equal ones, the first.

        Args:
            x: (B, S, D).
            weight: (E, D).
            logit_bias: (E,).
            counted: (B, S) bool, the tokens that losses and loads are of; None: all.

        Returns:
            Scores (B, S, K) in float32 or wider, and the chosen experts (B, S, K) int64.
        """
        rule, wide = self.routing, torch.promote_types(x.dtype, torch.float32)
        bias = None if logit_bias is None else logit_bias.to(wide)
        logits = F.linear(x.to(wide), weight.to(wide), bias)  # (B, S, E)
        scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
        # Logits have the order of scores, and fewer of them are equal after rounding.
        by_logits = self.bias is None and rule.groups == 1
        values = (logits if by_logits else scores).detach()
        chosen = choose_experts(values, self.bias, rule.top_k, rule.groups, rule.top_groups)
        if self.count is not None:
            self.count(self, chosen, counted)
        weights = scores.gather(-1, chosen)
        if rule.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        if rule.scale != 1:
            weights = weights * rule.scale
        if torch.is_grad_enabled():
            weights = self._with_losses(weights, logits, scores, counted)
        return weights, chosen

    def _with_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, counted: Tensor | None
    ) -> Tensor:
        """Return `weights`, through which the losses get their gradients."""

        def total(each: Tensor) -> Tensor:
            each = each if counted is None else torch.where(counted, each, 0)
            return each.sum() / self.routing.layers

        if self.balance is not None and self.share is not None:
            if self.routing.scores == "sigmoid":
                scores = scores / scores.sum(-1, keepdim=True)
            balance = len(self.share) * (scores @ self.share.to(scores.dtype))
            weights = self.balance(weights, total(balance))
        if self.z_loss is not None:
            weights = self.z_loss(weights, total(logits.logsumexp(-1).square()))
        return weights


@torch.library.custom_op("torchtitan::choose_experts", mutates_args=())
def choose_experts(
    values: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int
) -> Tensor:
    """Return the K best experts (B, S, K) by scores, or logits in their place (B, S, E).

    It is an operator so that recomputation can keep the choice: scores that differ from those of
    the forward by rounding could choose other experts, and gradients belong to others.
    """
    if bias is not None:
        values = values + bias
    if groups > 1:
        by_group = values.view(*values.shape[:-1], groups, -1)
        best = _largest(by_group.topk(min(2, by_group.shape[-1])).values.sum(-1), top_groups)
        left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, False)
        values = by_group.masked_fill(left_out[..., None], -torch.inf).view_as(values)
    return _largest(values, top_k)


@choose_experts.register_fake
def _(values: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int) -> Tensor:
    return values.new_empty(*values.shape[:-1], top_k, dtype=torch.int64)


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` values that are largest in float32; of equal ones, the first.

    `topk` returns any of equal values, so it gets integers in which the index follows the value.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # 0 is added to -0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers, in the order of the values
    last = values.shape[-1] - 1
    from_last = torch.arange(last, -1, -1, device=values.device)
    best = ((ordered.long() << 32) + from_last).topk(k).values
    return last - (best & 0xFFFFFFFF)


@dataclass(frozen=True)
class ExpertForm:
    """Biases of experts, and the limit of their activation."""

    has_biases: bool = False
    """Whether each of its linear layers has a bias."""
    limit: float = 0.0
    """Limit of the factors of `clamped_swiglu`; 0: it is plain SwiGLU."""


class Experts(nn.Module):
    """E networks with SwiGLU, of which each token uses K."""

    b1: Tensor | None
    b2: Tensor | None
    b3: Tensor | None
    SPLIT_DIM: ClassVar = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": 1, "b3": 1}
    """Dim of each parameter that tensor parallelism splits: F, or D where there is no F."""
    MODEL_DIM: ClassVar = {"w1": 2, "w2": 1, "w3": 2}
    """Dim of D in each matrix."""

    def __init__(
        self, dim: int, n_experts: int, hidden_dim: int, form: ExpertForm = ExpertForm()
    ) -> None:
        super().__init__()
        self.limit = form.limit
        self.exchange: Exchange | None = None
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        for name, width in ("b1", hidden_dim), ("b2", dim), ("b3", hidden_dim):
            bias = nn.Parameter(torch.empty(n_experts, width)) if form.has_biases else None
            self.register_parameter(name, bias)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Matrices, then biases if there are any."""
        biases = (bias for bias in (self.b1, self.b2, self.b3) if bias is not None)
        return self.w1, self.w2, self.w3, *biases

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return self.mix(x, scores, chosen, *self.weights)

    def mix(self, x: Tensor, scores: Tensor, chosen: Tensor, *weights: Tensor) -> Tensor:
        """Add up the results of the chosen experts, weighted by their scores.

        Args:
            x: (B, S, D).
            scores: (B, S, K) in float32 or wider.
            chosen: (B, S, K) int64.
            weights: those of `compute`; with `exchange`, of some of the experts.

        Returns:
            (B, S, D).
        """
        top_k, (expert, order) = chosen.shape[-1], chosen.flatten().int().sort(stable=True)
        token, place = order // top_k, inverse(order).view(-1, top_k)
        rows, score = select(x.flatten(0, -2), token, place), permute(scores.flatten(), order)
        compute = partial(self.compute, weights=weights)
        exchange = self.exchange
        out = exchange(rows, score, expert, compute) if exchange else compute(rows, score, expert)
        return add_up(out, token, place).view_as(x)

    def compute(
        self, rows: Tensor, score: Tensor, expert: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Compute rows of experts.

        Args:
            rows: (N, D), sorted by expert.
            score: (N,) factor of each row's result, in float32 or wider.
            expert: (N,) int, the index of the expert of each row in its weights.
            weights: w1 (E, F, D), w2 (E, D, F) and w3 (E, F, D), and b1 (E, F), b2 (E, D) and
                b3 (E, F) if there are biases; or some of the hidden features, for a part of the sum
                over them.

        Returns:
            (N, D).
        """
        w1, w2, w3, *biases = weights
        b1, b2, b3 = biases or (None, None, None)
        numbers = torch.arange(len(w1), device=rows.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # (E,)
        score = score[:, None]

        def linear(
            x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None = None
        ) -> Tensor:
            out: Tensor = expert_products(x, weight, ends)
            if bias is None:
                return out
            added = _by_row(bias, expert)
            return (out + (added if factor is None else added * factor)).to(out.dtype)

        gate, up = linear(rows, w1, b1), linear(rows, w3, b3)  # (N, F)
        hidden = clamped_swiglu(gate, up, self.limit) if self.limit else F.silu(gate) * up
        return linear((hidden * score).to(hidden.dtype), w2, b2, score)


def inverse(order: Tensor) -> Tensor:
    """Return where each row is after rows were put into `order` (N,)."""
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, rows)


def permute(x: Tensor, order: Tensor) -> Tensor:
    """Return `x` (N, ...) in the given order (N,)."""
    return select(x, order, inverse(order)[:, None])


def select(x: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """Select rows of `x` (T, ...), each equally often.

    Args:
        index: (N,) int64.
        places: (T, K) int64, where the result has each row of `x`.

    Returns:
        (N, ...). The gradient is `add_up`: in an order that is always the same, and without atomic
        additions.
    """
    out: Tensor = _Select.apply(x, index, places)  # type: ignore[no-untyped-call]
    return out


def add_up(x: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """Add up the rows of `x` (N, ...) at each token's places; the transpose of `select`."""
    out: Tensor = _AddUp.apply(x, index, places)  # type: ignore[no-untyped-call]
    return out


def _add_up(x: Tensor, places: Tensor) -> Tensor:
    picked = x.index_select(0, places.flatten())
    return picked if len(places) == len(x) else picked.view(*places.shape, *x.shape[1:]).sum(1)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(index, places)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _add_up(grad, ctx.saved_tensors[1]), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(index, places)
        return _add_up(x, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute the activation of GPT-OSS: `(up + 1) * gate * sigmoid(1.702 * gate)`, of clamped
    factors: at most `limit`, and `up` at least its negative.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def _by_row(bias: Tensor, expert: Tensor) -> Tensor:
    """Return the bias of the expert of each row.

    The gradient of a look-up is added up in an order that is always the same, and in float32,
    since an expert has many rows.
    """
    return F.embedding(expert, bias.to(torch.promote_types(bias.dtype, torch.float32)))


class MixtureOfExperts(nn.Module):
    """Feed-forward of a block: a router, its experts, and a shared one if `shared_dim` is not 0."""

    def __init__(
        self,
        dim: int,
        n_experts: int,
        hidden_dim: int,
        routing: Routing,
        *,
        shared_dim: int = 0,
        form: ExpertForm = ExpertForm(),
    ) -> None:
        super().__init__()
        self.router = Router(dim, n_experts, routing)
        self.experts = Experts(dim, n_experts, hidden_dim, form)
        self.shared = FeedForward(dim, shared_dim) if shared_dim else None

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        out: Tensor = self.experts(x, *self.router(x, counted))
        return out if self.shared is None else out + self.shared(x)


def idle_parameters(model: nn.Module) -> int:
    """Return the number of parameters that a token does not use: those of experts not chosen."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return sum(
        (len(layer.experts.w1) - layer.router.routing.top_k) * weight[0].numel()
        for layer in layers
        for weight in layer.experts.parameters()
    )


def parameters_in_words(model: nn.Module) -> str:
    """Return the number of parameters, and the number that a token uses if these are fewer."""
    total, idle = sum(p.numel() for p in model.parameters()), idle_parameters(model)
    used = f" ({total - idle:,} used by a token)" if idle else ""
    return f"{total:,} parameters{used}"


@torch.library.custom_op("torchtitan::expert_products", mutates_args=())
def expert_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert with its matrix, like a linear layer.

    It is an operator because torch's own grouped product has no fake kernel for float32, no kernel
    for float64 (here a loop, which no recipe needs), and wants rows aligned to 16 bytes (seen with
    torch 2.11 to 2.13), so others are padded with zeros.

    Args:
        x: (N, I), the rows of the first expert first.
        weight: (E, O, I).
        ends: (E,) int32, row after the last of each expert; the last one is N.

    Returns:
        (N, O).
    """
    if x.dtype == torch.float64:
        parts = [x[rows] @ each.t() for rows, each in zip(_spans(ends), weight, strict=True)]
        return torch.cat(parts)
    by_inputs = _aligned(_aligned(weight, 1), 2).transpose(1, 2)  # (E, I, O)
    out = F.grouped_mm(_aligned(x, 1).contiguous(), by_inputs, offs=ends)
    return out if out.shape[1] == weight.shape[1] else out[:, : weight.shape[1]].contiguous()


@expert_products.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("torchtitan::expert_gradients", mutates_args=())
def expert_gradients(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradient of the matrices in `expert_products`; 0 for an expert without rows.

    Args:
        grad: (N, O), gradient of the result.
        x, ends: as there.

    Returns:
        (E, O, I).
    """
    if x.dtype == torch.float64:
        return torch.stack([grad[rows].t() @ x[rows] for rows in _spans(ends)])
    by_outputs = _aligned(grad, 1).contiguous().t()
    out = F.grouped_mm(by_outputs, _aligned(x, 1).contiguous(), offs=ends)
    shape = (len(ends), grad.shape[1], x.shape[1])
    return out if out.shape == shape else out[:, : shape[1], : shape[2]].contiguous()


@expert_gradients.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    of_x = expert_products(grad, weight.transpose(1, 2), ends)
    return of_x, expert_gradients(grad, x, ends), None


expert_products.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.torchtitan.expert_products)
def _(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[1]


@register_flop_formula(torch.ops.torchtitan.expert_gradients)
def _(grad: torch.Size, x: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * x[1]


def _spans(ends: Tensor) -> Iterator[slice]:
    """Yield the rows of each expert; waits for the device."""
    return (slice(*bounds) for bounds in pairwise([0, *ends.tolist()]))


def _aligned(x: Tensor, dim: int) -> Tensor:
    """Return `x` with zeros after `dim`, if needed for its rows to be multiples of 16 bytes."""
    missing = -x.shape[dim] % (16 // x.itemsize)
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x

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

Each token is repeated k times, and the rows are sorted by expert. An expert then multiplies
consecutive rows, whose number is known on the device alone, and the number of all rows is constant.
The modules are written for one device; distribution is applied from outside.

Shapes: B batch, S sequence, D model dim, E experts, K experts of a token, N = B S K rows,
F hidden dim of an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from torchtitan.logging import logger
from torchtitan.models.layers import FeedForward
from torchtitan.models.output import AuxiliaryLoss

Scores = Literal["softmax", "sigmoid"]
Exchange = Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]
"""Function of rows sorted by expert, these experts, and how to compute rows of the experts here,
that lets all rows be computed where their experts are."""
Multiply = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Function like `expert_products` of rows, matrices, `ends`, and the dim of F of the matrices."""


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
    """Return the indices of the `k` largest values in the last dim; of equal ones, the first.

    By a stable sort, since `topk` returns any of equal values, and others on each device.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


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
        self.multiply: Multiply | None = None
        """Product in another precision, if any."""
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
        """Add up the results of the chosen experts, weighted in float32.

        Args:
            x: (B, S, D).
            scores: (B, S, K) in float32 or wider.
            chosen: (B, S, K) int64.
            weights: those of `compute`; with `exchange`, of some of the experts.

        Returns:
            (B, S, D).
        """
        top_k, (expert, order) = chosen.shape[-1], chosen.flatten().sort(stable=True)
        # Repeated before they are sorted: gradients of rows that are selected once are added up in
        # an order that is always the same.
        rows = x[..., None, :].expand(*chosen.shape, -1).flatten(0, -2).index_select(0, order)
        compute = partial(self.compute, weights=weights)
        out = self.exchange(rows, expert, compute) if self.exchange else compute(rows, expert)
        out = out.index_select(0, order.argsort())
        by_token: Tensor = torch.unflatten(out, 0, (-1, top_k)).to(scores.dtype)  # (B S, K, D)
        return (by_token * scores.view(-1, top_k, 1)).sum(1).to(x.dtype).view_as(x)

    def compute(self, rows: Tensor, expert: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Compute rows of experts.

        Args:
            rows: (N, D), sorted by expert.
            expert: (N,) int64, the index of the expert of each row in its weights.
            weights: w1 (E, F, D), w2 (E, D, F) and w3 (E, F, D), and b1 (E, F), b2 (E, D) and
                b3 (E, F) if there are biases; or some of the hidden features, for a part of the sum
                over them.

        Returns:
            (N, D).
        """
        w1, w2, w3, *biases = weights
        b1, b2, b3 = biases or (None, None, None)
        numbers = torch.arange(len(w1), device=rows.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # (E,)
        multiply = self.multiply or _multiply

        def linear(x: Tensor, weight: Tensor, hidden_dim: int, bias: Tensor | None) -> Tensor:
            out = multiply(x, weight, ends, hidden_dim)
            return out if bias is None else _add_bias(out, bias, expert)

        gate, up = linear(rows, w1, 1, b1), linear(rows, w3, 1, b3)  # (N, F)
        hidden = clamped_swiglu(gate, up, self.limit) if self.limit else F.silu(gate) * up
        return linear(hidden, w2, 2, b2)


def _multiply(rows: Tensor, weight: Tensor, ends: Tensor, hidden_dim: int) -> Tensor:
    out: Tensor = expert_products(rows, weight, ends)
    return out


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute the activation of GPT-OSS: `(up + 1) * gate * sigmoid(1.702 * gate)`, of clamped
    factors: at most `limit`, and `up` at least its negative.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def _add_bias(out: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """Add the bias of its expert to each row.

    The gradient of a look-up is added up in an order that is always the same, and in float32,
    since an expert has many rows.
    """
    wide = torch.promote_types(bias.dtype, torch.float32)
    return (out + F.embedding(expert, bias.to(wide))).to(out.dtype)


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

    It is an operator because the number of rows of an expert is unknown to fake tensors, and
    because torch's own grouped product has no fake kernel for float32.

    Args:
        x: (N, I), the rows of the first expert first.
        weight: (E, O, I).
        ends: (E,) int32, row after the last of each expert; the last one is N.

    Returns:
        (N, O).
    """
    by_inputs = weight.transpose(1, 2)  # (E, I, O)
    if _is_grouped(x, *weight.shape[1:]):
        return F.grouped_mm(x.contiguous(), by_inputs, offs=ends)
    out = x.new_empty(len(x), weight.shape[1])
    for number, rows in enumerate(_spans(ends)):
        torch.mm(x[rows], by_inputs[number], out=out[rows])
    return out


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
    if _is_grouped(x, grad.shape[1], x.shape[1]):
        return F.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends)
    return torch.stack([grad[rows].t() @ x[rows] for rows in _spans(ends)])


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


def _is_grouped(x: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product can be used.

    It needs rows that are aligned to 16 bytes, and has no float64 (seen with torch 2.11 to 2.13).
    """
    is_aligned = all(size * x.itemsize % 16 == 0 for size in sizes)
    if is_aligned and x.dtype != torch.float64 and hasattr(F, "grouped_mm"):
        return True
    _warn_looped_once(x.dtype, sizes)
    return False


@cache
def _warn_looped_once(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    logger.info(
        "experts: torch %s has no grouped product for %s matrices in %s, so experts are computed "
        "one after the other",
        torch.__version__,
        " x ".join(map(str, sizes)),
        str(dtype).removeprefix("torch."),
    )

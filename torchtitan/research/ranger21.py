"""Ranger21 (Wright and Demeure, 2021, arXiv:2106.13731): AdamW and nine additions to it.

Each is a switch; without any of them this is AdamW, to the bit. The rule follows the authors' code
except for three of its faults: it decays only the last parameter, takes no maximum, and swaps two
coefficients of the momentum.

    clip        a unit's gradient g has at most a hundredth of the norm of its weights
    centralize  g -= mean(g) of each unit;   normalize   g /= std(g) of each tensor
    v = beta2 v + (1 - beta2) g²
    decay       w *= 1 - lr wd / sigma, sigma² the mean over all parameters of v / (1 - beta2^t)
    norm loss   w *= 1 - 2 lr c (1 - 1 / |w|) for each unit, which draws its norm to 1
    to norm 1   w *= 1 - lr wd (1 - 1 / |w|) / sigma: the paper's one term for the last two
    momentum    m of odd steps, m' of even ones: m = beta1² m + (1 - beta1²) g
                u = ((1 + beta0) m - beta0 m') / sqrt((1 + beta0)² + beta0²)
    maximum     v is the largest v so far
    softplus    d = softplus(sqrt(v / (1 - beta2^t)) + eps)
    w -= lr / (1 - beta1^t) u / d
    lookahead   every 5 steps: w = slow = (w + slow) / 2

A unit is a row of a matrix, or a whole vector. The first three and the decay need sums from other
ranks, which take one reduction among the ranks that share tensors, and one among stages: the sum of
v follows from sums over g, before g is centralized or normalized.

Sums over the units of a tensor determine how its gradient is clipped and centralized; the sums of
the result, and its normalization, follow from them. So one reduction is enough.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from torchtitan.config import Context, Problem
from torchtitan.optim import ScheduleConfig
from torchtitan.optim.adam_and_sgd import AdamGroup, AdamWRule
from torchtitan.optim.parameters import local
from torchtitan.optim.schedule import Ratio
from torchtitan.optim.settings import OptimizerConfig, ParameterGroup
from torchtitan.research.common.unit_sums import Units, sharing, sum_over, units_of
from torchtitan.torch_private.dtensor import laid_out_as

SMALLEST_STD, SMALLEST_NORM = 1e-8, 1e-6
"""Lower bounds of the divisors of gradients."""
ADDITIONS = {
    "adaptive_clip": "adaptive clipping",
    "centralize_gradients": "centralization",
    "normalize_gradients": "normalization",
    "positive_negative_momentum": "positive-negative momentum",
    "stable_weight_decay": "stable weight decay",
    "norm_loss": "norm loss",
    "decay_to_norm_1": "decay to the norm 1",
    "softplus": "softplus",
    "amsgrad": "maximum",
    "lookahead_steps": "lookahead",
}
"""Keys of the additions to AdamW, and their names."""
ELEMENTWISE = {"positive_negative_momentum", "softplus", "amsgrad", "lookahead_steps"}
"""Additions that need no sums over elements."""


class Measured(NamedTuple):
    """Measurements of a parameter and its gradient, in float64.

    The gradient g becomes (factor g - mean) / std; std is 0-d, the others are per unit: (units,).
    """

    factor: Tensor
    mean: Tensor
    std: Tensor
    weight_norm: Tensor
    square: Tensor
    """Sum of squares of the resulting gradient (0-d)."""
    variance: Tensor
    """Sum of the second moment before this step (0-d)."""


def changes(config: "Ranger21", units: Units, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return factor and mean of each unit, from its sums of g, g² and w² (3, units)."""
    gradient, square, weight = sums
    factor, mean = torch.ones_like(gradient), torch.zeros_like(gradient)
    if config.adaptive_clip:
        limit = config.adaptive_clip * weight.sqrt().clamp_min(config.adaptive_clip_norm)
        norm = square.sqrt()
        factor = torch.where(norm > limit, limit / norm.clamp_min(SMALLEST_NORM), 1.0)
    # Centralizing a unit of one element, such as a row of one column, would erase it.
    if config.centralize_gradients and len(units.parameter.shape) > 1 and units.size > 1:
        mean = factor * gradient / units.size
    return factor, mean


def totals(config: "Ranger21", units: Units, sums: Tensor) -> Tensor:
    """Return the sums over the units of the changed gradient, and of its squares."""
    factor, mean = changes(config, units, sums)
    gradient, square, _ = sums
    total = factor * gradient - units.size * mean
    squares = factor.square() * square - units.size * mean.square()
    return torch.stack([total.sum(), squares.sum()])


def deviation(config: "Ranger21", units: Units, total: Tensor, square: Tensor) -> Tensor:
    """Return the divisor that normalizes a gradient, from the sums of its elements and squares."""
    count = units.parameter.shape.numel()
    if not config.normalize_gradients or count <= 2:
        return torch.ones_like(square)
    spread = (square - total.square() / count).clamp_min(0) / (count - 1)
    return spread.sqrt() + SMALLEST_STD


def gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient."""
    assert parameter.grad is not None
    return local(parameter.grad)


class Ranger21(OptimizerConfig):
    """AdamW with adaptive clipping, two momenta, lookahead and more, each of them optional."""

    needs_all_gradients: ClassVar[str] = (
        "Ranger21 computes sums over all gradients before it updates any weight"
    )

    name: Literal["Ranger21"] = "Ranger21"
    """Name of the optimizer."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Term added to the root of the second moment."""
    adaptive_clip: float = Field(0.01, ge=0)
    """Limit of the gradient norm of each unit (a row of a matrix, a whole vector), relative to the
    norm of its weights; 0: no limit."""
    adaptive_clip_norm: float = Field(1e-3, gt=0)
    """Minimum norm of the weights in adaptive_clip."""
    centralize_gradients: bool = True
    """Subtract its mean from the gradient of each unit, except vectors."""
    normalize_gradients: bool = True
    """Divide the gradient of each tensor by its standard deviation."""
    positive_negative_momentum: bool = True
    """Keep separate momenta for odd and even steps, and update along their weighted difference."""
    beta0: float = Field(0.9, ge=0)
    """Weight of the other momentum in positive_negative_momentum."""
    stable_weight_decay: bool = True
    """Divide weight decay by the root mean square of all gradients."""
    norm_loss: float = Field(1e-4, ge=0)
    """Strength of the pull of the norm of each unit to 1; 0: none."""
    decay_to_norm_1: bool = False
    """Decay each unit to the norm 1 instead of to 0, as in the paper; then norm_loss must be 0."""
    softplus: float = Field(50.0, ge=0)
    """Smooth the denominator by a softplus of this slope, so that it is at least ln 2 / slope; 0:
    use it as it is."""
    amsgrad: bool = True
    """Use the largest second moment so far."""
    lookahead_steps: int = Field(5, ge=0)
    """Steps between averages of the weights with slow weights (Lookahead); 0: none."""
    lookahead_alpha: float = Field(0.5, gt=0, le=1)
    """Weight of the new weights in that average."""
    groups: tuple[AdamGroup, ...] = ()
    """Settings that differ for some parameters."""

    def options(self) -> dict[str, Any]:
        return super().options() | {"betas": (self.beta1, self.beta2), "eps": self.eps}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        # AdamW's fused kernel rounds differently from any loop over tensors.
        return Ranger21Optimizer(groups, self) if self.switched_on() else AdamWRule().build(groups)

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.switched_on():
            super().allocate(optimizer)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = self.begin(parameter)

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before the first step."""
        state = {
            name: laid_out_as(parameter, torch.zeros_like(local(parameter).detach()))
            for name in sorted(self.state_names() - {"step"})
        }
        return {"step": torch.tensor(0.0), **state}

    def state_names(self) -> frozenset[str]:
        kept = {
            "exp_avg_even": self.positive_negative_momentum,
            "max_exp_avg_sq": self.amsgrad,
            "slow": bool(self.lookahead_steps),
        }
        return frozenset({"step", "exp_avg", "exp_avg_sq", *(name for name in kept if kept[name])})

    def state_bytes(self, parameter_bytes: int) -> float:
        return (len(self.state_names()) - 1) * parameter_bytes

    def switched_on(self) -> list[str]:
        """Return the keys of the enabled additions to AdamW."""
        return [key for key in ADDITIONS if getattr(self, key)]

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        kept = len(self.state_names()) - 1
        message = (
            f"it stores {kept} values per parameter, {kept / 2:g} times Adam's 2; AdamW with "
            f"{', '.join(ADDITIONS[key] for key in self.switched_on()) or 'nothing else'}"
        )
        yield Problem("name", message, (), "note")
        if self.decay_to_norm_1 and self.norm_loss:
            message = "it replaces norm loss; use self.norm_loss = 0"
            yield Problem("decay_to_norm_1", message, ("norm_loss",))


class Ranger21Optimizer(torch.optim.Optimizer):
    """Ranger21 over sharded parameters."""

    def __init__(self, groups: Sequence[ParameterGroup], config: Ranger21) -> None:
        super().__init__([group.options() for group in groups], {})
        self.config = config
        parameters = [parameter for group in groups for parameter in group.parameters]
        self.together, self.stages = sharing(parameters), groups[0].stages
        self.units = {p.tensor: units_of(p, self.together) for p in parameters}
        self.needs_sums = bool({*config.switched_on()} - ELEMENTWISE)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        due = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, _ in due:
            state = self.state[parameter]
            if not state:
                state.update(self.config.begin(parameter))
            if not state["step"] and "slow" in state:
                local(state["slow"]).copy_(local(parameter))
            state["step"] += 1
        known = self._measure([parameter for parameter, _ in due]) if self.needs_sums else {}
        sigma = self._sigma(due, known) if self.config.stable_weight_decay else None
        for parameter, group in due:
            self._update(parameter, group, known.get(parameter), sigma)

    def _measure(self, parameters: Sequence[Tensor]) -> dict[Tensor, Measured]:
        """Measure parameters and their gradients, by one reduction."""
        config, own, parts = self.config, dict[Tensor, Tensor](), list[Tensor]()
        for parameter in parameters:
            units, gradient = self.units[parameter], gradient_of(parameter)
            squares = units.squares(gradient), units.squares(local(parameter))
            own[parameter] = mine = torch.stack([units.sums(gradient), *squares])
            if units.are_whole:
                part = totals(config, units, mine)
            else:
                part = mine.new_zeros(3, units.count)
                part[:, units.rows] = mine
            variance = local(self.state[parameter]["exp_avg_sq"]).sum(dtype=torch.float64)
            parts += [part / units.copies, variance / units.copies]
        found, known = iter(sum_over(self.together, parts)), dict[Tensor, Measured]()
        for parameter, sums in own.items():
            units, whole, variance = self.units[parameter], next(found), next(found)
            if not units.are_whole:
                sums, whole = whole[:, units.rows], totals(config, units, whole)
            factor, mean = changes(config, units, sums)
            std = deviation(config, units, whole[0], whole[1])
            square = whole[1] / std.square()
            known[parameter] = Measured(factor, mean, std, sums[2].sqrt(), square, variance)
        return known

    def _sigma(
        self, due: Sequence[tuple[Tensor, dict[str, Any]]], known: Mapping[Tensor, Measured]
    ) -> Tensor:
        """Return the root mean square of all gradients, from this step's second moments (0-d)."""
        terms, count = [], 0.0
        for parameter, group in due:
            beta2, step = group["betas"][1], self.state[parameter]["step"].item()
            of = known[parameter]
            moment = beta2 * of.variance + (1 - beta2) * of.square
            terms.append(moment / (1 - beta2**step))
            count += self.units[parameter].parameter.shape.numel()
        total = torch.stack(terms).sum()
        ((total, elements),) = sum_over(
            self.stages, [torch.stack([total, torch.full_like(total, count)])]
        )
        return torch.sqrt(total / elements)

    def _update(
        self, parameter: Tensor, group: dict[str, Any], known: Measured | None, sigma: Tensor | None
    ) -> None:
        config, units, state = self.config, self.units[parameter], self.state[parameter]
        weight, gradient = local(parameter), gradient_of(parameter)
        rate, (beta1, beta2), step = group["lr"], group["betas"], int(state["step"].item())
        moments = {name: local(value) for name, value in state.items()}

        decay: Tensor | float = group["weight_decay"]
        if sigma is not None:
            # If all gradients so far were 0, there is no decay.
            decay = torch.where(sigma > 0, decay / sigma, 0.0)
        if known and config.decay_to_norm_1:
            decay = decay * (1 - 1 / (known.weight_norm + group["eps"]))
        keep = 1 - rate * decay
        if known and config.norm_loss:
            norm = known.weight_norm * abs(keep) + group["eps"]
            keep = keep * (1 - 2 * rate * config.norm_loss * (1 - 1 / norm))
        if isinstance(keep, Tensor):
            keep = units.spread(keep).to(_computed(weight)) if keep.ndim else keep.to(weight)
        weight.mul_(keep)

        if known:
            factor, mean, std = (
                units.spread(each).to(_computed(gradient))
                for each in (known.factor, known.mean, known.std)
            )
            gradient = ((gradient * factor).sub_(mean).div_(std)).to(gradient)

        momentum = moments["exp_avg"]
        if config.positive_negative_momentum:
            other = moments["exp_avg_even"]
            if step % 2 == 0:
                momentum, other = other, momentum
            momentum.lerp_(gradient, 1 - beta1**2)
            amplitude = math.hypot(1 + config.beta0, config.beta0)
            direction = (momentum * (1 + config.beta0)).sub_(other, alpha=config.beta0)
            direction.div_(amplitude)
        else:
            direction = momentum.lerp_(gradient, 1 - beta1)

        variance = moments["exp_avg_sq"]
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if config.amsgrad:
            highest = moments["max_exp_avg_sq"]
            variance = torch.maximum(highest, variance, out=highest)
        denominator = (variance.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        if config.softplus:
            denominator = softplus(denominator, beta=config.softplus)
        weight.addcdiv_(direction, denominator, value=-rate / (1 - beta1**step))

        if config.lookahead_steps and step % config.lookahead_steps == 0:
            weight.lerp_(moments["slow"], 1 - config.lookahead_alpha)
            moments["slow"].copy_(weight)


def _computed(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which factors of a tensor's units are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)


class Ranger21Schedule(ScheduleConfig):
    """Warm-up, flat, linear warm-down of Ranger21 (Wright and Demeure, 2021, arXiv:2106.13731)."""

    name: Literal["ranger21"] = "ranger21"
    """Name of the schedule."""
    warmup_steps: int = Field(2000, ge=0)
    """Steps of linear warm-up, 2 / (1 - beta2) by default; at most 22 % of the schedule."""
    decay_ratio: Ratio = Field(0.28, ge=0, le=1)
    """Fraction of the steps that decay, at most what the warm-up leaves; none or 1: all of it."""
    min_lr_factor: float = Field(0.03, ge=0, le=1)
    """Fraction of the peak rate at which the decay ends."""

    def warmup(self, steps: int) -> int:
        return min(self.warmup_steps, int(0.22 * steps))

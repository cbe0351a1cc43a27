"""The training loss: cross entropy, summed over the targets that count.

It needs two numbers per token, the log-sum-exp l of its logits and the logit t of its target: the
loss is l - t. Both can be computed in parts. Shards of the vocabulary on several ranks have one l
and t each, merged from three numbers a token (Shoeybi et al., 2019, arXiv:1909.08053, section 3):

    m = max of l,  l = m + log(sum of exp(l - m)),  t = sum of t, 0 where the target is not

And a rank need not store all logits of its shard at once. Llama 3's 128,256 logits per token take
far more memory than its hidden state. `linear_losses` computes them for a chunk of the
vocabulary, adds them to l (Milakov and Gimelshein, 2018, arXiv:1805.02867) and drops them; the
backward recomputes them, since it needs only exp(logit - l). That costs one more matrix product in
addition to three.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.config import Config, Context, Problem, Registry

IGNORED = -100  # the default of torch: a target that does not count


class LossConfig(Config):
    """Settings of the loss computation."""

    vocabulary_chunk: int = Field(0, ge=0)
    """Number of vocabulary entries whose logits are in memory at a time; 0: all."""


def at_least_float32(logits: Tensor) -> Tensor:
    """Cast logits to at least float32, for accurate sums over a vocabulary."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropy of every target that counts, in nats, in float32.

    A sum, because only the global batch knows the number of targets to divide by.

    Args:
        logits: (batch, sequence, vocabulary), any floating dtype.
        targets: (batch, sequence) int64; torch's mark -100 is a target that does not count.
    """
    return F.cross_entropy(
        at_least_float32(logits.flatten(0, 1)), targets.flatten(), reduction="sum"
    )


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, vocabulary: int
) -> Tensor:
    """Compute `cross_entropy` of logits sharded on the vocabulary over the ranks of `group`.

    Args:
        logits: (batch, sequence, this rank's part of the vocabulary): equal parts but the last.
        targets: (batch, sequence) int64, as for `cross_entropy`.
        vocabulary: size of the whole vocabulary.
    """
    x = at_least_float32(logits)
    is_mine, place = _find(targets - _first(group, vocabulary), x.shape[-1])
    of_target = torch.where(is_mine, x.gather(-1, place[..., None])[..., 0], 0.0)
    return summed(*merged(x.logsumexp(-1), of_target, group), targets)


def squared_normalizer(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the z-loss: the sum of (log-sum-exp of the logits)^2 over targets that count.

    Args:
        logits: (batch, sequence, vocabulary), or this rank's part of the vocabulary.
        targets: (batch, sequence) int64, as for `cross_entropy`.
        group: the ranks that have the other parts, if there are any.
    """
    lse = at_least_float32(logits).logsumexp(-1)
    return summed_squares(lse if group is None else merged_normalizer(lse, group), targets)


def summed_squares(lse: Tensor, targets: Tensor) -> Tensor:
    """Return the z-loss from the log-sum-exp of whole rows (batch, sequence)."""
    return torch.where(targets == IGNORED, 0.0, lse.square()).sum()


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    group: dist.ProcessGroup | None,
    vocabulary: int,
    backend: str = "",
) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy` of `F.linear(hidden, weight)`, in chunks of `chunk` columns.

    Args:
        hidden: (batch, sequence, dim).
        weight: (vocabulary, dim), or this rank's rows of it: equal parts but the last.
        targets: (batch, sequence) int64, as for `cross_entropy`.
        group: the ranks that have the other rows, if there are any.
        vocabulary: size of the whole vocabulary.
        backend: backend of torch.compile for each chunk of logits; "" disables compilation.

    Returns:
        The sum of the loss, and the log-sum-exp of the whole logits of each token.
    """
    local = targets - (0 if group is None else _first(group, vocabulary))
    parts = chunked_statistics(hidden.flatten(0, 1), weight, local.flatten(), chunk, backend)
    lse, of_target = (part.view_as(targets) for part in parts)
    if group is not None:
        lse, of_target = merged(lse, of_target, group)
    return summed(lse, of_target, targets), lse


def _first(group: dist.ProcessGroup, vocabulary: int) -> int:
    """Return the start of this rank's shard of the vocabulary."""
    return dist.get_rank(group) * -(-vocabulary // dist.get_world_size(group))


def _find(local: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets in a vocabulary shard, and their local indices (0 outside)."""
    is_mine = (local >= 0) & (local < size)
    return is_mine, torch.where(is_mine, local, 0)


def merged(lse: Tensor, of_target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Merge the log-sum-exp and target logit of each rank's shard over the whole vocabulary."""
    return merged_normalizer(lse, group), sum_over_ranks(of_target, group)


def merged_normalizer(lse: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the log-sum-exp over the whole vocabulary."""
    largest = lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest + sum_over_ranks((lse - largest).exp(), group).log()


def summed(lse: Tensor, of_target: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses."""
    return torch.where(targets == IGNORED, 0.0, lse - of_target).sum()


class _InPlaceOf(torch.autograd.Function):
    """Replacement of `x`, one summand, by the total: later operations are the same on all ranks,
    so the gradient passes unchanged.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over all ranks; each computes its own share of the gradient."""
    # Not within the function above: torch 2.11 would compile it to one without a gradient.
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    replaced: Tensor = _InPlaceOf.apply(x, total)  # type: ignore[no-untyped-call]
    return replaced


@torch.library.custom_op("torchtitan::chunked_statistics", mutates_args=())
def chunked_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each token's logits, and the logit of its target or 0.

    It is an operator because a compiler that saw its operations would reuse the logits of the
    forward in the backward, and keep them.

    Args:
        hidden: (N, D).
        weight: (V, D).
        targets: (N,) int64; below 0 or from V on: in another shard, or does not count.
        chunk: rows of `weight` per iteration.
        backend: as for `linear_losses`.

    Returns:
        Two tensors (N,) in at least float32.
    """
    statistics = _compiled(_statistics, backend)
    lse = hidden.new_full(targets.shape, -torch.inf, dtype=_precise(hidden))
    of_target = torch.zeros_like(lse)
    for start, rows in _chunks(weight, chunk):
        part, of_part = statistics(F.linear(hidden, rows), targets - start)
        lse = torch.logaddexp(lse, part)
        of_target += of_part
    return lse, of_target


def _statistics(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the statistics of a chunk of the logits (N, C), which may be overwritten."""
    x = logits.to(_precise(logits))
    is_mine, place = _find(local, x.shape[-1])
    of_target = torch.where(is_mine, x.gather(-1, place[:, None])[:, 0], 0.0)
    largest = x.amax(-1)
    return largest + x.sub_(largest[:, None]).exp_().sum(-1).log(), of_target


@torch.library.custom_op("torchtitan::chunked_gradients", mutates_args=())
def chunked_gradients(
    grad_lse: Tensor,
    grad_of_target: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `hidden`, summed in at least float32, and of `weight`."""
    gradient_of = _compiled(_gradient, backend)
    grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
    grad_weight = torch.empty_like(weight)
    for start, rows in _chunks(weight, chunk):
        local = targets - start
        gradient = gradient_of(F.linear(hidden, rows), lse, grad_lse, local, grad_of_target)
        grad_hidden += gradient @ rows
        torch.mm(gradient.T, hidden, out=grad_weight[start : start + len(rows)])
        del gradient  # before the next logits are allocated
    return grad_hidden.to(hidden.dtype), grad_weight


def _gradient(
    logits: Tensor, lse: Tensor, grad_lse: Tensor, local: Tensor, grad_of_target: Tensor
) -> Tensor:
    """Return the gradient of a chunk of the logits (N, C), which may be overwritten."""
    dtype, x = logits.dtype, logits.to(lse.dtype)
    del logits
    x = x.sub_(lse[:, None]).exp_().mul_(grad_lse[:, None])
    if torch.compiler.is_compiling():  # one kernel, without intermediates of this size
        columns = torch.arange(x.shape[-1], device=x.device)
        x += torch.where(columns == local[:, None], grad_of_target[:, None], 0.0)
    else:
        is_mine, place = _find(local, x.shape[-1])
        at_target = torch.where(is_mine, grad_of_target, 0.0)
        x.scatter_add_(-1, place[:, None], at_target[:, None])
    return x.to(dtype)


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(weight: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of `weight`, `chunk` at a time, and their start."""
    return ((start, weight[start : start + chunk]) for start in range(0, len(weight), chunk))


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile with dynamic sizes: the last chunk may be smaller, and one compilation suffices."""
    if not backend:
        return function
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True)


@chunked_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = hidden.new_empty(targets.shape, dtype=_precise(hidden))
    return lse, torch.empty_like(lse)


@chunked_gradients.register_fake
def _(
    grad_lse: Tensor, grad_of_target: Tensor, hidden: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[0])


def _differentiate(ctx: Any, grad_lse: Tensor, grad_of_target: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, lse = ctx.saved_tensors
    gradients = chunked_gradients(
        grad_lse, grad_of_target, *inputs, lse.detach(), ctx.chunk, ctx.backend
    )
    return *gradients, None, None, None


chunked_statistics.register_autograd(_differentiate, setup_context=_keep)


class AuxiliaryLossConfig(Config):
    """An auxiliary loss and its weight; `name` picks the subclass."""

    name: str
    """Name of the loss: a key of torchtitan.losses.AUXILIARY_LOSSES."""
    weight: float = Field(ge=0)
    """Weight in the training loss."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the weight rises linearly from 0."""
    final_weight: float | None = Field(None, ge=0)
    """Weight from `final_step` on (default: unchanged)."""
    final_step: int = Field(0, ge=0)
    """First step with the final weight."""
    decay_steps: int = Field(0, ge=0)
    """Steps before `final_step` over which the weight changes linearly; 0: immediately."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if (self.final_weight is None) != (self.final_step == 0):
            key = "final_weight" if self.final_weight is None else "final_step"
            message = "self.final_weight and self.final_step must be set together"
            yield Problem(key, message, ("final_weight", "final_step"))
        elif self.final_step and self.warmup_steps + self.decay_steps > self.final_step:
            message = (
                f"the weight rises for {self.warmup_steps} steps and changes for "
                f"{self.decay_steps}, which is more than self.final_step"
            )
            yield Problem("final_step", message, ("warmup_steps", "decay_steps"))
        elif self.final_weight is None and self.decay_steps:
            message = "it has no effect without self.final_weight"
            yield Problem("decay_steps", message, ("final_weight",))

    @property
    def is_on(self) -> bool:
        """Whether any step trains on it."""
        return self.weight > 0 or bool(self.final_weight)

    @property
    def reported(self) -> bool:
        """Whether it is computed at all."""
        return True

    def weight_at(self, step: int) -> float:
        """Return the weight in a step, from 1 on."""
        if step < self.warmup_steps:
            return self.weight * step / self.warmup_steps
        if self.final_weight is None:
            return self.weight
        left = self.final_step - step
        if left <= 0:
            return self.final_weight
        part = min(left / self.decay_steps, 1.0) if self.decay_steps else 1.0
        return self.final_weight + (self.weight - self.final_weight) * part

    def described(self) -> str:
        """Describe the loss and its weight in a few words."""
        parts = [f"{self.name}: weight {self.weight:g}"]
        if self.warmup_steps:
            parts.append(f"from 0 over {self.warmup_steps:,} steps")
        if self.final_weight is not None:
            parts.append(f"{self.final_weight:g} from step {self.final_step:,} on")
        return ", ".join(parts)

    def weights(self, step: int) -> dict[str, float]:
        """Return the weights in a step of the losses it consists of, by name."""
        return {self.name: self.weight_at(step)}

    def over(self, args: Any) -> Any:
        """Return the arguments of a model with the parts needed by this loss."""
        return args

    def distribute(
        self,
        part: nn.Module,
        sequence: ProcessGroup | None,
        balancing: str,
        tensor: ProcessGroup | None,
    ) -> None:
        """Connect the loss to the other ranks' parts of the same sequences.

        Args:
            sequence: ranks with other parts of the sequence (cp), if there are any.
            balancing: load balancing of the parts of the sequence.
            tensor: ranks with other parts of this one's part (tp), if there are any.
        """


class ZLoss(AuxiliaryLossConfig):
    """The square of the log-sum-exp of the logits (arXiv:2204.02311)."""

    name: Literal["z_loss"] = "z_loss"
    """Name of the loss."""
    weight: float = Field(1e-4, ge=0)
    """Weight in the training loss; 0: it is only reported."""


class ModelLossConfig(AuxiliaryLossConfig):
    """Loss with its own parameters, which the model has only if the weight is set."""

    argument: ClassVar[str]
    """Argument of the model that enables it."""

    @property
    def reported(self) -> bool:
        return self.is_on

    def over(self, args: Any) -> Any:
        has_it = self.argument in {field.name for field in dataclasses.fields(args)}
        if not (self.is_on and has_it):
            return args
        wanted = self.wanted(getattr(args, self.argument))
        return dataclasses.replace(args, **{self.argument: wanted})

    def is_in(self, args: Any) -> bool:
        """Whether a model with these arguments has its parameters."""
        has = getattr(args, self.argument, None)
        return has is not None and has == self.wanted(has)

    def wanted(self, has: Any) -> Any:
        """Return the required value of `argument`, if the model has another for other losses."""
        raise NotImplementedError


class MultiToken(ModelLossConfig):
    """The tokens after the next one, by blocks that share the trunk (arXiv:2412.19437)."""

    argument: ClassVar[str] = "multi_token"

    name: Literal["multi_token"] = "multi_token"
    """Name of the loss."""
    weight: float = Field(0.3, ge=0)
    """Weight of the mean over the predicted tokens in the training loss; 0: the loss is not
    computed."""
    depth: int = Field(1, ge=1, le=8)
    """Number of tokens after the next to predict."""

    def weights(self, step: int) -> dict[str, float]:
        each = self.weight_at(step) / self.depth
        return {f"{self.name}_{number}": each for number in range(1, self.depth + 1)}

    def wanted(self, has: int) -> int:
        return self.depth


class RouterLoss(ModelLossConfig):
    """A loss of the routers of a mixture of experts, whose blocks compute it."""

    def wanted(self, has: bool) -> bool:
        return True


class LoadBalance(RouterLoss):
    """The balance of experts over the global batch (arXiv:2101.03961, arXiv:2501.11873)."""

    argument: ClassVar[str] = "load_balance"

    name: Literal["load_balance"] = "load_balance"
    """Name of the loss."""
    weight: float = Field(0.01, ge=0)
    """Weight in the training loss; 0: it is not computed."""


class RouterZLoss(RouterLoss):
    """The square of the log-sum-exp of the routers' logits (arXiv:2202.08906)."""

    argument: ClassVar[str] = "router_z_loss"

    name: Literal["router_z_loss"] = "router_z_loss"
    """Name of the loss."""
    weight: float = Field(1e-3, ge=0)
    """Weight in the training loss; 0: it is not computed."""


AUXILIARY_LOSSES = Registry[type[AuxiliaryLossConfig]](
    "auxiliary_loss",
    {
        "z_loss": ZLoss,
        "multi_token": MultiToken,
        "load_balance": LoadBalance,
        "router_z_loss": RouterZLoss,
    },
)

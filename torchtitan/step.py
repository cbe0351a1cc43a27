"""The parts of a step besides the model: its settings, batches, update, and one agreement.

`torchtitan.build` attaches the hooks of features to them, which `Trainer.step` does not see.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from torchtitan.config import Config, Context, Problem
from torchtitan.data import Batch
from torchtitan.optim import GradientNorm, Optimizers
from torchtitan.parallel import Losses, World
from torchtitan.timeline import Timeline


def _is_not_float16(value: Any) -> Any:
    if value in ("float16", "fp16"):
        raise ValueError(
            "float16 needs a gradient scaler, which is not supported; bfloat16 needs none; "
            "allowed: float32, bfloat16"
        )
    return value


DTYPES = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_is_not_float16)]


class TrainingStage(Config):
    """Sizes of steps from a step or a number of tokens on; those left out stay."""

    from_step: int | None = Field(None, ge=1)
    """Number of steps before this stage."""
    from_tokens: int | None = Field(None, ge=1)
    """Number of tokens before this stage, instead of from_step; the stage begins with a whole
    step."""
    global_batch_size: int | None = Field(None, ge=1)
    """Sequences per optimizer step."""
    local_batch_size: int | None = Field(None, ge=1)
    """Sequences per data-parallel rank in a microbatch, at most."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens in a sequence."""

    @property
    def sizes(self) -> dict[str, int]:
        """The keys of `[training]` that it changes."""
        return self.model_dump(exclude={"from_step", "from_tokens"}, exclude_none=True)

    def problems(self, context: Context) -> Iterator[Problem]:
        if (self.from_step is None) == (self.from_tokens is None):
            yield Problem("from_step", "a stage has either from_step or from_tokens")
        if not self.sizes:
            message = "nothing changes; set global_batch_size, local_batch_size or seq_len"
            yield Problem("global_batch_size", message)


class TrainingConfig(Config):
    """Batches, steps and precision."""

    local_batch_size: int = Field(8, ge=1)
    """Sequences per data-parallel rank in a microbatch; fewer if its share of global_batch_size is
    smaller."""
    global_batch_size: int = Field(-1, ge=-1)
    """Sequences per optimizer step, divided among the data-parallel ranks; a share of more than
    local_batch_size is accumulated. -1: local_batch_size times the number of data-parallel ranks,
    so another number of ranks trains another run; a resumed run keeps its batch."""
    seq_len: int = Field(2048, ge=1)
    """Tokens in a sequence."""
    steps: int = Field(10000, ge=1)
    """Optimizer steps."""
    stages: tuple[TrainingStage, ...] = ()
    """Later stages with other sizes, in order."""
    max_norm: float = Field(1.0, ge=0)
    """Limit of the global gradient norm; 0: no limit."""
    max_skipped_steps: int = Field(10, ge=1)
    """Number of consecutive skipped steps (see [spikes]) after which the run rolls back
    (spikes.max_rollbacks), or saves and exits."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: DTYPES = "float32"
    """Dtype in which parameters are stored."""
    mixed_precision_param: DTYPES = "bfloat16"
    """Dtype in which parameters are gathered and used."""
    mixed_precision_reduce: DTYPES = "float32"
    """Dtype in which gradients are summed over ranks."""
    gc_freq: int = Field(50, ge=1)
    """Steps between runs of Python's garbage collector, and of the C library's."""

    @property
    def longest(self) -> int:
        """Tokens in the longest sequence of all stages, for which the model has positions."""
        return max(self.seq_len, *(stage.seq_len or 0 for stage in self.stages), 0)

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.global_batch_size == 0:
            yield Problem("global_batch_size", "wanted -1 or an integer >= 1")
        if self.stages and self.global_batch_size == -1:
            message = "with self.stages, the batch must not follow the number of ranks; set it"
            yield Problem("global_batch_size", message, ("stages",))
        if self.dtype == "bfloat16" and self.mixed_precision_param == "float32":
            message = (
                "parameters stored in bfloat16 (self.dtype) gain nothing from it; use bfloat16 "
                "here or float32 there"
            )
            yield Problem("mixed_precision_param", message, ("dtype",))


@dataclass
class StepStatus:
    """Status of a step before its update, equal to the bit on all ranks."""

    losses: Losses
    grad_norm: Tensor
    """Gradient norm; the largest one if replicas run apart."""
    highest_loss: float
    """Highest loss of all ranks; infinite if any is not finite."""
    highest_norm: float
    count: int
    """Number of targets in the global batch."""
    own_norm: Tensor
    """Gradient norm of the replica of this rank (0-d)."""
    notes: dict[str, str | float] = field(default_factory=dict)
    """Additional entries in the metrics of the step."""
    is_skipped: bool = False
    """Whether the update is skipped."""
    is_void: bool = False
    """Whether the step does not count at all, and is repeated."""


class Batches:
    """Endless iterator over the steps' batches."""

    def __init__(
        self,
        stream: Iterator[Batch],
        accumulation: int,
        world: World,
        timeline: Timeline,
        close: Callable[[], None],
    ) -> None:
        """
        Args:
            stream: microbatches of this rank.
            accumulation: microbatches per step.
            close: closes the source of the stream.
        """
        self.stream, self.accumulation, self.close = stream, accumulation, close
        self.world, self.timeline = world, timeline
        self.before_step: Sequence[Callable[[], None]] = ()
        """Calls to make before anything is read."""
        self.count_of_all: Callable[[Tensor], Tensor] | None = None
        """Takes the number of targets of these ranks, and returns that of all replica groups."""

    def __next__(self) -> tuple[list[Batch], Tensor]:
        """Return a step's microbatches and its number of targets.

        The microbatches are of whole sequences, on the device; the number (0-d) is that of the
        global batch.
        """
        for call in self.before_step:
            call()
        with self.timeline.phase("data"):
            read = [next(self.stream) for _ in range(self.accumulation)]
        batches = [batch.to(self.world.device.torch_device) for batch in read]
        counts = torch.stack([batch.count() for batch in batches])
        with self.timeline.phase("sync"):
            count = self.world.sum(counts.sum(), over="data")
            return batches, self.count_of_all(count) if self.count_of_all else count


class StepOptimizers:
    """Interface of the optimizers in a step."""

    def __init__(self, optimizers: Optimizers, max_norm: float, timeline: Timeline) -> None:
        """`max_norm` is the limit of the global gradient norm; 0 disables clipping."""
        self.inner, self.max_norm, self.timeline = optimizers, max_norm, timeline
        self.before_update: Sequence[Callable[[], None]] = ()
        """Calls to make before weights change."""
        self.after_update: Sequence[Callable[[], None]] = ()
        """Calls to make after they have changed, which may change them too."""

    def begin(self, factor: float) -> float:
        """Drop the gradients, and set the rates to `factor` times their peak; returns the rate."""
        if self.inner.in_backward:
            self._before_update()
        return self.inner.begin(factor)

    def norm(self) -> GradientNorm:
        """Return the global norm of the gradients."""
        with self.timeline.phase("clip"):
            return self.inner.norm()

    def step(self, norm: Tensor, highest_norm: float) -> None:
        """Update the parameters, with gradients clipped to the limit of their norm.

        Args:
            norm: global norm of the gradients, 0-d.
            highest_norm: highest norm of all ranks. It is known without waiting for the device;
                well below the limit, the pass over all gradients that would scale them by 1 is
                skipped.
        """
        self._before_update()
        with self.timeline.phase("optimizer"):
            if self.max_norm > 0 and highest_norm > 0.99 * self.max_norm:
                self.inner.clip(self.max_norm, norm)
            self.inner.step()
            for call in self.after_update:
                call()

    def _before_update(self) -> None:
        for call in self.before_update:
            call()


class UpdateGuard(Protocol):
    """Decision whether the update of a step is applied."""

    def accepts(self, status: StepStatus) -> bool: ...


@dataclass(frozen=True)
class StepVote:
    """Number of which all ranks learn the sum, together with the status of the step; below 2**24,
    so that it is exact."""

    local: Callable[[], float]
    on_result: Callable[[float], None]


@dataclass(frozen=True)
class Hooks:
    """Calls that a feature makes around a step; None where it makes none.

    At each of these points, features are called in their order in `torchtitan.build.features`.
    """

    before_step: Callable[[], None] | None = None
    """Before the data of a step is read."""
    before_forward: Callable[[], None] | None = None
    """Before the forwards and backwards of a step."""
    after_backward: Callable[[Sequence[Batch], Losses], None] | None = None
    """After them, with the step's microbatches and this rank's shares of its losses, when the
    gradients are complete and not yet clipped."""
    before_update: Callable[[], None] | None = None
    """Before weights change."""
    after_update: Callable[[], None] | None = None
    """After the optimizers have updated the weights, which it may change too."""
    after_step: Callable[[int], object] | None = None
    """After a step was counted, with its number; True marks it as void, and no later feature is
    called."""
    vote: StepVote | None = None
    """Number that all ranks agree on in each step."""
    session: AbstractContextManager[object] | None = None
    """Context that is open while the run trains."""


def once(action: Callable[[], None]) -> Callable[[int], None]:
    """Return a hook that calls `action` after the first step only."""
    left = [action]

    def call(step: int) -> None:
        while left:
            left.pop()()

    return call


class Agreement:
    """The one sum over all ranks after the backward, and the only wait for the device in a step.

    All ranks then read the same numbers, so they decide alike whether to apply the update, and
    whether to stop.
    """

    def __init__(self, world: World, timeline: Timeline, norms_differ: bool = False) -> None:
        """`norms_differ`: whether gradient norms may differ between ranks."""
        self.world, self.timeline = world, timeline
        self.votes: Sequence[StepVote] = ()
        self.norms_differ = norms_differ
        self.norm_of_all: Callable[[Tensor], Tensor] | None = None
        """Takes the gradient norm of these ranks, and returns that of all replica groups."""

    def __call__(self, shares: Losses, norm: GradientNorm, count: Tensor) -> StepStatus:
        """Return the status of the step on all ranks, and pass on the results of the votes.

        Args:
            shares: shares of this rank of the means of the losses.
            count: number of targets in the global batch (0-d), equal on all ranks.
        """
        names, loss = ["loss", *(name for name in shares if name != "loss")], shares["loss"]
        terms = [self.world.terms(shares[name]) for name in names]
        # The norm of offloaded gradients is in host memory.
        squares = list(norm.terms(self.world.rank).to(loss.device))
        votes = [torch.full_like(loss, float(vote.local())) for vote in self.votes]
        has_copies = not (norm.is_split or self.norms_differ or self.world.size == 1)
        of_copies = [norm.squares.sum().to(loss.device)] * has_copies
        with self.timeline.phase("sync"):
            # Gloo adds up the first two as if each were alone.
            all_terms = torch.stack([terms[0], *squares, *terms[1:], *votes, *of_copies])
            summed = list(self.world.sum(all_terms, over="all"))
            of_copies = [summed.pop() for _ in of_copies]
            losses = [summed[0], *summed[1 + len(squares) :]]
            own_norm, grad_norm = self._norms(norm, summed[1 : 1 + len(squares)], of_copies)
            told = (losses[0], grad_norm, count, *losses[len(names) :])
            numbers = torch.stack([each.double() for each in told])
            finite = numbers.nan_to_num(torch.inf, posinf=torch.inf, neginf=torch.inf)
            highest_loss, highest_norm, counted, *agreed = finite.tolist()
        for vote, value in zip(self.votes, agreed, strict=True):
            vote.on_result(value)
        means = dict(zip(names, losses, strict=False))
        return StepStatus(means, grad_norm, highest_loss, highest_norm, int(counted), own_norm)

    def _norms(
        self, norm: GradientNorm, squares: list[Tensor], of_copies: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of this rank's replica, and the highest of all ranks (0-d).

        Args:
            squares: terms of the square, summed over all ranks.
            of_copies: where each rank has the whole square, the sum of all of these.
        """
        if self.norms_differ:
            own = norm.complete().to(squares[0].device)
            return own, self.world.max(own.nan_to_num(torch.inf))
        square = torch.stack(squares).sum()
        own = highest = square.sqrt()
        for total in of_copies:
            # More than rounding: another rank computed a higher norm than the first.
            ranks = self.world.size
            excess = total - ranks * square
            is_higher = excess > ranks**2 * torch.finfo(square.dtype).eps * square
            highest = torch.where(is_higher, square + excess, square).sqrt()
        if self.norm_of_all is not None:
            own = self.norm_of_all(highest)
            highest = self.world.max(own.nan_to_num(torch.inf))
        return own, highest

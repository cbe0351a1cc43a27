"""QSDP: low-bit gathers of weights and reductions of gradients
(Markov et al., 2023, arXiv:2302.02390).

Weights are rounded to a lattice after a random shift that all ranks share and that changes with
each step, so that the mean over shifts is the weight itself; gradients are rounded stochastically.
Both use buckets, from the smallest to the largest number of each. The owner of a weight keeps its
full precision, but computes with the rounded one, as all ranks do. For very few bits, levels of
gradients are learned from the sent numbers.

Numbers of a bucket, scaled to between 0 and 1, are not uniformly distributed. So each number moves
the closest level by a fraction of their distance, a step of gradient descent on its square. The
first and the last level stay at 0 and 1: every number is then between two levels, and stochastic
rounding to one of the two is unbiased. Weights have no such levels: what a shared shift adds is
subtracted again, which leaves half of the squared error that stochastic rounding has, and levels
at other distances gain less than that.
"""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm import Gather, GradientsConfig, Unit, WeightsConfig
from torchtitan.config import Context, Problem
from torchtitan.research.common.codec import WireFormat
from torchtitan.research.common.quantized import Clock, Quantized, QuantizedReduce
from torchtitan.torch_private.distributed import all_gather_into

SAMPLES, BATCH, PASSES = 2**14, 2**10, 8
"""Maximum samples of a parameter from which levels are learned, batch size, and passes."""


class Levels:
    """Levels of each parameter of a unit that is sent in low bits, the same on all ranks.

    A bucket has the levels of the parameter in which it starts.
    """

    def __init__(
        self, wire_format: WireFormat, group: ProcessGroup, every: int, rate: float
    ) -> None:
        """Learn levels again after `every` steps, by a step of size `rate` for each number."""
        self.codec, self.group, self.every, self.rate = wire_format.codec, group, every, rate
        device = wire_format.unit.device
        sizes = [size for is_coarse, size in wire_format.parts if is_coarse]
        begun = [-(-end // self.codec.bucket) for end in accumulate(sizes, initial=0)]
        counts = [after - before for before, after in pairwise(begun)]
        self.ends = [self.codec.bucket * end for end in begun[1:-1]]
        """Ends of the buckets that start in each parameter, except the last parameter."""
        self.of_bucket = torch.arange(len(sizes)).repeat_interleave(torch.tensor(counts)).to(device)
        self.even = torch.linspace(0, 1, 2**self.codec.bits, device=device)
        self.moved = torch.zeros(len(sizes), len(self.even), device=device)
        """Offset of each level from its position at equal distances."""
        self.learned = torch.zeros((), dtype=torch.int64)
        """Step in which levels were last learned, plus one; zero: never."""

    def state(self) -> dict[str, Tensor]:
        """Return the state to checkpoint."""
        return {"levels": self.moved, "learned": self.learned}

    def __call__(self, rows: Tensor, step: int) -> Tensor:
        """Return the levels of each bucket (buckets, levels) of rows (R, n) sent in a step."""
        if step % self.every == 0 and step + 1 != int(self.learned):
            values = torch.tensor_split(self.codec.normalized(rows), self.ends, 1)
            for moved, own in zip(self.moved, values, strict=True):
                moved.copy_(learn(self.even, own.flatten(), self.rate) - self.even)
            dist.all_reduce(self.moved, group=self.group)
            self.moved /= self.group.size()
            self.learned.fill_(step + 1)
        return (self.even + self.moved)[self.of_bucket]


def learn(levels: Tensor, values: Tensor, rate: float) -> Tensor:
    """Return the levels after all `values` (n) have moved them; both are between 0 and 1.

    Values that are not finite move none. Nothing waits for the device.
    """
    values = values[:: -(-len(values) // SAMPLES) or 1].contiguous()
    numbers = torch.arange(len(levels), device=levels.device)
    for _ in range(PASSES):
        for some in torch.split(values, BATCH):
            closest = torch.bucketize(some, (levels[1:] + levels[:-1]) / 2)
            # Not by index_add or bincount: on CUDA one adds in any order, the other waits.
            is_closest = (closest[:, None] == numbers) & some.isfinite()[:, None]
            counts = is_closest.sum(0)
            means = torch.where(is_closest, some[:, None], 0).sum(0) / counts.clamp(min=1)
            # Equal to that many single steps towards the mean.
            levels = torch.lerp(levels, means, 1 - (1 - rate) ** counts)
            levels[0], levels[-1] = 0.0, 1.0
    return levels


MOST_BITS = 5
"""Maximum bits for which levels are learned."""


class QSDPWeights(Quantized, WeightsConfig):
    """Weights rounded to a lattice with a random shift, the same on all ranks."""

    reads_numbers: ClassVar[bool] = True

    name: Literal["qsdp"] = "qsdp"
    """Method of gathering weights."""

    def open(self, unit: Unit, group: ProcessGroup) -> "QSDPGather":
        return QSDPGather(self.wire_format(unit, "minmax"), group)


class QSDPGather(Clock, Gather):
    """Gather with one shift per step, so that the backward has the weights of the forward."""

    def __init__(self, wire_format: WireFormat, group: ProcessGroup) -> None:
        super().__init__(wire_format.unit, group)
        self.wire_format, self.codec = wire_format, wire_format.codec

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        coarse, exact = self.wire_format.split(part[None])
        uniform = random.Random(self.seed("shift")).random()
        shift = torch.full((), uniform - 0.5, device=part.device)
        sent = self.wire_format.pack(self.codec.encode(coarse, shift), exact)
        received = sent.new_empty(self.group.size(), sent.shape[1])
        all_gather_into(received.flatten(), sent.flatten(), self.group)
        codes, rest = self.wire_format.unpack(received, part.dtype)
        found = self.codec.decode(codes, self.wire_format.coarse, shift, dtype=whole.dtype)
        whole.copy_(self.wire_format.join(found, rest).flatten())


class QSDPGradients(Quantized, GradientsConfig):
    """Gradients rounded stochastically, so that the mean is the gradient itself."""

    name: Literal["qsdp"] = "qsdp"
    """Method of reducing gradients."""
    levels: Literal["uniform", "learned"] = "uniform"
    """Quantization levels: equally spaced, or learned from the distribution of the numbers; for
    fewer than 6 bits."""
    learn_steps: int = Field(1000, ge=1)
    """Steps between updates of the learned levels (the first at step 1)."""
    learn_rate: float = Field(0.01, gt=0, lt=1)
    """Learning rate of the levels: fraction by which a value moves its nearest level."""

    def open(self, unit: Unit, group: ProcessGroup) -> "QSDPReduce":
        wire_format, levels = self.wire_format(unit, "minmax"), None
        if self.levels == "learned" and wire_format.coarse:
            levels = Levels(wire_format, group, self.learn_steps, self.learn_rate)
        return QSDPReduce(wire_format, group, levels)

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.levels == "learned" and self.bits > MOST_BITS:
            message = (
                f"2^{self.bits} levels are too many to be learned from the numbers of a bucket; "
                f'use "uniform", or at most bits = {MOST_BITS}'
            )
            yield Problem("levels", message, ("bits",))


class QSDPReduce(QuantizedReduce):
    """Reduction whose random draws differ by rank, call and step."""

    def __init__(
        self, wire_format: WireFormat, group: ProcessGroup, levels: Levels | None = None
    ) -> None:
        super().__init__(wire_format, group)
        self.learned = levels

    def encode(self, rows: Tensor) -> Tensor:
        seed = self.seed(f"gradients/{self.calls}/{self.group.rank()}")
        noise = torch.Generator(rows.device).manual_seed(seed)
        if self.learned:
            self.levels = self.learned(rows, int(self.step))
        return self.codec.encode(rows, noise=noise, levels=self.levels)

    def state(self) -> dict[str, Tensor]:
        return super().state() | (self.learned.state() if self.learned else {})

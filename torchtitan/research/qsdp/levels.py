"""Levels that are learned from the sent numbers (QSDP; Markov et al., 2023, arXiv:2302.02390).

Numbers of a bucket, scaled to between 0 and 1, are not uniformly distributed. So each number moves
the closest level by a fraction of their distance, a step of gradient descent on its square. The
first and the last level stay at 0 and 1: every number is then between two levels, and stochastic
rounding to one of the two is unbiased.
"""

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.research.common.codec import WireFormat

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
        self.buckets = [after - before for before, after in pairwise(begun)]
        """Number of buckets that start in each parameter, in order."""
        numbers = [torch.full((n,), p) for p, n in enumerate(self.buckets)]
        self.of_bucket = torch.cat(numbers).to(device)
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
            values = torch.split(self.codec.normalized(rows), self.buckets, 1)
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

"""Levels that are learned from what is sent (QSDP; Markov et al., 2023, arXiv:2302.02390).

Numbers of a bucket, scaled to lie between 0 and 1, are not evenly spread there. So each number
moves the level that is closest to it by a part of their distance, a step of gradient descent on its
square. The first and the last level stay at 0 and 1: every number then lies between two levels, and
rounding at random to one of the two is right in the mean.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.research.common.codec import Envelope

SAMPLES, BATCH, PASSES = 2**14, 2**10, 8
"""Numbers of a parameter that levels are learned from, at most, and how many are taken at once."""


class Levels:
    """The levels of a unit: of each parameter that is sent in few bits, the same on all ranks.

    A bucket has those of the parameter that it begins in.
    """

    def __init__(self, envelope: Envelope, group: ProcessGroup, every: int, rate: float) -> None:
        """They are learned anew after `every` steps, by a step of size `rate` for each number."""
        self.codec, self.group, self.every, self.rate = envelope.codec, group, every, rate
        device = envelope.unit.device
        sizes = torch.tensor([size for is_coarse, size in envelope.parts if is_coarse])
        begins = torch.arange(0, envelope.coarse, self.codec.bucket)
        self.of_bucket = torch.searchsorted(sizes.cumsum(0), begins, right=True).to(device)
        self.even = torch.linspace(0, 1, 2**self.codec.bits, device=device)
        self.moved = torch.zeros(len(sizes), len(self.even), device=device)
        """How far each is from where it would be at equal distances."""
        self.learned = torch.zeros((), dtype=torch.int64)
        """The step in which they were learned, and one; zero: in none."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep."""
        return {"levels": self.moved, "learned": self.learned}

    def __call__(self, rows: Tensor, step: int) -> Tensor:
        """Those of each bucket (buckets, levels) of rows (R, n) that are sent in a step."""
        if step % self.every == 0 and step + 1 != self.learned:
            values = self.codec.normalized(rows)
            for number in range(len(self.moved)):
                own = values[:, self.of_bucket == number].flatten()
                self.moved[number] = learn(self.even, own, self.rate) - self.even
            dist.all_reduce(self.moved, group=self.group)
            self.moved /= self.group.size()
            self.learned.fill_(step + 1)
        return (self.even + self.moved)[self.of_bucket]


def learn(levels: Tensor, values: Tensor, rate: float) -> Tensor:
    """Levels after all `values` (n) have moved them; both lie between 0 and 1."""
    values = values[values.isfinite()]
    values = values[:: -(-len(values) // SAMPLES) or 1].contiguous()
    for _ in range(PASSES):
        for some in torch.split(values, BATCH):
            closest = torch.bucketize(some, (levels[1:] + levels[:-1]) / 2)
            counts = torch.bincount(closest, minlength=len(levels))
            means = torch.zeros_like(levels).index_add_(0, closest, some) / counts.clamp(min=1)
            # What as many single steps towards their mean come to.
            levels = torch.lerp(levels, means, 1 - (1 - rate) ** counts)
            levels[0], levels[-1] = 0.0, 1.0
    return levels

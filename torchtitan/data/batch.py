"""What every microbatch has, whatever it is of; each task has a dataclass of its own."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from torchtitan.device import Device


class Batch:
    """A microbatch of one rank: a frozen dataclass of tensors, samples in their first dim.

    A tensor that is None is not needed, and goes nowhere.
    """

    targets: Tensor
    """What the loss is given beside what the model makes of the inputs."""

    @property
    def inputs(self) -> Tensor:
        """What the model, or its first stage, is given."""
        raise NotImplementedError

    def context(self) -> dict[str, Tensor]:
        """What every stage of the model is given besides, by keyword."""
        return {}

    def count(self) -> Tensor:
        """How many units the loss is a mean over (0-d int64, where the tensors are)."""
        raise NotImplementedError

    def shard(self, part: Callable[[Tensor], Tensor]) -> Self:
        """A rank's part of the sequences; `part` takes it from a tensor (B, sequence)."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self, device: Device) -> Self:
        """In memory from which a copy to `device` need not be waited for."""
        return self._map(device.pin)

    def split(self, size: int) -> list[Self]:
        """Batches of `size` samples each."""
        starts = range(0, len(self.inputs), size)
        return [self._map(lambda t, first=first: t[first : first + size]) for first in starts]  # type: ignore[misc]

    @classmethod
    def join(cls, batches: Sequence[Self]) -> Self:
        """One batch of the samples of several."""
        rest = [vars(batch) for batch in batches]
        return type(batches[0])(
            **{
                name: None if first is None else torch.cat([each[name] for each in rest])
                for name, first in rest[0].items()
            }
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: None if t is None else function(t) for name, t in vars(self).items()}
        return type(self)(**changed)

"""Interface of all microbatches; each task has its own dataclass."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from torchtitan.device import Device


class Batch:
    """A microbatch of one rank: a frozen dataclass of tensors, samples in their first dim.

    Tensors that are None are unused, and not sent.
    """

    targets: Tensor
    """Input of the loss, in addition to the output of the model."""
    on_host: ClassVar[frozenset[str]] = frozenset()
    """Names of tensors that stay on the host."""

    @property
    def inputs(self) -> Tensor:
        """Input of the model, or of its first stage."""
        raise NotImplementedError

    def context(self) -> dict[str, Tensor]:
        """Return the keyword arguments of every stage of the model."""
        return {}

    def count(self) -> Tensor:
        """Return the number of units the loss is averaged over: 0-d int64, same device."""
        raise NotImplementedError

    def shard(self, part: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's part of the sequences; `part` selects it from a tensor (B, sequence)."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), self.on_host)

    def pin(self, device: Device) -> Self:
        """Return the batch in pinned memory, for asynchronous copies to `device`."""
        return self._map(device.pin, self.on_host)

    def split(self, size: int) -> list[Self]:
        """Split into batches of `size` samples each."""
        starts = range(0, len(self.inputs), size)
        return [self._map(lambda t, first=first: t[first : first + size]) for first in starts]  # type: ignore[misc]

    @classmethod
    def join(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the samples of several batches."""
        rest = [vars(batch) for batch in batches]
        return type(batches[0])(
            **{
                name: None if first is None else torch.cat([each[name] for each in rest])
                for name, first in rest[0].items()
            }
        )

    def _map(self, function: Callable[[Tensor], Tensor], but: frozenset[str] = frozenset()) -> Self:
        """Apply `function` to all tensors but those named."""
        changed = {
            name: tensor if tensor is None or name in but else function(tensor)
            for name, tensor in vars(self).items()
        }
        return type(self)(**changed)

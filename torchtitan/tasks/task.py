"""What a task says of itself: its batches and where they come from, its loss, unit and metrics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.data import DataConfig, DataStream, build_stream, open_source
from torchtitan.data.batch import Batch
from torchtitan.data.order import Once, Source
from torchtitan.data.stream import Packing
from torchtitan.logging import logger
from torchtitan.models.settings import ModelConfig

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""What a model gave, and the targets, to the sum of the loss."""


class Task:
    """What a family of models is trained to do.

    The loss of a step is a sum over all units of the global batch, divided by their number: so it
    is the same on every layout, however the units are spread.
    """

    unit: ClassVar[str]
    """What is counted: a key of the metrics, and a word of the log."""
    rate: ClassVar[str]
    """The key of units per second and device."""
    content: ClassVar[str] = "text"
    """What documents have to hold: see `torchtitan.data.Dataset.content`."""
    outputs: ClassVar[str] = "outputs"
    """What the last dim of what a model gives counts: tokens of a vocabulary, say."""
    has_logits: ClassVar[bool] = False
    """Whether those are logits, of a vocabulary."""
    key: ClassVar[str] = "model"
    """The setting that is wrong where the task cannot be opened."""
    splits_sequences: ClassVar[bool] = False
    """Whether its batches can be split over the ranks of context parallelism."""
    has_picture: ClassVar[bool] = False
    """Whether a validation can be looked at."""
    hides_ended: ClassVar[bool] = False
    """Whether its batches hide what a lane without further documents is filled up with."""

    def __init__(self, model: ModelConfig, args: Any) -> None:
        """Read what the task needs beside the data.

        Raises:
            ConfigError: where it is not there, or does not fit the model.
        """

    @classmethod
    def units(cls, seq_len: int) -> int:
        """How many units a sample has at most."""
        return 1

    def packing(self, config: DataConfig, seq_len: int, seed: int) -> Packing:
        """How documents become samples, and samples a batch.

        Raises:
            ConfigError: where the section asks for what is not there.
        """
        raise NotImplementedError

    def open_source(self, config: DataConfig, seed: int) -> Source:
        """The documents that a data section names."""
        return open_source(config, None, seed=seed)

    def open_stream(
        self, config: DataConfig, *, seed: int, seq_len: int, once: bool = False, **part: Any
    ) -> DataStream:
        """The stream of one data-parallel rank; `part` is for `build_stream`.

        Args:
            once: read each document once; the stream is as endless, but has no targets then.
        """
        source = self.open_source(config, seed)
        packing = self.packing(config, seq_len, seed)
        if once:
            assert self.hides_ended, "the recipe was checked"
            source = Once(source)
        return build_stream(config, source, packing, **part)

    def preview(self, batch: Batch) -> str:
        """What a person sees of the first sample of a batch, on one line."""
        raise NotImplementedError

    @classmethod
    def check_files(cls, config: DataConfig) -> None:
        """Look at what files a section of data names, before anything is started.

        Raises:
            ConfigError: they cannot be read, and why.
        """

    @classmethod
    def left_out(cls, config: DataConfig) -> str | None:
        """The metric that counts documents which are left out; None if none ever is."""
        return None

    def reference(self, config: DataConfig, seed: int) -> str | None:
        """A loss to compare with that needs no model, in words, where the recipe asks for it."""
        return None

    @classmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the loss over the units of a microbatch, in float32 (0-d)."""
        raise NotImplementedError

    @classmethod
    def split_loss(cls, group: dist.ProcessGroup, size: int) -> LossFunction:
        """`loss` of outputs whose last dim, of `size`, is split over tensor-parallel ranks."""
        raise NotImplementedError

    @classmethod
    def split_sums(cls, positions: int) -> Sequence[int]:
        """How many float32 numbers `split_loss` adds up over ranks, for each sum that it makes.

        Args:
            positions: of a microbatch, for which the model makes outputs.
        """
        raise NotImplementedError

    def prepare_validation(self, device: torch.device, is_first: bool) -> None:
        """Make ready for `measure` on a device; the first rank may log something."""

    def measure(self, batch: Batch) -> Tensor:
        """Further counts of a batch of held-out data, for `derived`: (n,) int64."""
        return torch.zeros(0, dtype=torch.int64, device=batch.targets.device)

    def picture(self, batch: Batch, outputs: Tensor) -> Tensor:
        """What a person looks at after a validation, where the task `has_picture`.

        Args:
            outputs: what the model made of the batch.

        Returns:
            (3, height, width) in 0..1.
        """
        raise NotImplementedError

    def derived(self, loss: float, count: int, measured: Sequence[int]) -> dict[str, float | None]:
        """What else a validation tells, from sums over all of a data set: loss, units, measures."""
        return {}


def previewed(batches: Iterator[Batch], task: Task) -> Iterator[Batch]:
    """The batches; of the first, the log shows the first sample."""
    first = next(batches)
    logger.info("first sequence: %s", task.preview(first))
    yield first
    yield from batches

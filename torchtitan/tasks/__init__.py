"""Tasks: their batches, losses, units and metrics. `ModelSpec.task` is a key of `TASKS`."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config import Registry
from torchtitan.data import BatchStream, DataConfig, build_stream, open_source
from torchtitan.data.batch import Batch
from torchtitan.data.order import SinglePass, Source
from torchtitan.data.sizes import StepSizes
from torchtitan.data.stream import Packing
from torchtitan.logging import logger
from torchtitan.models.settings import ModelConfig

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Function from a model's outputs and the targets to the sum of the loss."""


class Task:
    """Training task of a family of models.

    The loss of a step is a sum over all units of the global batch, divided by their number: so it
    is the same on every layout, regardless of the distribution of units.
    """

    unit: ClassVar[str]
    """Name of the counted units: a key of the metrics, and a word of the log."""
    rate: ClassVar[str]
    """Key of units per second and device."""
    content: ClassVar[str] = "text"
    """Required content of documents: see `torchtitan.data.Dataset.content`."""
    sample: ClassVar[str] = "sequence"
    """Name of a sample."""
    outputs: ClassVar[str] = "outputs"
    """Name of the last dim of a model's outputs: tokens of a vocabulary, say."""
    has_logits: ClassVar[bool] = False
    """Whether the outputs are logits over a vocabulary."""
    key: ClassVar[str] = "model"
    """Key of the setting to report if the task cannot be opened."""
    splits_sequences: ClassVar[bool] = False
    """Whether its batches can be split over the ranks of context parallelism."""
    has_picture: ClassVar[bool] = False
    """Whether a validation has a picture."""
    hides_ended: ClassVar[bool] = False
    """Whether its batches mask the padding of a lane without further documents."""

    unknown: Sequence[str] = ()
    """Keys whose values in the recipe say nothing about the run; checkpoints do not record them."""

    def __init__(self, model: ModelConfig, args: Any) -> None:
        """Read the requirements of the task in addition to the data.

        Raises:
            ConfigError: if they are missing, or do not fit the model.
        """

    def adapt(self, data: DataConfig) -> None:
        """Adapt to the section `[data]` of the recipe, before the rest is called.

        Raises:
            ConfigError: if it does not fit the model.
        """

    @classmethod
    def units(cls, seq_len: int) -> int:
        """Return the maximum number of units of a sample."""
        return 1

    @classmethod
    def blank_batch(cls, size: int, seq_len: int, args: Any, has_documents: bool) -> Batch:
        """Return a microbatch of `size` samples of zeros on the host, for estimates."""
        raise NotImplementedError

    @abstractmethod
    def packing(self, config: DataConfig, seq_len: int, seed: int) -> Packing:
        """Return the conversion of documents to samples, and of samples to batches.

        Raises:
            ConfigError: if the section requests something unavailable.
        """

    def open_source(self, config: DataConfig, seed: int) -> Source:
        """Open the documents named by a data section."""
        return open_source(config, None, seed=seed)

    def open_stream(
        self,
        config: DataConfig,
        *,
        seed: int,
        seq_len: int,
        once: bool = False,
        steps: int | None = None,
        **part: Any,
    ) -> BatchStream:
        """Open the stream of one data-parallel rank; `part` is for `build_stream`.

        Args:
            once: read each document once; the stream is still endless, but without targets at the
                end.
            steps: length of the run; None if unknown.
        """
        source = self.open_source(config, seed)
        packing = self.packing(config, seq_len, seed)
        if once:
            assert self.hides_ended, "the recipe was checked"
            source = SinglePass(source)
        return build_stream(config, source, packing, **part)

    @abstractmethod
    def preview(self, batch: Batch) -> str:
        """Return the first sample of a batch in readable form, on one line."""

    @classmethod
    def check_files(cls, config: DataConfig) -> None:
        """Check the files named by a section of data, before anything is started.

        Raises:
            ConfigError: if they cannot be read, with the reason.
        """

    def is_tokenized(self, config: DataConfig) -> bool:
        """Whether the section reads tokens that are stored, or are when the run starts."""
        return False

    def unprepared(self, config: DataConfig) -> list[str]:
        """Return the names of sources that are converted to tokens when the run starts.

        Raises:
            ConfigError: if they cannot be read.
        """
        return []

    def notes(self, config: DataConfig) -> Iterator[str]:
        """Yield what `check` and the log say about a section of data that can be read."""
        yield from ()

    def check_amounts(self, config: DataConfig, *, steps: int, sizes: Sequence[StepSizes]) -> None:
        """Check what a new run takes from each source, before any is converted to tokens.

        Raises:
            ConfigError: if a source cannot be read, or has too little.
        """

    @classmethod
    def left_out(cls, config: DataConfig) -> str | None:
        """Return the metric that counts skipped documents; None if none are ever skipped."""
        return None

    def reference(
        self, config: DataConfig, seed: int, open_stream: Callable[[], BatchStream]
    ) -> str | None:
        """Describe a baseline loss that needs no model, if the recipe requests it."""
        return None

    @classmethod
    @abstractmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss over the units of a microbatch, in float32 (0-d)."""

    @classmethod
    def split_loss(cls, group: dist.ProcessGroup, size: int) -> LossFunction:
        """Return `loss` of outputs whose last dim, `size` in all, is sharded over tp ranks."""
        raise NotImplementedError

    def prepare_validation(self, device: torch.device, is_first: bool) -> None:
        """Prepare `measure` on a device; the first rank may log something."""

    def measure(self, batch: Batch) -> Tensor:
        """Return further counts of a batch of held-out data, for `derived`: (n,) int64."""
        return torch.zeros(0, dtype=torch.int64, device=batch.targets.device)

    def picture(self, batch: Batch, outputs: Tensor) -> Tensor:
        """Return the picture of a validation, if the task `has_picture`.

        Args:
            outputs: outputs of the model for the batch.

        Returns:
            (3, height, width) in 0..1.
        """
        raise NotImplementedError

    def derived(self, loss: float, count: int, measured: Sequence[int]) -> dict[str, float | None]:
        """Return further metrics of a validation, from sums over all of a data set."""
        return {}


def previewed(
    batches: Iterator[Batch], task: Task, is_resumed: Callable[[], bool]
) -> Iterator[Batch]:
    """Yield the batches, logging the first sample of the first one; for debugging on a resume."""
    first, level = [next(batches)], logging.DEBUG if is_resumed() else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "first %s: %s", task.sample, task.preview(first[0]))
    yield first.pop()  # a variable would keep it
    yield from batches


TASKS = Registry[type[Task]]("task", {"next_token": "torchtitan.tasks.next_token:NextToken"})

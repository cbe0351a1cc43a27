"""Loss on held-out data, at a set pace, through the same forward as training.

Loss in nats a target says little across tokenizers: longer tokens are fewer and harder. So the
same sum is also told by the bytes of text B that the targets stand for:

    bits per byte = nats / (B ln 2)        perplexity per byte = exp(nats / B)

Special tokens stand for no bytes, but their loss counts: a model has to know where a text ends.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Config, PlannedWorld, Problem
from torchtitan.data import DATASETS, Batch, DataConfig, DataStream, Tokenizer
from torchtitan.data.batch import IGNORED
from torchtitan.data.settings import NEEDS_PATH
from torchtitan.data.token_bytes import BytesUnknown
from torchtitan.logging import logger
from torchtitan.parallel import ParallelModel, World


class ValidationConfig(Config):
    """When to validate, and on what."""

    enable: bool = Field(False, description="Measure the loss on held-out data while training.")
    dataset: str | tuple[str, ...] = Field(
        "python_stdlib_validation",
        description="Name of a data set, or a file or folder; or several, each measured "
        "separately.",
    )
    dataset_path: str | None = Field(
        None,
        description="File or folder to read instead of where the data set normally comes from; "
        "only for a single data set.",
    )
    freq: int = Field(10, ge=1, description="Steps between validations; the last step has one.")
    steps: int = Field(
        10,
        ge=1,
        description="Number of global batches of each data set per validation; always the same "
        "batches.",
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets, by the names that the recipe gives them."""
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    def data(self, training: DataConfig) -> dict[str, DataConfig]:
        """The data section for each data set: the training one, reading other documents."""
        update = {"dataset_path": self.dataset_path, "num_workers": 0, "lanes": -1}
        return {
            name: training.model_copy(update=update | {"dataset": name}) for name in self.datasets
        }

    def problems(self, recipe: Any, world: PlannedWorld) -> Iterator[Problem]:
        if not self.enable:
            return
        names, several = self.datasets, self.data(recipe.data)
        if len(names) == 1:
            yield from several[names[0]].problems(recipe, world)
            return
        if not names:
            yield Problem("dataset", "wanted at least one data set")
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Problem("dataset", f'"{name}" is named twice')
        if self.dataset_path is not None:
            message = "it is of one data set; name files and folders in self.dataset"
            yield Problem("dataset_path", message, ("dataset",))
            return
        for name, config in several.items():
            if name in DATASETS and DATASETS[name].kind in NEEDS_PATH:
                message = f'write the file or folder itself in place of "{name}"'
                yield Problem("dataset", message)
                continue
            for problem in config.problems(recipe, world):
                yield Problem("dataset", f'"{name}": {problem.message}')


Values = dict[str, float | None]


class Sums(NamedTuple):
    """What was measured of one data set, or of all."""

    nats: float
    targets: int
    text: int | None
    """Bytes of text that the targets stand for; None where that is not known."""

    def values(self) -> Values:
        """The loss in nats a target, and for each byte of text."""
        loss: Values = {"validation_loss": self.nats / self.targets}
        if not self.text:
            return loss | {"validation_bits_per_byte": None, "validation_perplexity_per_byte": None}
        nats = torch.tensor(self.nats / self.text, dtype=torch.float64)
        return loss | {
            "validation_bits_per_byte": float(nats / math.log(2)),
            "validation_perplexity_per_byte": float(nats.exp()),
        }


def together(sums: Collection[Sums]) -> Sums:
    """Of several data sets as if they were one."""
    texts = [each.text for each in sums if each.text is not None]
    return Sums(
        nats=sum(each.nats for each in sums),
        targets=sum(each.targets for each in sums),
        text=sum(texts) if len(texts) == len(sums) else None,
    )


class Validator:
    """Measures the validation loss when due."""

    def __init__(
        self,
        config: ValidationConfig,
        open_streams: Mapping[str, Callable[[], DataStream]],
        accumulation: int,
        tokenizer: Tokenizer,
        model: ParallelModel,
        world: World,
    ) -> None:
        """`open_streams` has the held-out data sets by name."""
        self.config, self.open_streams, self.accumulation = config, open_streams, accumulation
        self.model, self.world = model, world
        self.streams: dict[str, DataStream] = {}
        self.byte_counts = self._byte_counts(tokenizer) if config.enable else None

    def _byte_counts(self, tokenizer: Tokenizer) -> Tensor | None:
        try:
            counts = tokenizer.byte_counts()
        except BytesUnknown as reason:
            if self.world.rank == 0:
                logger.warning(
                    "validation: bits and perplexity per byte are null: the tokenizer (%s) does "
                    "not tell how many bytes its tokens stand for: %s",
                    *(tokenizer.fingerprint, reason),
                )
            return None
        return torch.tensor(counts, device=self.world.device.torch_device)

    def is_due(self, step: int, last: int) -> bool:
        """Whether there is a validation after `step`."""
        return self.config.enable and (step % self.config.freq == 0 or step == last)

    def run(self) -> Values:
        """The row of a validation: over all data sets and, if they are several, of each by name.

        Each is over all targets of the held-out batches; the same on every rank.
        """
        sums = {name: self._measure(name) for name in self.open_streams}
        row = together(sums.values()).values()
        if len(sums) > 1:
            for name, each in sums.items():
                row |= {f"{key}/{name}": value for key, value in each.values().items()}
        return row

    def _measure(self, name: str) -> Sums:
        if name not in self.streams:
            self.streams[name] = self.open_streams[name]()
        stream = self.streams[name]
        stream.rewind()
        device = self.world.device.torch_device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        for _ in range(self.config.steps):
            batches = [next(stream).to(device) for _ in range(self.accumulation)]
            nats += self.model.evaluate(batches)
            counts += torch.stack([self._count(batch) for batch in batches]).sum(0)
        self.world.sum(nats, over="loss")
        targets, text = self.world.sum(counts, over="data").tolist()
        return Sums(float(nats), targets, None if self.byte_counts is None else text)

    def _count(self, batch: Batch) -> Tensor:
        """Targets, and the bytes of text that they stand for: (2,) int64."""
        targets = batch.targets[batch.targets != IGNORED]
        text = (
            targets.new_zeros(()) if self.byte_counts is None else self.byte_counts[targets].sum()
        )
        return torch.stack([batch.target_count(), text])

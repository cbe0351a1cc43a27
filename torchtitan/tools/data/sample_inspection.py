"""Samples of a recipe, with their sources and documents, read without a model or other ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, Tokenizer, build_stream
from torchtitan.data.batch import Batch
from torchtitan.data.lanes import ENDED, Lane, Sample, SampleStart, tokenized
from torchtitan.data.order import Document, Identity, Source
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.inputs import open_task
from torchtitan.job import JobConfig
from torchtitan.tasks import NextToken
from torchtitan.tasks.next_token import PackedTokens

MOST_LENGTHS = 2**20
"""Maximum number of documents of a source whose lengths are counted."""

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Inspected:
    """A sample as it is shown."""

    index: int
    source: str
    tokens: list[int]
    documents: list[int]
    """Number of tokens of each document in it, in their order; the rest is padding."""
    text: str
    """Text of all documents."""

    def parts(self) -> Iterator[list[int]]:
        """Yield the tokens of each document in it."""
        first = 0
        for count in self.documents:
            yield self.tokens[first : first + count]
            first += count


@dataclass
class Inspection:
    """Samples of a recipe, and facts about its data."""

    samples: Iterator[Inspected]
    """Read as they are taken; the other fields are complete after the last."""
    tokenizer: Tokenizer
    seq_len: int
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Digest of each source."""
    lengths: dict[str, Lengths] = field(default_factory=dict)
    """Numbers of tokens of documents, by source."""
    totals: dict[str, int] = field(default_factory=dict)
    """Tokens of each source, if known."""
    of_run: dict[str, int] = field(default_factory=dict)
    """Tokens of each source that the whole run reads, if known."""
    read: Counter[str] = field(default_factory=Counter)
    """Tokens of each source in the samples."""

    def add(self, number: int, source: str, sample: Sample) -> Inspected:
        """Count a sample, and return it as it is shown."""
        self.read[source] += self.seq_len
        counts = np.bincount(sample.documents[sample.documents != ENDED])
        tokens = sample.tokens.tolist()
        text = self.tokenizer.decode(tokens[: counts.sum()])
        return Inspected(number, source, tokens, counts.tolist(), text)


@dataclass(frozen=True)
class RecordedPacking:
    """Packing whose batches are lists of samples; it records the lengths of documents."""

    packing: PackedTokens
    lengths: list[int]

    @property
    def identity(self) -> Identity:
        """Settings that must be equal when a run resumes."""
        return self.packing.identity

    def lane(self, number: int, documents: Iterator[Document], start: SampleStart | None) -> Lane:
        """Open a lane."""
        own = self.packing
        rows = tokenized(
            *(documents, own.tokenizer),
            add_bos=own.add_bos,
            add_eos=own.add_eos,
            vocab_size=own.vocab_size,
        )
        return Lane(number, map(self._recorded, rows), own.seq_len, start)

    def _recorded(self, row: Any) -> Any:
        self.lengths.append(len(row[1]))
        return row

    def collate(self, samples: Sequence[Sample]) -> "SampleBatch":
        """Return the samples themselves."""
        return SampleBatch(samples)


@dataclass(frozen=True)
class SampleBatch(Batch):
    """Samples as the lanes return them."""

    samples: Sequence[Sample]


def inspect(job: JobConfig, global_batch: int, first: int, count: int) -> Inspection:
    """Open samples `first` to `first` + `count` of a run.

    Raises:
        ConfigError: if the recipe has no text, or the data cannot be read.
    """
    task = open_task(job)
    if not isinstance(task, NextToken):
        raise ConfigError(f"model.name: got {job.model.name}, whose data is not text")
    config = job.data.model_copy(update={"num_workers": 0})
    packing = task.packing(config, job.training.seq_len, job.debug.seed)
    found = Inspection(iter(()), task.tokenizer, job.training.seq_len)
    sources = open_token_sources(config, task.tokenizer, task.vocab_size)
    numbers = range(first, first + count)
    if sources is None:
        text = task.open_source(config, job.debug.seed)
        found.samples = from_text(found, config, text, packing, global_batch, numbers)
        return found
    stream = TokenStream(
        *(config, sources, packing),
        seq_len=found.seq_len,
        seed=job.debug.seed,
        steps=job.training.steps,
        local_batch_size=1,
        accumulation=global_batch,
        rank=0,
        ranks=1,
    )
    end = job.training.steps * global_batch
    totals = stream.stage(end - 1).totals(end, found.seq_len)
    for source, total in zip(sources, totals, strict=True):
        name, documents = source.name, source.documents
        found.fingerprints[name] = documents.description.fingerprint
        spread = np.linspace(0, len(documents) - 1, min(len(documents), MOST_LENGTHS))
        found.lengths[name] = documents.lengths(spread.astype(np.int64))
        found.totals[name], found.of_run[name] = documents.tokens, total.tokens
    found.samples = (
        found.add(number, stream.source(number), stream.sample(number)) for number in numbers
    )
    return found


def from_text(
    found: Inspection,
    config: DataConfig,
    source: Source,
    packing: PackedTokens,
    global_batch: int,
    numbers: range,
) -> Iterator[Inspected]:
    """Yield samples of text that is tokenized as it is read."""
    name, lengths = config.dataset, list[int]()
    found.fingerprints[name] = str(source.identity.get("files", source.identity["dataset"]))
    stream = build_stream(
        *(config, source, RecordedPacking(packing, lengths)),
        local_batch_size=1,
        accumulation=global_batch,
        rank=0,
        ranks=1,
    )
    stream.skip(numbers.start)
    for number in numbers:
        batch = next(stream)
        assert isinstance(batch, SampleBatch)
        yield found.add(number, name, batch.samples[0])
    found.lengths[name] = np.array(lengths)

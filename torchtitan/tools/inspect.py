"""`torchtitan data inspect`: samples of a recipe as a run would read them.

They are read without a model or other ranks.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from torchtitan.checks import load_job
from torchtitan.config import ConfigError, split_recipe
from torchtitan.data import Tokenizer, build_stream
from torchtitan.data.batch import Batch
from torchtitan.data.lanes import ENDED, Sample
from torchtitan.data.sizes import StepSizes, tokens_before
from torchtitan.data.stream import BatchStream
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.device import pick
from torchtitan.inputs import open_task, require_recipe
from torchtitan.job import JobConfig
from torchtitan.tasks.next_token import NextToken, PackedTokens
from torchtitan.tools.options import Count, Flag, Recipe, integer

START, END = 300, 100
"""Characters of a document that are shown, if it is longer."""


def inspect_samples(
    context: typer.Context,
    recipe: Recipe = None,
    samples: Annotated[int | None, Count("Number of samples (default: 4).")] = None,
    first: Annotated[
        int,
        typer.Option("--from", parser=integer(0), metavar="I", help="First sample (default: 0)."),
    ] = 0,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum of the layout).")
    ] = None,
    as_json: Annotated[
        bool, Flag("--json", "Print a JSON object for each sample, one per line.")
    ] = False,
) -> None:
    """Show the samples that a run reads, and facts about its data."""
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    require_recipe(path, flags, "data inspect")
    job = load_job(path, flags, world_size, pick().type).config
    ranks = world_size or job.parallelism.least_ranks
    found = inspect(job, job.global_batch(job.degrees(ranks)), first, samples or 4)
    for sample in found.samples:
        lines = [json.dumps(asdict(sample))] if as_json else page(sample, found.tokenizer)
        print("\n".join(lines))
    if not as_json:
        print("\n".join(summary(found)))


@dataclass(frozen=True)
class InspectedSample:
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

    samples: Iterator[InspectedSample]
    """Read as they are taken; `read` is complete after the last."""
    tokenizer: Tokenizer
    seq_len: int
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Digest of each source."""
    totals: dict[str, int] = field(default_factory=dict)
    """Tokens of each source, if known."""
    of_run: dict[str, int] = field(default_factory=dict)
    """Tokens of each source that the whole run reads, if known."""
    read: Counter[str] = field(default_factory=Counter)
    """Tokens of each source in the samples."""

    def add(self, number: int, source: str, sample: Sample) -> InspectedSample:
        """Count a sample, and return it as it is shown."""
        self.read[source] += self.seq_len
        counts = np.bincount(sample.documents[sample.documents != ENDED])
        tokens = sample.tokens.tolist()
        text = self.tokenizer.decode(tokens[: counts.sum()])
        return InspectedSample(number, source, tokens, counts.tolist(), text)


@dataclass(frozen=True)
class SampleBatch(Batch):
    """Samples as the lanes return them."""

    samples: Sequence[Sample]


class UncollatedTokens(PackedTokens):
    """Packing whose batches are the samples themselves."""

    def collate(self, samples: Sequence[Sample]) -> SampleBatch:  # type: ignore[override]
        return SampleBatch(samples)


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
    sizes = [StepSizes(0, global_batch, found.seq_len)]
    sizes = job.step_sizes(job.degrees(None)) if job.training.stages else sizes
    one_rank: Any = {"local_batch_size": 1, "accumulation": global_batch, "rank": 0, "ranks": 1}
    one_rank["sizes"] = sizes
    other = (each.start for each in sizes if each.seq_len != sizes[0].seq_len)
    same = tokens_before(next(other, job.training.steps), sizes) // sizes[0].seq_len
    if len(sizes) > 1 and numbers.stop > same:
        raise ConfigError(
            f"--from: got {first}; the samples of one length are those below {same:,} "
            "(training.stages); show these"
        )
    if sources is None:
        source, name = task.open_source(config, job.debug.seed), config.dataset
        found.fingerprints[name] = str(source.identity.get("files", source.identity["dataset"]))
        text = build_stream(config, source, UncollatedTokens(**vars(packing)), **one_rank)
        found.samples = (found.add(number, name, sample) for number, sample in _from(text, numbers))
        return found
    stream = TokenStream(
        config,
        sources,
        packing,
        seq_len=found.seq_len,
        seed=job.debug.seed,
        steps=job.training.steps,
        **one_rank,
    )
    end = tokens_before(job.training.steps, sizes) // found.seq_len
    totals = stream.stage(end - 1).totals(end, found.seq_len)
    for token_source, total in zip(sources, totals, strict=True):
        name, documents = token_source.name, token_source.documents
        found.fingerprints[name] = documents.description.fingerprint
        found.totals[name], found.of_run[name] = documents.tokens, total.tokens
    found.samples = (
        found.add(number, stream.source(number), stream.sample(number)) for number in numbers
    )
    return found


def _from(stream: BatchStream, numbers: range) -> Iterator[tuple[int, Sample]]:
    stream.skip(numbers.start)
    for number in numbers:
        batch = next(stream)
        assert isinstance(batch, SampleBatch)
        yield number, batch.samples[0]


def page(sample: InspectedSample, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the lines of a sample, with a line before each document."""
    padding = len(sample.tokens) - sum(sample.documents)
    more = f", {padding:,} of padding" if padding else ""
    yield f"== sample {sample.index:,}, source {sample.source}: {len(sample.tokens):,} tokens{more}"
    for number, tokens in enumerate(sample.parts(), 1):
        yield f"-- document {number} of {len(sample.documents)}: {len(tokens):,} tokens"
        text = tokenizer.decode(tokens)
        if len(text) > START + END:
            left_out = len(text) - START - END
            text = f"{text[:START]} [... {left_out:,} characters ...] {text[-END:]}"
        yield text
    yield ""


def summary(found: Inspection) -> Iterator[str]:
    """Yield the facts about the data."""
    total, of_run = found.read.total(), sum(found.of_run.values())
    for name in found.of_run or found.read:
        count = found.read[name]
        line = f"source {name}: {count:,} tokens of these samples ({100 * count / total:.1f}%)"
        if of_run:
            share = 100 * found.of_run[name] / of_run
            line += f", {found.of_run[name]:,} of the run ({share:.1f}%)"
            line += f"; it has {found.totals[name]:,}"
        yield line
    yield f"fingerprint of the tokenizer: {found.tokenizer.fingerprint}"
    for name, digest in found.fingerprints.items():
        yield f"fingerprint of {name}: {digest}"

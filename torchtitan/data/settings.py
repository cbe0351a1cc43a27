"""The section `[data]`, and the data sets known by name."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from torchtitan.config import Config, Context, OneOf, Problem, Registry, allowed_names, exists
from torchtitan.data.tokens.formats import TOKEN_FORMATS, TokenFormat
from torchtitan.remote import dangling, is_url, problem_of_url

NO_PART = "documents of a stream, which are read in order, cannot be held out"

TOKENS_FIRST = (
    "text that is tokenized while training is joined; tokenize it first (torchtitan data "
    "tokenize), and name the folder of its tokens"
)
"""Refusal of best-fit packing of text that is tokenized while training."""

FILES = ("local", "text", "jsonl", "parquet")
"""Kinds that are text files."""


def _none_if_zero(value: Any) -> Any:
    is_zero = value == 0 and not isinstance(value, bool)
    return None if is_zero else value


@dataclass(frozen=True)
class Dataset:
    """Location and kind of a named data set."""

    kind: str
    """Key of `torchtitan.data.SOURCES`."""
    about: str
    path: str = ""
    """Repository on the Hugging Face hub."""
    name: str | None = None
    """Subset of that repository, or folder of the standard library."""
    split: str = "train"
    content: str = "text"
    """Kind of content of its documents; a model's task reads one kind."""
    reads_path: bool = False
    """Whether `data.dataset_path` must name its files, as for every kind in `FILES`."""
    drawn: bool = False
    """Whether its documents are drawn at random, so that there are no files."""

    @property
    def needs_path(self) -> bool:
        """Whether a recipe must set `data.dataset_path`."""
        return self.reads_path or self.kind in FILES

    def is_at_hand(self, content: str) -> bool:
        """Whether it is available on every machine, with this kind of content."""
        return self.content == content and not self.needs_path and self.kind != "hub"


DATASETS = Registry[Dataset](
    "dataset",
    {
        "python_stdlib": Dataset(
            "python_stdlib",
            "source files of the running Python's standard library: 12 MB, no download",
        ),
        "python_stdlib_validation": Dataset(
            "python_stdlib", "every 20th of those files, held out", split="validation"
        ),
        "python_topics": Dataset(
            "python_stdlib", "the text of Python's help: 0.7 MB of English", name="pydoc_data"
        ),
        "python_encodings": Dataset(
            "python_stdlib", "Python's tables of characters: 1 MB", name="encodings"
        ),
        "text": Dataset("text", "plain text files under data.dataset_path"),
        "jsonl": Dataset("jsonl", "JSON Lines files in data.dataset_path, one document per line"),
        "parquet": Dataset("parquet", "Parquet files in data.dataset_path, one document per row"),
        "c4": Dataset("hub", "C4, English, streamed", "allenai/c4", "en"),
        "c4_validation": Dataset(
            "hub", "the validation split of C4", "allenai/c4", "en", "validation"
        ),
        "c4_test": Dataset("local", "a small local extract of C4 under data.dataset_path"),
        "fineweb_edu": Dataset(
            "hub", "FineWeb-Edu, 10 billion tokens", "HuggingFaceFW/fineweb-edu", "sample-10BT"
        ),
        "synthetic": Dataset(
            "synthetic", "random tokens, to measure speed without reading anything", drawn=True
        ),
    },
)
"""Data sets by their name in recipes."""


class SourceConfig(Config):
    """Source of a mixture. Text is tokenized once, before the first step."""

    name: str | None = None
    """Name in metrics and messages. Default: the last part of the path."""
    dataset: str | None = None
    """Name of a data set, as data.dataset."""
    path: str | None = None
    """File or folder of tokens or text, or where the data set is read from."""
    weight: float | None = Field(None, ge=0)
    """Share of the run's tokens, relative to the weights of other sources."""
    tokens: int | None = Field(None, ge=1)
    """Number of tokens to read in the run, instead of a weight."""
    epochs: float | None = Field(None, gt=0)
    """Number of passes over the source in the run, instead of a weight."""
    repeat: bool = False
    """Start the source again at its end, as often as its weight or tokens require; false: reject a
    run that would have to."""
    accept_changes: bool = False
    """Resume even if the source has changed since the checkpoint."""
    text_key: str | None = None
    """Key of the text. Default: data.text_key."""
    format: Annotated[TokenFormat, OneOf(TOKEN_FORMATS, "auto")] = TokenFormat()

    @property
    def label(self) -> str:
        """Name of the source."""
        return self.name or self.dataset or (self.path or "").rstrip("/").rpartition("/")[2]

    @property
    def most_epochs(self) -> int | None:
        """Number of times that the source may be read; None: any."""
        return None if self.repeat else math.ceil(self.epochs or 1)

    def with_weight(self) -> Self:
        """Return the source with a weight of 1 instead of an amount that a whole run reads."""
        amount = {"weight": 1.0, "tokens": None, "epochs": None, "repeat": True}
        return self if self.weight is not None else self.model_copy(update=amount)

    @property
    def places(self) -> tuple[str, ...]:
        """Paths that must exist."""
        named = self.dataset if self.dataset not in DATASETS else None
        return tuple(path for path in (self.path, named) if path is not None)

    @property
    def spec(self) -> dict[str, float]:
        """Amount of the source in the mixture: its weight, tokens or epochs."""
        amounts = {"weight": self.weight, "tokens": self.tokens, "epochs": self.epochs}
        return {key: value for key, value in amounts.items() if value is not None}

    def problems(self, context: Context) -> Iterator[Problem]:
        if not self.dataset and self.path is None:
            yield Problem("path", "the source has no path; set it, or self.dataset")
        amounts = [key for key in ("weight", "tokens", "epochs") if getattr(self, key) is not None]
        if len(amounts) != 1:
            found = " and ".join(amounts) or "neither weight, tokens nor epochs"
            yield Problem("weight", f"the source has {found}; give one of the three")


class StageConfig(Config):
    """Weights of the sources from a step or a number of tokens on."""

    from_step: int | None = Field(None, ge=0)
    """Number of steps before this stage."""
    from_tokens: int | None = Field(None, ge=0)
    """Number of tokens before this stage, instead of from_step."""
    weights: tuple[float, ...] = ()
    """Weights of the sources, in their order; a source with weight 0 is not read."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if (self.from_step is None) == (self.from_tokens is None):
            yield Problem("from_step", "a stage has either from_step or from_tokens")
        yield from weight_problems(self.weights, "weights")


def weight_problems(weights: Sequence[float], key: str) -> Iterator[Problem]:
    """Find weights that are no shares."""
    if any(weight < 0 for weight in weights):
        yield Problem(key, "wanted weights of at least 0")
    elif not sum(weights):
        yield Problem(key, "the weights add up to 0; give at least one source a weight")


class DataConfig(Config):
    """Documents to train on, and how to read them."""

    dataset: str = "python_stdlib"
    """Name of a data set (a key of torchtitan.data.DATASETS), or a file or folder."""
    dataset_path: str | None = None
    """File or folder to read instead of the default location of `dataset`."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources of a mixture, read instead of `dataset`."""
    stages: tuple[StageConfig, ...] = ()
    """Later mixtures of the sources, in order."""
    format: Annotated[TokenFormat, OneOf(TOKEN_FORMATS, "auto")] = TokenFormat()
    accept_changes: bool = False
    """Resume even if tokenized data has changed since the checkpoint."""
    text_key: str = "text"
    """Column or JSON key that holds a document's text."""
    null_text: Literal["error", "skip"] = "error"
    """Reaction to a document whose text is null. error: end the run; skip: skip and count it."""
    cache: str | None = None
    """Folder for indexes, tokenized text and copies of remote files, on a disk of each node.
    Default: .torchtitan next to the data; for URLs ~/.cache/torchtitan/data."""
    cache_limit: float = Field(256, gt=0)
    """Maximum size of the copies of remote shards and text in data.cache, in GiB; two windows
    (data.shuffle_window) per source must fit. Copies are deleted in order of their last use."""
    shuffle_window: float | None = Field(None, gt=0)
    """Size in GiB of the windows of consecutive shards within which tokenized documents are
    shuffled; the windows are shuffled too. Default: 8 for URLs, so that shards are fetched once per
    epoch; for data on a disk, one window with all documents."""
    streaming: bool = True
    """Stream Hugging Face data sets over the network during training; false: download them first,
    which allows a full shuffle and an instant resume."""
    shuffle: bool = True
    """Shuffle the documents in each epoch, by the seed; for streamed data sets, shuffle the
    shards."""
    document_bytes: int = Field(65536, ge=1)
    """Size in bytes above which a text file is read as several documents of about this size, split
    at line ends."""
    add_bos: bool | None = None
    """Start each document with the tokenizer's BOS token, if it has one. Default: the tokenizer's
    add_bos_token, or true; if BOS is EOS, a single one separates documents."""
    add_eos: bool | None = None
    """End each document with the tokenizer's EOS token. Default: the tokenizer's add_eos_token, or
    true."""
    validation_fraction: Annotated[float | None, BeforeValidator(_none_if_zero)] = Field(
        None, ge=0, lt=1
    )
    """Fraction of the documents to hold out; 0: none. Training never reads them, and validation
    reads them instead of validation.dataset. The same documents are held out in every run, even
    when others are added."""
    packing: Literal["join", "best_fit"] = "join"
    """Packing of tokenized documents into samples. join: join the documents and cut them; best_fit:
    keep documents that fit in a sample whole, and pad the samples."""
    lanes: int = Field(-1, ge=-1)
    """Number of independent streams of packed documents, a multiple of the global batch; -1: one
    per sequence in the global batch. A run can resume with any global batch size that divides
    it."""
    skip_samples: int = Field(0, ge=-1)
    """Sequences to skip at the start of a run without a data position to resume from; -1: as many
    as the checkpoint in initial_load_path was trained on, by its token count."""
    num_workers: int = Field(1, ge=0)
    """Threads per rank that read and tokenize ahead, or processes that decode; 0: read data within
    the step."""
    prefetch_factor: int = Field(2, ge=1)
    """Number of steps for which samples are prepared ahead."""
    report_unigram_loss: bool = False
    """At the start, log the loss of predicting tokens by their frequency alone, a baseline for any
    model."""

    _is_held_out: bool = PrivateAttr(False)

    @property
    def is_held_out(self) -> bool:
        """Whether `validation_fraction` of the documents are read, instead of all others."""
        return self._is_held_out

    def held_out(self) -> Self:
        """Return the section with the settings of validation."""
        section = self.model_copy(
            update={"num_workers": 0, "lanes": -1, "sources": (), "stages": (), "packing": "join"}
        )
        section._is_held_out = True
        return section

    @property
    def key_of_files(self) -> str:
        """Key that names the files."""
        return "dataset_path" if self.dataset_path else "dataset"

    def sections(self) -> list[tuple[str, Self]]:
        """Return the key of the files of each source of a mixture, and its section."""
        if not self.sources:
            return [(self.key_of_files, self)]
        return [
            (f"sources.{number}.{'path' if source.path else 'dataset'}", self.section_for(source))
            for number, source in enumerate(self.sources)
            if source.path or source.dataset
        ]

    def section_for(self, source: SourceConfig) -> Self:
        """Return the section that reads one source of the mixture alone."""
        named = (source.dataset, source.path) if source.dataset else (source.path, None)
        update = {
            "dataset": named[0],
            "dataset_path": named[1],
            "format": source.format,
            "accept_changes": source.accept_changes,
            "text_key": source.text_key or self.text_key,
            "sources": (),
            "stages": (),
            "packing": "join",  # the mixture's own is of the samples
        }
        return self.model_copy(update=update)

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.cache is not None and is_url(self.cache):
            yield Problem("cache", "it is a URL; set a folder on a disk")
        if self.shuffle_window is not None and self.cache_limit < 2 * self.shuffle_window:
            message = "it cannot hold two of self.shuffle_window; raise it, or lower that"
            yield Problem("cache_limit", message, ("shuffle_window",))
        if self.sources:
            yield from self.mixture_problems(context)
            return
        if self.stages:
            yield Problem("stages", "there are no self.sources to mix; name them", ("sources",))
        dataset, path = self.dataset, self.dataset_path
        description = DATASETS.get(dataset)
        if description and self.packing == "best_fit":
            yield Problem("packing", TOKENS_FIRST, ("dataset",))
        if path is not None and (why := why_missing(path)):
            yield Problem("dataset_path", why)
        if description is None and (why := why_missing(dataset)):
            yield Problem("dataset", unknown_dataset(dataset) if why == NOWHERE else why)
        elif description is None and path is not None:
            message = f'self.dataset is already a path, "{dataset}"; give only one'
            yield Problem("dataset_path", message, ("dataset",))
        elif description and path is None and description.needs_path:
            message = f'the data set "{dataset}" needs the file or folder to read'
            yield Problem("dataset_path", message, ("dataset",))
        elif description and path is not None and description.drawn:
            message = f'the data set "{dataset}" reads no files'
            yield Problem("dataset_path", message, ("dataset",))
        if description and self.validation_fraction is not None:
            if description.content != "text" or description.drawn:
                message = f'only text can be held out, and the data set "{dataset}" has none'
                yield Problem("validation_fraction", message, ("dataset",))
            elif description.kind == "hub" and path is None and self.streaming:
                message = f"{NO_PART}; set self.streaming = false"
                yield Problem("validation_fraction", message, ("dataset", "streaming"))

    def mixture_problems(self, context: Context) -> Iterator[Problem]:
        """Find sources and stages that cannot be read, or mixed."""
        labels = [source.label for source in self.sources]
        for key in ("dataset", "dataset_path"):
            if key in self.model_fields_set and getattr(self, key) is not None:
                message = "it is not read, as there are self.sources"
                yield Problem(key, message, ("sources",), "note")
        if self.validation_fraction is not None:
            message = "sources of a mixture have no held-out part; name other data in [validation]"
            yield Problem("validation_fraction", message, ("sources",))
        for number, source in enumerate(self.sources):
            place = f"sources.{number}"
            if labels.index(source.label) < number:
                message = f'another source is called "{source.label}" too; set name'
                yield Problem(f"{place}.name", message)
            is_path = not source.dataset and source.path not in (None, *DATASETS)
            if is_path and (why := why_missing(source.path or "")):
                yield Problem(f"{place}.path", why)
            elif source.dataset or source.path is not None:
                for problem in self.section_for(source).problems(context):
                    key = "path" if problem.path == "dataset" and not source.dataset else "dataset"
                    if problem.path in ("dataset", "dataset_path"):
                        key = "path" if problem.path == "dataset_path" else key
                        message = problem.message.replace("self.dataset", "the data set")
                        yield Problem(f"{place}.{key}", message)
        if all(source.weight is not None for source in self.sources):
            weights = [source.weight or 0 for source in self.sources]
            for problem in weight_problems(weights, "sources.0.weight"):
                yield problem
        yield from self.stage_problems(context)

    def stage_problems(self, context: Context) -> Iterator[Problem]:
        """Find stages that do not follow one another, or have weights for other sources."""
        for number, stage in enumerate(self.stages):
            place = f"stages.{number}"
            if (count := len(stage.weights)) != len(self.sources):
                message = f"it has {count} weights for {len(self.sources)} sources; give one each"
                yield Problem(f"{place}.weights", message, ("sources",))
            if number:
                before = self.stages[number - 1]
                for key in ("from_step", "from_tokens"):
                    here, there = getattr(stage, key), getattr(before, key)
                    if None not in (here, there) and here <= there:
                        message = f"the stage before it starts at {there}; start later"
                        yield Problem(f"{place}.{key}", message)
        if self.stages and any(source.weight is None for source in self.sources):
            message = "stages need a weight for every source, not tokens or epochs"
            yield Problem("stages", message, ("sources",))

    def batch_problems(self, batch: int, ranks: int) -> Iterator[Problem]:
        """Find lanes and workers that are not divisible by the number of sequences and ranks."""
        lanes = batch if self.lanes == -1 else self.lanes
        if lanes < 1 or lanes % batch:
            message = (
                f"it is not a multiple of the {batch} sequences in the global batch; "
                f"use -1 or {batch}, {2 * batch}, {3 * batch}, ..."
            )
            yield Problem("lanes", message)
        elif self.num_workers and (each := lanes // ranks) % self.num_workers:
            allowed = [str(n) for n in range(each + 1) if n == 0 or each % n == 0]
            message = f"it does not divide the {each} lanes of each rank; use {', '.join(allowed)}"
            yield Problem("num_workers", message, ("lanes",))


NOWHERE = "there is no such file or folder"


def why_missing(path: str) -> str | None:
    """Return the reason why there is nothing at a path, or a URL cannot be opened; None if it can.

    The store of a URL is not asked.
    """
    if is_url(path):
        return problem_of_url(path)
    if exists(path):
        return None
    if link := dangling(os.path.expanduser(path)):
        return link
    if exists(f"{path}.idx"):  # Megatron names both files by what they have in common
        return f"{NOWHERE}; did you mean {path}.idx?"
    return NOWHERE


def unknown_dataset(name: str) -> str:
    """Say that a name is not a data set, and how to read one of the Hugging Face hub."""
    known = [key for key, dataset in DATASETS.items() if dataset.path == name]
    fix = allowed_names(name, DATASETS)
    if known:
        fix = f"use {' or '.join(known)}"
    elif re.fullmatch(r"[\w-]+/[\w-][\w.-]*", name):
        fix = (
            "download a data set of the Hugging Face hub, and give the folder (hf download "
            f"{name} --repo-type dataset --local-dir FOLDER), or add it to DATASETS to stream it "
            "(docs/extending.md)"
        )
    return f"not a data set name and not a path; {fix}"


DATA = Registry[type[DataConfig]]("data", {})
"""Settings classes that extend `[data]` for one kind of content, by its name.

Each adds a section of that name, so `[data.NAME]` may also be written where it has no effect.
"""


def data_class(section: Mapping[str, Any]) -> type[DataConfig]:
    """Return the settings class of a section `[data]` with these keys, by data set or sections."""
    name = section.get("dataset")
    dataset = DATASETS.get(name) if isinstance(name, str) else None
    kinds = (dataset.content, *section) if dataset else section
    return next((DATA[kind] for kind in kinds if kind in DATA), DataConfig)


def without_idle_sections(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Drop each `[data.NAME]` for another kind of content from a recipe (dotted keys)."""
    dataset = DATASETS.get(recipe.get("data.dataset", ""))
    content = dataset.content if dataset else "text"
    idle = tuple(f"data.{name}." for name in DATA if name != content)
    return {key: value for key, value in recipe.items() if not key.startswith(idle)}

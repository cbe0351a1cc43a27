"""The section `[data]`, and the data sets known by name."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, PrivateAttr

from torchtitan.config import Config, Context, Problem, Registry, allowed_names, exists

NO_PART = "documents of a stream, which are read in order, cannot be held out"

FILES = ("local", "text", "jsonl", "parquet")
"""Kinds that are text files."""


@dataclass(frozen=True)
class Dataset:
    """Location and kind of a named data set."""

    kind: str
    """Key of `torchtitan.data.SOURCES`."""
    about: str
    path: str = ""
    """Repository on the Hugging Face hub."""
    name: str | None = None
    """Subset of that repository."""
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
        "text": Dataset("text", "plain text files under data.dataset_path"),
        "jsonl": Dataset(
            "jsonl", "JSON Lines files under data.dataset_path, one document per line"
        ),
        "parquet": Dataset(
            "parquet", "Parquet files under data.dataset_path, one document per row"
        ),
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


class DataConfig(Config):
    """Documents to train on, and how to read them."""

    dataset: str = Field(
        "python_stdlib",
        description="Name of a data set (a key of torchtitan.data.DATASETS), or a file or folder.",
    )
    dataset_path: str | None = Field(
        None, description="File or folder to read instead of where `dataset` normally comes from."
    )
    text_key: str = Field("text", description="Column or JSON key that holds a document's text.")
    streaming: bool = Field(
        True,
        description="Hugging Face data sets: stream them over the network during training; "
        "false: download them first, which allows a full shuffle and an instant resume.",
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the documents again in each epoch, by the seed (streamed data "
        "sets: shuffle their shards).",
    )
    document_bytes: int = Field(
        65536,
        ge=1,
        description="Text files: a longer file is read as several documents of about this many "
        "bytes, split at line ends.",
    )
    add_bos: bool = Field(True, description="Start each document with the tokenizer's BOS token.")
    add_eos: bool = Field(True, description="End each document with the tokenizer's EOS token.")
    validation_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of the documents to hold out. They are never trained on, and "
        "validation reads them instead of validation.dataset. The same documents are held out in "
        "every run, and remain so when others are added.",
    )
    lanes: int = Field(
        -1,
        ge=-1,
        description="Number of independent sequences of packed documents, a multiple of the global "
        "batch; -1: one per sequence in the global batch. A run can resume with any global batch "
        "size that divides it.",
    )
    skip_samples: int = Field(
        0,
        ge=-1,
        description="Samples (sequences) to skip at the start of a run without a data "
        "position to resume from; -1: as many as the checkpoint in "
        "initial_load_path was trained on, by its count of tokens.",
    )
    num_workers: int = Field(
        1,
        ge=0,
        description="Threads per rank that read and tokenize ahead; 0: do it within the step.",
    )
    prefetch_factor: int = Field(
        2, ge=1, description="Number of steps for which the workers prepare samples in advance."
    )
    report_unigram_loss: bool = Field(
        False,
        description="At the start, print the loss of predicting tokens by their frequency "
        "alone, a baseline for any model.",
    )

    _is_held_out: bool = PrivateAttr(False)

    @property
    def is_held_out(self) -> bool:
        """Whether `validation_fraction` of the documents are read, instead of all others."""
        return self._is_held_out

    def held_out(self) -> Self:
        """Return the section with the settings of validation."""
        section = self.model_copy(update={"num_workers": 0, "lanes": -1})
        section._is_held_out = True
        return section

    def problems(self, context: Context) -> Iterator[Problem]:
        dataset, path = self.dataset, self.dataset_path
        description = DATASETS.get(dataset)
        if path is not None and not exists(path):
            yield Problem("dataset_path", "there is no such file or folder")
        if description is None and not exists(dataset):
            yield Problem("dataset", unknown_dataset(dataset))
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

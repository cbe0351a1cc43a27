"""Opening of the sources of a mixture, or of a single tokenized data set."""

import contextlib
import hashlib
import heapq
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError, hub
from torchtitan.data.file_cache import GIB, cache_folder, reading
from torchtitan.data.settings import DATASETS, TOKENS_FIRST, DataConfig, SourceConfig
from torchtitan.data.sources import open_source, path_of, stamps
from torchtitan.data.tokenizer import Tokenizer, separators
from torchtitan.data.tokens.formats import OwnFormat, TokenFormat
from torchtitan.data.tokens.index import INDEX, TokenDocuments, check_limit, read_description
from torchtitan.data.tokens.index_cache import find_format, open_tokens
from torchtitan.data.tokens.tokenizing import recorded_content, tokenize
from torchtitan.logging import logger
from torchtitan.remote import location, path_to_read


@dataclass(frozen=True)
class TokenSource:
    """A source of tokenized documents, and its settings."""

    config: SourceConfig
    documents: TokenDocuments

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.config.label

    @property
    def identity(self) -> dict[str, str | None]:
        """Digests that tell whether the source has changed; None where unknown."""
        about, window = self.documents.description, self.documents.shuffle_window
        return {
            "fingerprint": about.fingerprint,
            "content": about.content,
            "shuffle_window": f"{window:g} GiB" if window else "all documents",
        }


@reading()
def open_token_sources(
    config: DataConfig, tokenizer: Tokenizer, vocab_size: int
) -> list[TokenSource] | None:
    """Open the sources of the section; None if it reads text that is tokenized while training.

    Raises:
        ConfigError: if they cannot be read.
    """
    if not config.sources:
        documents = _open_shards(config, tokenizer, vocab_size)
        alone = SourceConfig(
            name="data", weight=1, repeat=True, accept_changes=config.accept_changes
        )
        return None if documents is None else [TokenSource(alone, documents)]
    # Mistakes in those that are stored are met before any text is tokenized.
    stored = open_stored(config, tokenizer, vocab_size)
    sources = []
    for source, documents in zip(config.sources, stored, strict=True):
        if documents is None:
            documents = open_tokenized(config.section_for(source), tokenizer, vocab_size)
        sources.append(TokenSource(source, documents))
    needed = sum(source.documents.cache_bytes for source in sources)
    check_limit(int(config.cache_limit * GIB), needed, "two windows of the shards of each source")
    return sources


@reading()
def open_stored(
    config: DataConfig, tokenizer: Tokenizer, vocab_size: int
) -> list[TokenDocuments | None]:
    """Open the sources of a mixture; None for each of text that has yet to be tokenized.

    Raises:
        ConfigError: if they cannot be read.
    """
    found = []
    for section in map(config.section_for, config.sources):
        documents = _open_shards(section, tokenizer, vocab_size)
        if documents is None and is_complete(folder := folder_of_tokens(section, tokenizer)):
            documents = TokenDocuments(folder, folder, vocab_size)
        found.append(documents)
    return found


def shards_of(config: DataConfig) -> tuple[Path, TokenFormat] | None:
    """Return the path and format of the shards that the section names; None if it names text."""
    if config.sources or config.dataset in DATASETS:
        return None
    path = path_to_read(config.dataset, hub.DATA)
    format = find_format(path, config.format)
    return (path, format) if format else None


def lacks_tokenizer(config: DataConfig) -> bool:
    """Whether the section only reads tokens that do not say which tokenizer made them."""
    sections = [config.section_for(source) for source in config.sources] or [config]
    try:
        found = [shards_of(section) for section in sections]
        return all(shards and not _made_by(*shards) for shards in found)
    except ConfigError:
        return False  # reported when they are opened


def has_no_separator(path: Path, format: TokenFormat) -> bool:
    """Whether shards say that their documents have neither BOS nor EOS."""
    about = read_description(path) if isinstance(format, OwnFormat) else None
    return about is not None and about.add_bos is about.add_eos is False


def _made_by(path: Path, format: TokenFormat) -> str | None:
    return read_description(path).tokenizer if isinstance(format, OwnFormat) else None


def check_text_or_tokens(config: DataConfig) -> None:
    """Refuse settings that only text that is tokenized while training has, or only tokens."""
    if config.sources:
        return
    is_text = shards_of(config) is None
    if config.packing == "best_fit" and is_text:
        raise ConfigError(f'data.packing = "best_fit": {TOKENS_FIRST}')
    if config.validation_fraction is not None and not is_text:
        raise ConfigError(
            "data.validation_fraction: tokens have no held-out part; remove it, and name other "
            "data in [validation]"
        )


def _open_shards(
    config: DataConfig, tokenizer: Tokenizer, vocab_size: int
) -> TokenDocuments | None:
    found = shards_of(config)
    if found is None:
        return None
    path, format = found
    documents = open_tokens(
        path,
        format,
        tokenizer,
        min(vocab_size, tokenizer.vocab_size),
        location(config.cache) if config.cache else None,
        shuffle_window=config.shuffle_window,
        cache_limit=config.cache_limit,
    )
    end = getattr(format, "end", None)
    if end is not None and end >= vocab_size:
        raise ConfigError(f"data.format.end: got {end}; the model's vocabulary has {vocab_size:,}")
    made_by = documents.description.tokenizer
    if made_by not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{path}: its tokens were made by another tokenizer, {made_by}, and "
            f"model.tokenizer_path is {tokenizer.fingerprint}; set it to the same"
        )
    return documents


def open_tokenized(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> TokenDocuments:
    """Open the tokens of one source; text is tokenized first, once, by one process of the node.

    Raises:
        ConfigError: if it cannot be read, or is streamed from elsewhere.
    """
    documents = _open_shards(config, tokenizer, vocab_size)
    if documents is not None:
        return documents
    folder = folder_of_tokens(config, tokenizer)
    if not is_complete(folder):
        logger.info(
            "data: tokenizing %s once, into %s; then its number of tokens is checked",
            config.dataset_path or config.dataset,
            folder,
        )
        tokenize(config, tokenizer, folder, processes=os.cpu_count() or 1, show_progress=True)
    return TokenDocuments(folder, folder, vocab_size)


def folder_of_tokens(config: DataConfig, tokenizer: Tokenizer) -> Path:
    """Return the folder in the cache for the tokens of a source of text.

    Raises:
        ConfigError: if it cannot be read, or is streamed from elsewhere.
    """
    dataset = DATASETS.get(config.dataset)
    if dataset and (dataset.drawn or (dataset.kind == "hub" and config.streaming)):
        how = "drawn at random" if dataset.drawn else "streamed"
        raise ConfigError(
            f"{config.dataset} is {how}, and a mixture reads tokens that are stored; write them "
            f"with torchtitan data tokenize --dataset {config.dataset}, and name their folder"
        )
    text = open_source(config, tokenizer, seed=0)
    made_of = {
        key: value
        for key, value in text.identity.items()
        if key not in ("seed", "shuffle", "order")
    }
    add_bos, add_eos = separators(tokenizer, config.add_bos, config.add_eos)
    made_of |= {"tokenizer": tokenizer.fingerprint, "add_bos": add_bos, "add_eos": add_eos}
    # The identity has the names of files in their folder, which others in the cache may have too.
    found, content = stamps(config), made_of.pop("content", None)
    earlier = _folder(config, [made_of, [stamp[:3] for stamp in found]])  # without digests
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if is_complete(earlier) and recorded_content(earlier, content) == content:
            return earlier
    return _folder(config, [made_of | {"content": content}, found])


def is_complete(folder: Path) -> bool:
    """Whether a folder has all tokens of its text."""
    return (folder / INDEX).is_file()


def _folder(config: DataConfig, made_of: Any) -> Path:
    key = json.dumps(made_of, sort_keys=True).encode()
    return _cache(config) / f"tokens-{hashlib.sha256(key).hexdigest()[:12]}"


def untokenized(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Return the names of the sources of text that have yet to be tokenized.

    Raises:
        ConfigError: if one of them cannot be read.
    """
    sections = [(source.label, config.section_for(source)) for source in config.sources]
    return [
        name
        for name, section in sections
        if shards_of(section) is None and not is_complete(folder_of_tokens(section, tokenizer))
    ]


def _cache(config: DataConfig) -> Path:
    """Return the folder for the tokens of a text source."""
    return cache_folder(path_of(config), location(config.cache) if config.cache else None)


PART = 4096
"""Samples that are assigned at a time."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in proportion to `weights`, exactly as their decimals are written."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    common = math.gcd(*whole) or 1
    return [weight // common for weight in whole]


class Turns(NamedTuple):
    """Assignment of some consecutive samples."""

    sources: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    """Number of each sample among those of its source."""


class MixtureSchedule:
    """Source of each sample of a mixture, and the number of the sample in that source.

    It repeats after as many samples as the sum of the weights.
    """

    def __init__(
        self, weights: Sequence[int], before: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            weights: the sources' shares, in any unit; 0 for a source that is not read.
            before: number of samples that were assigned already; others are counted from there.
            counts: number of them that each source has.
        """
        self.weights, self.before = tuple(weights), before
        self.before_of = tuple(counts or (0,) * len(weights))
        self.period = sum(weights)
        self._counts = [(0,) * len(weights)]  # samples of each source before each part
        self._part = lru_cache(maxsize=64)(self._assign)

    def turn(self, number: int) -> tuple[int, int]:
        """Return the source of a sample, and its number in that source."""
        periods, rest = divmod(number, self.period)
        turns, place = self._at(rest)
        source = int(turns.sources[place])
        return source, int(turns.numbers[place]) + periods * self.weights[source]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        periods, rest = divmod(samples, self.period)
        whole = [periods * weight for weight in self.weights]
        if not rest:
            return whole
        turns, place = self._at(rest - 1)
        before = self._counts[(rest - 1) // PART]
        inside = np.bincount(turns.sources[: place + 1], minlength=len(whole))
        return [a + b + int(c) for a, b, c in zip(whole, before, inside, strict=True)]

    def least(self, source: int, samples: int) -> int:
        """Return a source's share of the first `samples`, rounded down: `counts` has 0 or 1 more.

        Unlike `counts`, it takes no time.
        """
        share = (self.before + samples) * self.weights[source] // self.period
        return share - self.before_of[source]

    def after(self, samples: int) -> "MixtureSchedule":
        """Return the rest of the schedule after the first `samples`."""
        counts = zip(self.before_of, self.counts(samples), strict=True)
        return MixtureSchedule(self.weights, self.before + samples, [a + b for a, b in counts])

    def _at(self, number: int) -> tuple[Turns, int]:
        part, place = divmod(number, PART)
        while part >= len(self._counts):
            self._part(len(self._counts) - 1)
        return self._part(part), place

    def _assign(self, part: int) -> Turns:
        counts = list(self._counts[part])
        first = self.before + part * PART
        sources, numbers = np.empty((2, PART), np.int64)
        ready: list[tuple[int, int]] = []  # deadline, source
        waiting = [(self._release(s, counts[s]), s) for s, w in enumerate(self.weights) if w]
        heapq.heapify(waiting)
        for place in range(PART):
            while waiting and waiting[0][0] <= first + place:
                _, source = heapq.heappop(waiting)
                heapq.heappush(ready, (self._deadline(source, counts[source]), source))
            _, source = heapq.heappop(ready)
            sources[place], numbers[place] = source, counts[source]
            counts[source] += 1
            heapq.heappush(waiting, (self._release(source, counts[source]), source))
        if part + 1 == len(self._counts):
            self._counts.append(tuple(counts))
        return Turns(sources, numbers)

    def _release(self, source: int, number: int) -> int:
        return (self.before_of[source] + number) * self.period // self.weights[source]

    def _deadline(self, source: int, number: int) -> int:
        return -(-(self.before_of[source] + number + 1) * self.period // self.weights[source])

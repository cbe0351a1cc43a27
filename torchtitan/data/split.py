"""Division of documents into those that are trained on and those that are held out.

A document is identified by its file and its number in it. A generator seeded by the name of the
file draws a number for each of its documents, in order, so documents that are appended to a file,
and files that are added, leave all others where they were.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.documents import Documents


class CountedDocuments(Documents, Protocol):
    """Documents of several files, one file after the other."""

    counts: Sequence[tuple[str, int]]
    """Name of each file, relative to the data set's folder, and its number of documents."""


class DocumentsPart:
    """The documents that are held out, or all others."""

    def __init__(self, documents: CountedDocuments, fraction: float, held_out: bool) -> None:
        """
        Args:
            fraction: fraction of the documents that is held out.
            held_out: whether this is the part that is held out.

        Raises:
            ConfigError: if one of the parts is empty.
        """
        self._documents, self.total = documents, len(documents)
        chosen = are_held_out(documents.counts, fraction)
        if (count := int(chosen.sum())) in (0, self.total):
            raise ConfigError(
                f"data.validation_fraction: {fraction:g} holds out {'all' if count else 'none'} of "
                f"{self.total:,} document{'s' * (self.total > 1)}; use another fraction or more "
                "documents (a smaller data.document_bytes splits text files further)"
            )
        self._numbers = np.flatnonzero(chosen == held_out)
        bounds = np.searchsorted(self._numbers, documents.windows)
        self.windows: list[int] = np.unique(bounds).tolist()
        self.fingerprint = documents.fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._documents[int(self._numbers[index])]


def are_held_out(counts: Sequence[tuple[str, int]], fraction: float) -> npt.NDArray[np.bool_]:
    """Return for each document whether it is held out.

    Raises:
        ConfigError: if `counts` are no pairs.
    """
    try:
        pairs = [(str(file), int(count)) for file, count in counts]
    except (TypeError, ValueError):
        raise ConfigError(
            f"`counts` of the documents are {counts!r:.80}; wanted a list of pairs: the name of "
            "each file, and its number of documents"
        ) from None
    draws = [np.random.Philox(key=_key(file)).random_raw(count) for file, count in pairs]
    return np.concatenate(draws) < np.uint64(fraction * 2**64)


def _key(file: str) -> int:
    return int.from_bytes(hashlib.sha256(file.encode()).digest()[:16], "little")

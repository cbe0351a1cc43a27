"""Sources of documents, and the order of their documents.

The order depends on the seed alone. Documents are numbered j = 0, 1, 2, ... without end, and
assigned to lanes: lane l of L reads j = l, l + L, l + 2L, ... Where documents can be read in any
order, epoch j // N goes through all N of them, in an order drawn from (seed, epoch); so a lane's
documents do not depend on the number of ranks or threads.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Identity = dict[str, str | int | float | bool]


class Position(NamedTuple):
    """Position of a document in its lane's sequence; enough to resume reading there."""

    round: int
    """Epoch; for data streamed by shard, the number of shards before this one."""
    document: int
    """Number of the document inside that epoch or shard."""


class Document(NamedTuple):
    position: Position
    content: Any
    """Content of the kind `Dataset.content`; for text a string, or tokens if there is no text."""


class Source(Protocol):
    """Endless sequence of documents, assigned to lanes."""

    identity: Identity
    """Settings that determine the sequence; a run can only resume on equal ones."""

    def epoch(self, position: Position) -> int:
        """Return the number of complete passes over the documents before `position`."""

    def advice(self, lanes: int) -> str | None:
        """Return a warning about this number of lanes, with a remedy; None if there is none."""

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        """Return the documents of each of the `lanes` that is in `starts`, from its start on.

        One call serves one thread: the iterators it returns may share a reader.
        """


class Once:
    """Documents of a source, each once: its lanes end with the first epoch."""

    def __init__(self, source: Source) -> None:
        self.identity, self.epoch = source.identity, source.epoch
        self._source = source

    def advice(self, lanes: int) -> str | None:
        return None

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        return {
            lane: itertools.takewhile(lambda d: self.epoch(d.position) == 0, documents)
            for lane, documents in self._source.read(starts, lanes).items()
        }


def drawn_order(
    windows: Sequence[int], seed: int, epoch: int, shuffle: bool
) -> Sequence[int] | npt.NDArray[np.int64]:
    """Return the order of the items of an epoch: windows shuffled, and items shuffled within each.

    `windows` are the ascending bounds of the windows, starting at 0.
    """
    if not shuffle:
        return range(windows[-1])
    draw = np.random.default_rng([seed, epoch])
    items = [first + draw.permutation(end - first) for first, end in itertools.pairwise(windows)]
    return np.concatenate([items[i] for i in draw.permutation(len(items))])

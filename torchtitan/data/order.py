"""What a source of documents is, and the order that it gives them in.

The order depends on the seed alone. Documents are numbered j = 0, 1, 2, ... without end, and dealt
to lanes: lane l of L reads j = l, l + L, l + 2L, ... Where documents can be read in any order,
epoch j // N goes through all N of them, in an order drawn from (seed, epoch); so no number of ranks
or threads has a say in what a lane reads.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Identity = dict[str, str | int | bool]


class Position(NamedTuple):
    """Where a document stands in its lane's sequence; enough to go on reading from it."""

    round: int
    """Epoch; of data that is streamed shard by shard, the count of shards before this one."""
    document: int
    """Number of the document inside that epoch or shard."""


class Document(NamedTuple):
    position: Position
    content: Any
    """What `Dataset.content` says; of text, a string, or tokens where there is no text."""


class Source(Protocol):
    """An endless sequence of documents, dealt to lanes."""

    identity: Identity
    """What fixes the sequence; a run can only resume on an equal one."""

    def epoch(self, position: Position) -> int:
        """How many times the documents had all been read before the one at `position`."""

    def advice(self, lanes: int) -> str | None:
        """What is unfortunate about this number of lanes, and what to do; None if nothing."""

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        """The documents of each lane in `starts`, of `lanes` in all, from its start on.

        One call serves one thread: the iterators it returns may share a reader.
        """


class Once:
    """The documents of a source, each once: its lanes end with the first epoch."""

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
    """Which item comes at each place of an epoch: the windows in random order, and inside each its
    items in random order. `windows` are the ascending bounds of the windows, from 0 on.
    """
    if not shuffle:
        return range(windows[-1])
    draw = np.random.default_rng([seed, epoch])
    items = [first + draw.permutation(end - first) for first, end in itertools.pairwise(windows)]
    return np.concatenate([items[i] for i in draw.permutation(len(items))])

"""Sources of documents, and the order of their documents.

The order depends on the seed alone. Documents are numbered j = 0, 1, 2, ... without end, and
assigned to lanes: lane l of L reads j = l, l + L, l + 2L, ... Where documents can be read in any
order, epoch j // N goes through all N of them, in an order drawn from (seed, epoch); so a lane's
documents do not depend on the number of ranks or threads.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Identity = dict[str, str | int | float | bool | None]


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


class DocumentRange(NamedTuple):
    """Consecutive documents of an epoch."""

    begin: Position | None
    """Position of the first; None: the first of all."""
    end: Position
    """Position after the last."""


class Source(Protocol):
    """Endless sequence of documents, assigned to lanes.

    It may also have a method `advice(lanes)`, which returns a warning about that number of lanes,
    with a remedy, or None; and `in_processes = True` to be read by processes instead of threads,
    if it computes much in Python. Its documents are pickled then.
    """

    identity: Identity
    """Settings that determine the sequence; a run can only resume on equal ones."""

    def epoch(self, position: Position) -> int:
        """Return the number of complete passes over the documents before `position`."""

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        """Return the documents of each of the `lanes` that is in `starts`, from its start on.

        One call serves one thread: the iterators it returns may share a reader.
        """


class SinglePass:
    """Documents of a source, each once: its lanes end with the first epoch."""

    def __init__(self, source: Source) -> None:
        self.identity, self.epoch = source.identity, source.epoch
        self._source = source

    def resume(self, saved: Identity) -> None:
        """Continue the order of a run that was saved with this identity."""
        if isinstance(self._source, Shuffled):
            self._source.resume(saved)

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        return {
            lane: itertools.takewhile(lambda d: self.epoch(d.position) == 0, documents)
            for lane, documents in self._source.read(starts, lanes).items()
        }


class Order:
    """Order of the items of an epoch: that of the items themselves."""

    def __getitem__(self, place: int) -> int:
        return int(self.at(np.array([place]))[0])

    def at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the items at `places`."""
        return places


class ListedOrder(Order):
    """Order held in memory."""

    def __init__(self, items: npt.NDArray[np.int64]) -> None:
        self._items = items

    def at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._items[places]


MOST_LISTED = 2**20
"""Maximum number of items whose order is held in memory: 8 MiB."""
FEW = 1024
"""Items that a permutation sorts: its network makes 3 of the 6 orders of 3."""
ORDER = 2
"""Version of the orders, in the identity of a run. Earlier versions listed what NumPy's generator
drew, which may change with NumPy (no entry), or computed the order by the network alone."""
COMPUTED, LISTED = "computed", "listed"
"""The order of earlier versions: computed above `MOST_LISTED` items, or listed for any number."""


def drawn_order(
    windows: Sequence[int], seed: int, epoch: int, shuffle: bool, version: Any = ORDER
) -> Order:
    """Return the order of the items of an epoch: windows shuffled, and items shuffled within each.

    Args:
        windows: ascending bounds of the windows, starting at 0.
        version: ORDER, or COMPUTED or LISTED to continue a run of an earlier version.
    """
    if not shuffle:
        return Order()
    if windows[-1] > MOST_LISTED and version != LISTED:
        return ComputedOrder(windows, seed, epoch, few=FEW if version == ORDER else 0)
    sizes = np.diff(windows)
    if version == ORDER:
        of_item, of_window = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
        keys = _hashes(windows[-1], of_item), np.repeat(_hashes(len(sizes), of_window), sizes)
        return ListedOrder(np.lexsort(keys))
    draw = np.random.default_rng([seed, epoch])
    items = [first + draw.permutation(size) for first, size in zip(windows, sizes, strict=False)]
    return ListedOrder(np.concatenate([items[i] for i in draw.permutation(len(items))]))


class Shuffled:
    """Items that are shuffled again in each epoch."""

    def __init__(
        self, windows: Sequence[int], identity: Identity, *, seed: int, shuffle: bool
    ) -> None:
        """
        Args:
            windows: as of `drawn_order`.
            identity: what determines the sequence besides the order.
        """
        self.identity: Identity = identity | {"shuffle": shuffle, "seed": seed}
        if shuffle:
            self.identity["order"] = ORDER
        self._draw = functools.partial(drawn_order, windows, seed, shuffle=shuffle)
        self._order = functools.lru_cache(maxsize=2)(self._draw)

    def resume(self, saved: Identity) -> None:
        """Continue the order of a run that was saved with this identity."""
        order = saved.get("order", LISTED)
        if self.identity.get("order") == ORDER and order in (COMPUTED, LISTED):
            del self.identity["order"]
            if order == COMPUTED:
                self.identity["order"] = order
            draw = functools.partial(self._draw, version=order)
            self._order = functools.lru_cache(maxsize=2)(draw)


class ComputedOrder(Order):
    """Order of any number of items, computed when asked: it takes no memory for them."""

    def __init__(self, windows: Sequence[int], seed: int, epoch: int, few: int = FEW) -> None:
        """`few` is for `Permutation`; the rest for `drawn_order`."""
        bounds, self._few = np.asarray(windows, np.int64), few
        shuffled = Permutation(len(bounds) - 1, [seed, epoch], few).at(np.arange(len(bounds) - 1))
        sizes = np.diff(bounds)[shuffled]
        self._first = bounds[:-1][shuffled]  # item of each window, in the order of the epoch
        self._ends = np.cumsum(sizes)
        self._key = [seed, epoch]

    def at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        numbers = np.searchsorted(self._ends, places, side="right")
        items = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            begin = int(self._ends[number - 1]) if number else 0
            size = int(self._ends[number]) - begin
            inside = Permutation(size, [*self._key, number + 1], self._few)
            items[own] = self._first[number] + inside.at(places[own] - begin)
        return items


class Permutation:
    """Random permutation of range(size), computed: a Feistel network on pairs of digits.

    A number is written as two digits, of bases a and b with a * b >= size. Each round adds a hash
    of one digit to the other, which is a bijection for any hash (Luby and Rackoff, "How to
    construct pseudorandom permutations from pseudorandom functions", 1988; Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). A result of `size` or more is permuted again.
    Up to `few` numbers are sorted by their hashes instead.
    """

    rounds = 4

    def __init__(self, size: int, key: Sequence[int], few: int = FEW) -> None:
        self._size = size
        self._a = np.uint64(max(1, math.isqrt(size)))
        self._b = np.uint64(-(-max(1, size) // int(self._a)))
        words = np.random.SeedSequence(list(key)).generate_state(2 * self.rounds, np.uint64)
        self._keys = [(words[2 * i], words[2 * i + 1]) for i in range(self.rounds)]
        self._sorted = np.argsort(_hashes(size, words[0])) if size <= few else None

    def at(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Permute `numbers`."""
        if self._sorted is not None:
            return self._sorted[numbers]
        found = self._permute(numbers.astype(np.uint64))
        while (beyond := found >= self._size).any():
            found[beyond] = self._permute(found[beyond])
        return found.astype(np.int64)

    def _permute(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        first, second = np.divmod(numbers, self._b)
        for one, other in self._keys:
            first = (first + _hashed(second, one) % self._a) % self._a
            second = (second + _hashed(first, other) % self._b) % self._b
        return first * self._b + second


def _hashed(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return a hash of each number: the output function of SplitMix64."""
    with np.errstate(over="ignore"):
        x = numbers ^ key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _hashes(count: int, key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return a hash of each number below `count`; no two are equal."""
    return _hashed(np.arange(count, dtype=np.uint64), key)


BITS = 64


def sample_hash(number: int, tokens: npt.NDArray[Any]) -> int:
    """Return the hash of sample `number` of a run."""
    stored = np.ascontiguousarray(tokens, "<i4")
    return xxhash.xxh3_64_intdigest(stored.data, seed=number % 2**BITS)


def hash_text(total: int) -> str:
    """Return a sum of hashes as text: 16 hexadecimal digits."""
    return f"{total % 2**BITS:016x}"


class RunningHash:
    """One data rank's part of the running hash of a run's samples, the same on every layout.

    Sample i with tokens x has the hash xxh3_64(x as int32, little-endian; seed i). The hash of a
    run is the sum of the hashes of all its samples so far, modulo 2^64. So each data rank adds up
    its own, in any order, and the sum over ranks does not depend on their number.
    """

    def __init__(self, rank: int, before: str | None = hash_text(0)) -> None:
        """
        Args:
            before: hash of the samples of the run so far; None if it is unknown.
        """
        self._rank, self._before, self._own = rank, before, 0

    def add(self, hashes: int | None) -> None:
        """Add a sum of hashes of samples of this rank; after None the hash is unknown."""
        if hashes is None:
            self._before = None
        else:
            self._own = (self._own + hashes) % 2**BITS

    @property
    def term(self) -> int | None:
        """This rank's term of the sum over all data ranks; None if the hash is unknown."""
        if self._before is None:
            return None
        term: int = (self._own + (0 if self._rank else int(self._before, 16))) % 2**BITS
        return term

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the state; `merged_hash` joins all of them."""
        return {"before": self._before, "ranks": {str(self._rank): self._own}}


def merged_hash(states: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the hash from the states of all ranks, some of which may be of the same data rank."""
    if any(state["before"] is None for state in states):
        return None
    own = {rank: hashes for state in states for rank, hashes in state["ranks"].items()}
    return hash_text(int(states[0]["before"], 16) + sum(own.values()))

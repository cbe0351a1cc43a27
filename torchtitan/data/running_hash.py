"""The running hash of a run's samples, the same on every layout.

Sample i with tokens x has the hash xxh3_64(x as int32, little-endian; seed i). The hash of a run is
the sum of the hashes of all its samples so far, modulo 2^64. So each data rank adds up its own, in
any order, and the sum over ranks does not depend on their number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

BITS = 64


def sample_hash(number: int, tokens: npt.NDArray[Any]) -> int:
    """Return the hash of sample `number` of a run."""
    stored = np.ascontiguousarray(tokens, "<i4")
    return xxhash.xxh3_64_intdigest(stored.data, seed=number % 2**BITS)


def shown(total: int) -> str:
    """Return a sum of hashes as text: 16 hexadecimal digits."""
    return f"{total % 2**BITS:016x}"


class RunningHash:
    """One data rank's part of the running hash."""

    def __init__(self, rank: int, before: str | None = shown(0)) -> None:
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
    return shown(int(states[0]["before"], 16) + sum(own.values()))

"""The ledger of a run's data: the samples that every session of the run has read.

`data_ledger.jsonl` in the dump folder is only appended to, by rank 0. Its rows are JSON objects;
all have `event`, `step`, `time`, `samples` (read so far) and `hash` (of these samples, see
`torchtitan.data.order`):

    start        a process starts or resumes training, or a stage starts; also `layout`,
                 `seq_len`, `global_batch`, `identity` of the data, and `launch`, the number of its
                 recipe in the folder
    steps        metrics are reported
    checkpoint   a checkpoint is about to be saved
    rollback     training returns to a checkpoint of `step`, but not to its position in the data
    end          training ends and did not fail

All but `steps` have `sources`, the position in each. `chain` is a digest of a row and of the
`chain` before it, so that a row that is missing or was changed is found.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.logging import logger
from torchtitan.metrics.sinks import Jsonl, Metrics, SinkContext

LEDGER_FILE = "data_ledger.jsonl"
REQUIRED = {"event", "step", "time", "samples", "hash"}


def chained(row: Mapping[str, Any], before: str) -> str:
    """Return the `chain` of a row after a row with that of `before`."""
    return xxhash.xxh3_64_hexdigest(f"{before}{json.dumps(row)}".encode())


def ledger_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a ledger; a process that is killed may leave an incomplete one."""
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= REQUIRED:
            yield row


class DataLedger(Jsonl):
    """Writer of the ledger; as a sink, of the rows `steps`."""

    def __init__(
        self, context: SinkContext, sources: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> None:
        """
        Args:
            sources: returns the position in each source from the merged state of the data.
        """
        super().__init__(context)
        self.path, self._sources, self._chain = context.folder / LEDGER_FILE, sources, ""

    def open(self, start_step: int) -> None:
        if self.file is not None:
            return  # a rollback, which is a row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            for row in ledger_rows(self.path):
                self._chain = row.get("chain", "")
            if not self.path.read_bytes().endswith(b"\n"):
                self.waiting = b"\n"
        self.file = FileIO(self.path, "a")

    def write(self, step: int, metrics: Metrics) -> None:
        if "data_hash" in metrics:
            self._note("steps", step, metrics["samples"], metrics["data_hash"])

    def record(self, event: str, position: Mapping[str, Any], **details: Any) -> None:
        """Write a row about the position of a run; other ranks than the first have none."""
        if not position or self.file is None:
            return
        state, data = position["train_state"], position["data"]
        details |= {"sources": self._sources(data)}
        details |= {name: state.get(name, 0) for name in ("skipped", "skipped_samples")}
        self._note(event, state["step"], data["samples"], data.get("hash"), **details)
        try:
            # Before the checkpoint is there, which a resumed run starts from.
            os.fdatasync(self.file.fileno())
        except OSError as error:
            logger.error("%s: %s; its last rows may be lost", self.path, error.strerror)

    def _note(self, event: str, step: int, samples: Any, hash: Any, **details: Any) -> None:
        row = {"step": step, "time": round(time.time(), 3), "event": event}
        row |= {"samples": samples, "hash": hash, **details}
        self._chain = chained(row, self._chain)
        self.append(row | {"chain": self._chain})

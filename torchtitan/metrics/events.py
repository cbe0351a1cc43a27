"""The event log of one rank: its activities and their durations, as JSON Lines.

Rank 0's metrics describe the run; this log describes each rank by itself, to find the slow one.
Nothing is ever removed: a restarted run appends to the file, with an event of its own ("start").
"time" is Unix seconds.
"""

import json
import time
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan.logging import logger


class EventLog:
    """Writes events as they happen; a disk that fails is reported once, and the run continues."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder`: None for no log."""
        self.path = folder and folder / f"rank{rank}.jsonl"
        self.file: FileIO | None = None

    def write(self, step: int, event: str, **details: Any) -> None:
        """Note what happened at or after `step`."""
        if self.path is None:
            return
        row = {"step": step, "time": round(time.time(), 3), "event": event, **details}
        try:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = FileIO(self.path, "a")
            # JSON has no NaN; what is not finite is written as a word.
            self.file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            logger.error("%s: %s; no more events are written", self.path, error.strerror)
            self.path = None

    def close(self) -> None:
        """End; nothing is written after it."""
        if self.file is not None:
            self.file.close()
        self.path = self.file = None

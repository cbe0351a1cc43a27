"""What a run left in its dump folder, as values: for whoever looks at runs, also while they go on.

Files are read as they are found. A run may be writing them, or may have been killed in the middle
of a line, so a last line that is not whole is left for later.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigError
from torchtitan.provenance import ENVIRONMENT_FILE, RECIPE_FILE

METRICS_FILE = "metrics.jsonl"

Row = dict[str, Any]


@dataclass(frozen=True)
class History:
    """A run by its dump folder; everything is read once, when it is first asked for."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> "History":
        """The run of a dump folder.

        Raises:
            ConfigError: where no run has written metrics.
        """
        if not (folder / METRICS_FILE).is_file():
            found = sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
            hint = f"; did you mean {' or '.join(map(str, found[:3]))}?" if found else ""
            what = "is not a folder" if not folder.is_dir() else f"has no {METRICS_FILE}"
            raise ConfigError(f"{folder}: {what}; wanted the job.dump_folder of a run{hint}")
        return cls(folder)

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of `metrics.jsonl`, in order: reports, validations and events."""
        return list(read_rows(self.folder / METRICS_FILE))

    @cached_property
    def reports(self) -> list[Row]:
        """The rows about training: those with a loss and a speed."""
        return [row for row in self.rows if "tps" in row]

    def events(self, kind: str) -> list[Row]:
        """The rows about something that happened."""
        return [row for row in self.rows if row.get("event") == kind]

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """The resolved recipe of the latest launch, by dotted keys; empty where there is none."""
        path = self.folder / RECIPE_FILE
        if not path.is_file():
            return {}
        return dict(_flatten(tomllib.loads(path.read_text(encoding="utf-8"))))

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Time, command, ranks, device and versions of the latest launch; empty where unknown."""
        path = self.folder / ENVIRONMENT_FILE
        if not path.is_file():
            return {}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def rank_events(self, folder: str = "events") -> dict[int, list[Row]]:
        """The event log of each rank, in order of ranks."""
        paths = (self.folder / folder).glob("rank*.jsonl")
        found = {int(path.stem.removeprefix("rank")): list(read_rows(path)) for path in paths}
        return dict(sorted(found.items()))


def seconds_of(row: Row, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each phase, and of each pause, in the steps that a report is of."""
    phases = {k.removeprefix("time/"): v * steps for k, v in row.items() if k.startswith("time/")}
    pauses = {
        key.removesuffix("_s"): value
        for key, value in row.items()
        if key.endswith("_s") and key != "eta_s" and isinstance(value, float)
    }
    return phases, pauses


def read_rows(path: Path) -> Iterator[Row]:
    """The JSON objects of a file, one a line; a line that is not whole is left out."""
    yield from parse_rows(path.read_bytes())


def parse_rows(text: bytes) -> Iterator[Row]:
    """The JSON objects of a piece of such a file."""
    for line in text.split(b"\n"):
        try:
            row = json.loads(line) if line else None
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from _flatten({str(n): item for n, item in enumerate(value)}, f"{name}.")
        else:
            yield name, value

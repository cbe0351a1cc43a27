"""Folders as runs leave them, written by hand."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    recipe: str = "",
    environment: dict[str, Any] | None = None,
) -> Path:
    """A dump folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if recipe:
        (folder / "recipe.toml").write_text(recipe)
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def row(step: int, **values: Any) -> dict[str, Any]:
    """A report."""
    known = {"loss": 2.0, "tps": 100.0, "mfu": None, "step_time": 1.0, "memory_gib": 1.0}
    known |= {"memory_pct": 10.0, "tokens": 1000 * step, "skipped": 0, "time/forward": 1.0}
    return {"step": step, "time": 100.0 + step, **known, **values}


def note(folder: Path, rank: int, state: str, step: int, pid: int | None = None) -> None:
    """What a rank notes at each step."""
    (folder / "comm_traces").mkdir(parents=True, exist_ok=True)
    known = {"state": state, "step": step, "world_size": 2, "time": time.time()}
    known |= {"pid": pid or os.getpid(), "host": socket.gethostname()}
    (folder / f"comm_traces/{rank}.step").write_text(json.dumps(known))


def log(folder: Path, rank: int, *events: dict[str, Any]) -> None:
    """The event log of a rank."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    path = folder / f"events/rank{rank}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def steps(step: int, busy: dict[str, float], wall: dict[str, float] | None = None) -> Any:
    """The event of a rank's report of one step."""
    return {"step": step, "event": "steps", "steps": 1, "wall": wall or busy, "busy": busy}

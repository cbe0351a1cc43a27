"""Folders as runs leave them, written by hand."""

import json
import os
import socket
import time


def write_run(folder, rows, recipe="", environment=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if recipe:
        (folder / "recipe.toml").write_text(recipe)
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def row(step, **values):
    known = {"loss": 2.0, "tps": 100.0, "mfu": None, "step_time": 1.0, "memory_gib": 1.0}
    known |= {"memory_pct": 10.0, "tokens": 1000 * step, "skipped": 0, "time/forward": 1.0}
    return {"step": step, "time": 100.0 + step, **known, **values}


def note(folder, rank, state, step, pid=None):
    (folder / "comm_traces").mkdir(parents=True, exist_ok=True)
    known = {"state": state, "step": step, "world_size": 2, "time": time.time()}
    known |= {"pid": pid or os.getpid(), "host": socket.gethostname()}
    (folder / f"comm_traces/{rank}.step").write_text(json.dumps(known))

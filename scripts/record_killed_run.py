"""Trains on one layout, kills it with SIGKILL, and resumes on another.

python scripts/record_killed_run.py FOLDER

The losses go to benchmarks/results/killed_run.json, which `draw_pages.py` draws.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/killed_run.json"
KILLED_AFTER = 16
RECIPE = "debug_model --training.seq_len 64 --training.steps 30 --metrics.log_freq 1"
RECIPE += " --optimizer.lr 5e-4 --lr_scheduler.warmup_steps 10 --checkpoint.interval 6"
STARTS = {
    "4 ranks: FSDP 2 x TP 2": "--processes 4 --parallelism.tensor_parallel_degree 2",
    "2 ranks: FSDP 2": "--processes 2",
}


def rows(path: Path) -> list[dict[str, float]]:
    """Return the complete rows of a file, which may be growing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in found if "loss" in row]


def main(folder: Path) -> None:
    first, second = (
        ["torchtitan", "train", *RECIPE.split(), *f"{flags} --job.dump_folder {folder}".split()]
        for flags in STARTS.values()
    )
    launcher = subprocess.Popen([sys.executable, "-m", *first])
    while not (done := rows(folder / "metrics.jsonl")) or done[-1]["step"] < KILLED_AFTER:
        assert launcher.poll() is None, "it ended by itself"
        time.sleep(0.05)
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for process in (*map(int, ranks), launcher.pid):
        os.kill(process, signal.SIGKILL)
    launcher.wait()
    before = rows(folder / "metrics.jsonl")
    subprocess.run([sys.executable, "-m", *second], check=True)
    after = rows(folder / "metrics.jsonl")
    resumed = min(row["step"] for row in rows(folder / "metrics.superseded.jsonl"))
    parts = (before, [row for row in after if row["step"] >= resumed])
    runs = [
        {
            "layout": layout,
            "steps": [int(row["step"]) for row in part],
            "loss": [row["loss"] for row in part],
        }
        for layout, part in zip(STARTS, parts, strict=True)
    ]
    RESULT.write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A mixture that is killed at random moments reads each sample once, on any number of ranks."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TORCHTITAN = (sys.executable, "-m", "torchtitan")


def run(recipe, folder, ranks, seconds):
    """Train, and kill all processes after some seconds; None if they were killed."""
    words = ("train", recipe, "--processes", str(ranks), "--job.dump_folder", folder)
    with (folder.parent / "log").open("a") as log:
        process = subprocess.Popen([*TORCHTITAN, *words], stdout=log, stderr=log)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The launcher starts each rank in a session of its own.
            ours = subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True)
            for pid in ours.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            process.wait()
            return None


def last_row(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row][-1]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["join", "best_fit"])
def test_a_killed_mixture_reads_each_sample_once(tmp_path, packing):
    recipe = tmp_path / "recipe.toml"
    template = Path(__file__).with_name("killed_mixture.toml").read_text()
    recipe.write_text(template.format(packing=packing))
    assert run(recipe, tmp_path / "whole", 1, None) == 0
    whole = last_row(tmp_path / "whole")
    for trial in range(4):
        draw, folder = random.Random(trial), tmp_path / f"killed-{trial}"
        for _ in range(7):
            if run(recipe, folder, draw.choice([1, 2, 2, 4]), draw.uniform(4, 16)) == 0:
                break
        else:
            assert run(recipe, folder, 2, None) == 0
        row = last_row(folder)
        assert (row["step"], row["data_hash"]) == (24, whole["data_hash"])
        assert row["loss"] == pytest.approx(whole["loss"], abs=1e-5)
        ledger = [*TORCHTITAN, "data", "ledger", str(folder), "--verify"]
        done = subprocess.run(ledger, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "verified" in done.stdout

"""A long run ends with the memory, files, threads and processes that it had early on."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.reliability.trials import ranks_of, recipe
from tests.wandb_files import WANDB_OFFLINE
from torchtitan.provenance import to_toml

STEPS = int(os.environ.get("SOAK_STEPS", "20000"))
LAYOUTS = ("one rank", "FSDP 2")
SETTLED = 500
"""Steps until buffers are full, the ring of the Flight Recorder among them."""
GROWTH = 1.05
"""Of resident memory in the second half, as caches fill in the first."""
SLOW = 0.2
"""Seconds that each file of a checkpoint takes longer."""
SINKS = ("enable_tensorboard", "enable_wandb", "save_for_all_ranks", "save_events")
EVERYTHING = {
    "checkpoint": {"interval": 100, "async_mode": "async"},
    "validation": {"enable": True, "freq": 100, "steps": 2},
    "metrics": {"log_freq": 10, "statistics_freq": 250, **dict.fromkeys(SINKS, True)},
}


@dataclass(frozen=True)
class Soaked:
    """What one rank held, sample by sample, after it had settled."""

    rank: int
    samples: list[dict[str, float]]

    def ends(self, kind, skipped=0):
        """The median of the first tenth of the samples, but for those skipped, and of the last."""
        values = [sample[kind] for sample in self.samples[skipped:]]
        part = max(len(values) // 10, 1)
        return statistics.median(values[:part]), statistics.median(values[-part:])


def soak(layout, folder, steps=STEPS):
    """Train with saves, validation, every sink and a slow disk; what each rank held."""
    # Two microbatches a step, whatever the ranks: more would add time, and nothing to be held.
    training = {"steps": steps, "local_batch_size": 4 // ranks_of(layout)}
    sections = EVERYTHING | {"training": training, "lr_scheduler": {"total_steps": steps}}
    job = recipe(folder / "run", layout, **sections)
    (folder / "soak").mkdir()
    (folder / "recipe.toml").write_text(to_toml(job), encoding="utf-8")
    launcher = "torchtitan.train"
    words = ["--job.config_file", str(folder / "recipe.toml")]
    words += ["--job.imports", "tests.tiny", "tests.soaked"]
    if (ranks := ranks_of(layout)) > 1:
        launcher, words = "torchtitan.launch", ["--processes", str(ranks), *words]
    env = os.environ | WANDB_OFFLINE | {"SOAK": f"{folder / 'soak'} {SLOW}"}
    command = [sys.executable, "-m", launcher, *words]
    with (folder / "log").open("w") as log:
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=log)
    found = []
    for rank in range(ranks):
        lines = (folder / f"soak/{rank}.jsonl").read_text().splitlines()
        samples = [sample for line in lines if (sample := json.loads(line))["step"] >= SETTLED]
        found.append(Soaked(rank, samples))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_run_holds_no_more_at_its_end(layout, tmp_path):
    for rank in soak(layout, tmp_path):
        for kind in ("files", "threads", "processes"):
            first, last = rank.ends(kind)
            assert first == last, f"{layout}, rank {rank.rank}: {kind}"
        first, last = rank.ends("resident", len(rank.samples) // 2)
        assert last < first * GROWTH, f"{layout}, rank {rank.rank}: resident memory"

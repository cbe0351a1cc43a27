"""A long run with everything on, watched from inside; writes what came out into the page.

python -m tests.reliability.soak [STEPS [LAYOUT]]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.__main__ import PAGE, machine, write_table
from tests.reliability.trials import ranks_of, recipe
from tests.wandb_files import WANDB_OFFLINE
from torchtitan.provenance import to_toml

STEPS = int(os.environ.get("SOAK_STEPS", "20000"))
LAYOUTS = ("one rank", "FSDP 2")
SETTLED = 500
"""Steps until caches and buffers are full, the ring of the Flight Recorder among them."""
SPAN = 1000
"""Steps at each end whose speed is compared."""
SLOW = 0.2
"""Seconds that each file of a checkpoint takes longer."""
EVERYTHING = {
    "checkpoint": {"interval": 100, "async_mode": "async"},
    "validation": {"enable": True, "freq": 100, "steps": 2},
    "metrics": {
        "log_freq": 10,
        "statistics_freq": 250,
        "enable_tensorboard": True,
        "enable_wandb": True,
        "save_for_all_ranks": True,
        "save_events": True,
    },
}


@dataclass(frozen=True)
class Soaked:
    """What one rank held, sample by sample, after it had settled."""

    rank: int
    samples: list[dict[str, float]]

    def ends(self, kind: str) -> tuple[float, float]:
        """The median of the first tenth of the samples, and of the last."""
        values = [sample[kind] for sample in self.samples]
        part = max(len(values) // 10, 1)
        return statistics.median(values[:part]), statistics.median(values[-part:])

    def seconds(self, kind: str) -> tuple[float, float]:
        """Seconds a step at both ends: `wall`, or `processor`."""
        first, last = self.samples[0], self.samples[-1]
        after = next(s for s in self.samples if s["step"] >= first["step"] + SPAN)
        before = next(s for s in reversed(self.samples) if s["step"] <= last["step"] - SPAN)
        pairs = (first, after), (before, last)
        begin, end = ((b[kind] - a[kind]) / (b["step"] - a["step"]) for a, b in pairs)
        return begin, end


def soak(layout: str, folder: Path, steps: int = STEPS) -> list[Soaked]:
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
    subprocess.run(
        [sys.executable, "-m", launcher, *words],
        env=os.environ | WANDB_OFFLINE | {"SOAK": f"{folder / 'soak'} {SLOW}"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    found = []
    for rank in range(ranks):
        lines = (folder / f"soak/{rank}.jsonl").read_text().splitlines()
        samples = [sample for line in lines if (sample := json.loads(line))["step"] >= SETTLED]
        found.append(Soaked(rank, samples))
    return found


def table(layout: str, ranks: Sequence[Soaked], steps: int) -> str:
    """What the ranks of a layout held and how fast they were, at both ends."""
    lines = [
        f"{layout}, {steps:,} steps, on {machine()} Speed is of the {SPAN:,} steps at each end, in "
        "processor time too, since other programs may have used the machine.",
        "",
        f"| | at step {SETTLED} | at step {steps:,} |",
        "|---|---|---|",
    ]
    for one in ranks:
        name = f"{layout}, rank {one.rank}" if len(ranks) > 1 else layout
        first, last = (value / 2**20 for value in one.ends("resident"))
        lines.append(f"| {name}: resident memory, MiB | {first:.1f} | {last:.1f} |")
        held = [one.ends(kind) for kind in ("files", "threads", "processes")]
        first, last = (" / ".join(f"{pair[end]:.0f}" for pair in held) for end in (0, 1))
        lines.append(f"| {name}: open files / threads / processes | {first} | {last} |")
        times = [one.seconds(kind) for kind in ("processor", "wall")]
        first, last = (" / ".join(f"{1e3 * t[end]:.1f}" for t in times) for end in (0, 1))
        lines.append(f"| {name}: processor time / time of a step, ms | {first} | {last} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Both layouts, one after the other."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    texts = []
    for layout in sys.argv[2:] or LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            texts.append(table(layout, soak(layout, Path(folder), steps), steps))
        print(texts[-1], flush=True)
    write_table(PAGE, "SOAK", "\n".join(texts))


if __name__ == "__main__":
    main()

"""What the debug ViT-MAE learns of drawn scenes, by linear probes of it and of less.

    python benchmarks/vision.py --output benchmarks/results/vision.md

Trains `train_configs/vit_mae_debug.toml` from three seeds on a CPU, and probes on held-out scenes,
as `torchtitan evaluate --tasks linear_probe` does: the trained encoder, one with new weights, and,
by the same regression, the pixels themselves.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan.research.vit_mae.images.open_images import open_view
from torchtitan.research.vit_mae.probe import accuracy, data_of, encode, run_probe
from torchtitan.research.vit_mae.spec import FLAVORS
from torchtitan.tools.evaluate import EvaluationRequest
from torchtitan.tools.inference import ModelLocation

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/vit_mae_debug.toml"
SEEDS = range(3)
SCENES = "scenes_validation"
IMAGES = 3000


class Learned(NamedTuple):
    """Of a run."""

    seconds: float
    """From the launch to its end."""
    losses: list[float]
    """At its validations."""
    trained: float
    """Accuracy on held-out images, as all that follow."""
    random: float


def train(seed: int, folder: Path, *flags: str) -> Learned:
    """Train the debug recipe, and probe it."""
    command = [sys.executable, "-m", "torchtitan.train", str(RECIPE), f"--debug.seed={seed}"]
    command += [f"--job.dump_folder={folder}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    request = EvaluationRequest(ModelLocation(folder), SCENES, None, IMAGES, 64, torch.float32)
    found = run_probe(request)
    seconds = rows[-1]["time"] - rows[0]["time"]
    return Learned(seconds, losses, found.accuracy, found.random_encoder)


def without_encoder() -> tuple[float, float, int]:
    """By the pixels, and by guessing the most frequent class; of so many held-out images."""
    size = FLAVORS["debugmodel"].image_size
    view = open_view(data_of({}, SCENES, None), size=size, bands=3)
    made = encode(view, IMAGES, IMAGES, [lambda images: images.flatten(1).double()])
    frequent = made.labels[~made.is_held_out].bincount().argmax()
    held_out = made.labels[made.is_held_out]
    right = float((held_out == frequent).double().mean())
    pixels = accuracy(made.found[0], made, int(made.labels.max()) + 1)
    return pixels, right, len(held_out)


def spread(values: Sequence[float]) -> str:
    limits = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{limits}"


PAGE = """\
# What the debug ViT-MAE learns of drawn scenes

Made by `{command}` on one core of {machine} with torch {torch}, Python {python}, {date}.

`train_configs/vit_mae_debug.toml` from {seeds} seeds, and a linear probe of {images} held-out
scenes in 8 classes: the accuracy on {held_out} of them, on which the regression was not fitted. Of
several seeds, the mean and, in parentheses, the lowest and the highest.

| features | accuracy |
|---|---|
| none: the most frequent class | {frequent:.3f} |
| pixels | {pixels:.3f} |
| an encoder with new weights | {random} |
| the encoder after its training | {trained} |

A run took {seconds} seconds from its first step to its last. Its loss on held-out scenes, of
which 1 is that of the mean of each patch, was at its validations:

| seed | {heads} |
|---|{lines}
{losses}
"""


def page(runs: Sequence[Learned], beside: tuple[float, float, int], command: str) -> str:
    pixels, frequent, held_out = beside
    count = len(runs[0].losses)
    return PAGE.format(
        command=command,
        machine=platform.machine(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=date.today().isoformat(),
        seeds=len(runs),
        images=f"{IMAGES:,}",
        held_out=held_out,
        frequent=frequent,
        pixels=pixels,
        random=spread([run.random for run in runs]),
        trained=spread([run.trained for run in runs]),
        seconds=" to ".join(f"{find(run.seconds for run in runs):.0f}" for find in (min, max)),
        heads=" | ".join(f"validation {number + 1}" for number in range(count)),
        lines="---|" * count,
        losses="\n".join(
            f"| {seed} | {' | '.join(f'{loss:.4f}' for loss in run.losses)} |"
            for seed, run in enumerate(runs)
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="Write the page here, not to the terminal.")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        runs = [train(seed, Path(place) / str(seed)) for seed in SEEDS]
    text = page(runs, without_encoder(), f"python {' '.join(sys.argv)}")
    if chosen.output:
        chosen.output.write_text(text)
    else:
        print(text)

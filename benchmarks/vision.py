"""What the debug ViT-MAE learns of drawn scenes, by linear probes of it and of less.

    python benchmarks/vision.py --output benchmarks/results/vision.md

Trains `train_configs/vit_mae_debug.toml` from three seeds on a CPU, and probes on held-out scenes,
as `torchtitan evaluate --tasks linear_probe` does: the trained encoder, one with new weights, and,
by the same regression, the pixels themselves. With `--widths`, trains encoders of several widths
instead:

    python benchmarks/vision.py --widths 32 64 128 256 --steps 600 --docs docs/vision_results.md
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.research.vit_mae.images.open_images import open_view
from torchtitan.research.vit_mae.probe import accuracy, data_of, encode, run_probe
from torchtitan.research.vit_mae.spec import FLAVORS
from torchtitan.tools.evaluate.subject import ModelLocation

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
    found = run_probe(ModelLocation(folder), (SCENES, None), IMAGES, 64, torch.float32)
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


WIDTHS_PAGE = """\
# A linear probe by the width of the encoder

Made by `{command}` on {cores} cores of {machine} with
torch {torch}, Python {python}, {date}.

`train_configs/vit_mae_debug.toml` with encoders of several widths (4 blocks of 4 heads, with
feed-forward layers 4 times as wide), each with {steps} steps of 64 drawn scenes, the same for all,
and the learning rate of the recipe. Accuracy on {held_out} held-out scenes in 8 classes, as on
[the page of the recipe](vision.md), and the loss on held-out scenes, of which 1 is that of the mean
of each patch. {spread}.

{table}
"""


def width_flags(width: int, count: int) -> list[str]:
    """Return the flags of a run of an encoder of that width, of `count` steps."""
    steps = ("training.steps", "validation.freq", "checkpoint.interval")
    sizes = {"model.dim": width, "model.ffn_dim": 4 * width, "lr_scheduler.warmup_steps": 20}
    keys = sizes | dict.fromkeys(steps, count)
    return [f"--{key}={value}" for key, value in keys.items()]


def encoder_size(width: int) -> int:
    """Return the number of parameters of an encoder of that width."""
    args = dataclasses.replace(FLAVORS["debugmodel"], dim=width, ffn_dim=4 * width)
    model = build_empty(MODELS["vit_mae"].build, args, 1)
    encoder = ("embeddings.", "layers.", "bridge.norm.")
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(encoder))


def widths_table(runs: Mapping[int, Sequence[Learned]]) -> str:
    lines = [
        "| width | parameters of the encoder | with new weights | after its training | loss |",
        "|---|---|---|---|---|",
    ]
    for width, of_width in runs.items():
        columns = ([getattr(run, name) for run in of_width] for name in ("random", "trained"))
        cells = [*map(spread, columns), spread([run.losses[-1] for run in of_width])]
        lines.append(f"| {width} | {encoder_size(width):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare_widths(
    widths: Sequence[int], seeds: int, steps: int, output: Path, docs: Path | None
) -> None:
    """Train and probe encoders of all widths, and write the page after each seed."""
    held_out, runs = without_encoder()[-1], {width: list[Learned]() for width in widths}

    def learn(width: int) -> None:
        with tempfile.TemporaryDirectory() as place:
            runs[width].append(train(seed, Path(place), *width_flags(width, steps)))

    for seed in range(seeds):
        with ThreadPoolExecutor() as pool:
            list(pool.map(learn, widths))
        several = f"Mean of {seed + 1} seeds and, in parentheses, the lowest and the highest"
        text = WIDTHS_PAGE.format(
            command=f"python {' '.join(sys.argv)}",
            cores=os.cpu_count(),
            machine=platform.machine(),
            torch=torch.__version__,
            python=platform.python_version(),
            date=date.today().isoformat(),
            steps=steps,
            held_out=held_out,
            spread=several if seed else f"The first of {seeds} seeds: no spread",
            table=widths_table(runs),
        )
        output.write_text(text)
        if docs:
            from quoted import quote  # beside this script, which tests import as a module

            quote("vision.py", widths_table(runs), docs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="Write the page here, not to the terminal.")
    parser.add_argument("--widths", type=int, nargs="+", help="Compare encoders of these widths.")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="Seeds of each width.")
    parser.add_argument("--steps", type=int, default=200, help="Steps of each width.")
    parser.add_argument("--docs", type=Path, help="A page that quotes the table of widths.")
    chosen = parser.parse_args()
    if chosen.widths:
        output = chosen.output or ROOT / "benchmarks/results/vision_widths.md"
        compare_widths(chosen.widths, chosen.seeds, chosen.steps, output, chosen.docs)
        sys.exit()
    with tempfile.TemporaryDirectory() as place:
        runs = [train(seed, Path(place) / str(seed)) for seed in SEEDS]
    text = page(runs, without_encoder(), f"python {' '.join(sys.argv)}")
    if chosen.output:
        chosen.output.write_text(text)
    else:
        print(text)

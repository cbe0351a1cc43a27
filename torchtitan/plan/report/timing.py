"""Time the fastest planned layouts for a few steps, where their hardware is there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.config import RecipeError
from torchtitan.plan.hardware import Hardware
from torchtitan.tools.compare import compare_recipes, read
from torchtitan.tools.compare.results import Variant

Measured = Mapping[str, Any]
WARMUP, STEPS, ROUNDS = 3, 5, 2
"""Steps of a run before those measured, steps measured, and runs of each layout."""


def require_devices(hardware: Hardware, ranks: int) -> None:
    """Require that this machine can run `ranks` on `hardware`.

    Raises:
        RecipeError: naming what is here.
    """
    other = "leave --time out, or run it there"
    if hardware.device_type == "cpu":
        if ranks > hardware.ranks_per_node:
            wanted = f"{hardware.ranks_per_node:,} processes of one machine"
            raise RecipeError([f"--time: got {ranks:,} ranks; wanted at most {wanted}; {other}"])
        return
    here = torch.cuda.device_count()
    if here < ranks:
        devices = "no CUDA device" if not here else f"{here:,} CUDA device{'s' * (here > 1)}"
        message = f"--time: {ranks:,} ranks on {hardware.name} need as many devices"
        raise RecipeError([f"{message}; this machine has {devices}; {other}"])
    name = torch.cuda.get_device_name(0)
    if hardware.device and name != hardware.device:
        message = f"--time: {hardware.name} is {hardware.device}; this machine has {name}"
        raise RecipeError([f"{message}; {other}, or plan for it with --calibrate"])


def time_layouts(folder: Path, recipes: Sequence[str], ranks: int) -> list[Measured]:
    """Run recipes in turns, and return the measured numbers of each.

    Args:
        folder: for the recipes, the runs and the report of the comparison. Runs of the same recipes
            that are there already are used.
        recipes: their text; what they extend is relative to `folder`.
    """
    paths = [folder / f"layout_{number}.toml" for number in range(1, len(recipes) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, recipes, strict=True):
        path.write_text(text, encoding="utf-8")
    conditions = {"rounds": ROUNDS, "warmup_steps": WARMUP, "steps": STEPS, "trace": False}
    study = read(paths, [], [], ranks=ranks, output=str(folder), **conditions)
    return [measured(each) for each in compare_recipes(study).variants]


def measured(variant: Variant) -> Measured:
    """Return the numbers of a variant that ran, or the reason why it did not."""
    if variant.step_s is None or variant.tps is None:
        return {"status": variant.status, "reasons": [*variant.reasons]}
    step = variant.step_s
    return {
        "status": variant.status,
        "seconds_per_step": {"value": step.median, "low": step.least, "high": step.most},
        "tokens_per_second_per_device": variant.tps.median,
        "memory_gib": variant.memory_gib,
    }


def fastest_run(runs: Sequence[Measured]) -> int:
    """Return the index of the fastest run; 0 if none ran."""
    rates = [run.get("tokens_per_second_per_device", 0.0) for run in runs]
    return rates.index(max(rates))


def run_text(run: Measured) -> str:
    """Describe a timed run in a line."""
    if "seconds_per_step" not in run:
        return f"timed: {run['status']}: {'; '.join(run['reasons'])}"
    step = run["seconds_per_step"]
    return (
        f"timed: {run['tokens_per_second_per_device']:,.0f} tokens/s/device, "
        f"{step['value']:.3g} s a step ({step['low']:.3g} to {step['high']:.3g})"
    )

"""Frequent checkpoints beside rare ones, with folders that each node has for itself."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.layouts import LAYOUTS
from tests.ranks import run_ranks
from tests.runs import losses, train
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.job import JobConfig


def recipe(
    folder: Path, steps: int, layout: str = "FSDP 2", rare: int = 4, **frequent: Any
) -> JobConfig:
    """A run that is saved at every second step, and for good at every fourth."""
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder / "run")},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 8},
        "checkpoint": {
            "enable": True,
            "interval": rare,
            "frequent": {"interval": 1, "folder": str(folder / "disk")} | frequent,
        },
    }
    return layouts.job(LAYOUTS[layout], "AdamW", **sections)


def on_nodes(job: JobConfig, each: int = 1, order: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Train on nodes of `each` ranks, whose disks are folders; `order`: of the disks."""
    node = dist.get_rank() // each
    node = order[node] if order else node
    frequent = job.checkpoint.frequent
    own = frequent.model_copy(update={"folder": f"{frequent.folder}-{node}"})
    checkpoint = job.checkpoint.model_copy(update={"frequent": own})
    return train(job.model_copy(update={"checkpoint": checkpoint}))


def disk(folder: Path, node: int) -> Path:
    """The folder of the frequent checkpoints of a node."""
    (found,) = (folder / f"disk-{node}").iterdir()
    return found


def held(folder: Path, node: int) -> dict[int, list[int]]:
    """The ranks whose files a node has, by step."""
    return {
        step: sorted(int(file.stem.partition("-")[2]) for file in path.glob("*.safetensors"))
        for step, path in saved_steps(disk(folder, node)).items()
    }


def stopped(folder: Path, after: int, steps: int = 8, **keys: Any) -> None:
    """A run that ended without its last save, as if it was killed `after` a step."""
    run_ranks(on_nodes, 2, recipe(folder, after, **keys))
    shutil.rmtree(folder / f"run/checkpoint/step-{after}")


def test_frequent(tmp_path: Path) -> None:
    run_ranks(on_nodes, 2, recipe(tmp_path, 8))
    print(held(tmp_path, 0), held(tmp_path, 1))
    print(saved_steps(tmp_path / "run/checkpoint"))
    print((tmp_path / "run/checkpoint/frequent.json").read_text())
    print(read_manifest(disk(tmp_path, 0) / "step-7"))
    assert 0

"""Images that cannot be decoded are skipped alike on every layout, and counted in the metrics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import tiny
from tests.ranks import run_ranks
from tests.research.test_vit_mae_pictures import MODEL
from tests.runs import rows, train
from torchtitan.job import JobConfig

CORRUPT = (3, 4, 11)
KEYS = ("step", "images", "corrupt_images")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 16 images, three of which are cut short."""
    folder, draw = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for number in range(16):
        path = folder / f"{number:02}.png"
        Image.fromarray(draw.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(path)
        if number in CORRUPT:
            path.write_bytes(path.read_bytes()[:100])
    return folder


def job(folder: Path, images: Path, steps: int, threads: int, **parallelism: Any) -> JobConfig:
    settings = {"corrupt": "skip"}
    data = {"dataset": "image_folder", "dataset_path": str(images), "images": settings}
    return tiny.job(
        folder,
        model=MODEL,
        data={**data, "num_workers": threads},
        training={"steps": steps, "local_batch_size": 2, "global_batch_size": 8},
        lr_scheduler={"total_steps": 6},
        checkpoint={"enable": True, "interval": 3},
        parallelism=parallelism,
    )


def trained(folder: Path) -> tuple[list[list[int]], list[float]]:
    """What each step counted, and its loss."""
    found = [row for row in rows(folder) if "loss" in row]
    return [[row[key] for key in KEYS] for row in found], [row["loss"] for row in found]


@pytest.mark.gate
def test_what_is_skipped_is_counted_over_ranks_and_resumes(tmp_path: Path, images: Path) -> None:
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    run_ranks(train, 1, job(one, images, 6, 0))
    run_ranks(train, 2, job(two, images, 6, 2, data_parallel_shard_degree=2))
    run_ranks(train, 2, job(resumed, images, 3, 2, data_parallel_shard_degree=2))
    run_ranks(train, 1, job(resumed, images, 6, 4))
    counts, losses = trained(one)
    assert [count[:2] for count in counts] == [[step, 8 * step] for step in range(1, 7)]
    # Lanes are read side by side, so that the three of an epoch do not come evenly.
    skipped = [count[2] for count in counts]
    assert skipped == sorted(skipped)
    assert 2 * len(CORRUPT) <= skipped[-1] <= 5 * len(CORRUPT)
    for folder in (two, resumed):
        assert trained(folder)[0] == counts
        assert trained(folder)[1] == pytest.approx(losses, rel=1e-5)


def test_a_run_that_skips_nothing_does_not_count(tmp_path: Path, images: Path) -> None:
    for number in CORRUPT:
        (images / f"{number:02}.png").unlink()
    recipe = job(tmp_path / "run", images, 1, 0).model_dump()
    recipe["data"]["images"] = {}
    run_ranks(train, 1, JobConfig.model_validate(recipe))
    assert "corrupt_images" not in rows(tmp_path / "run")[0]

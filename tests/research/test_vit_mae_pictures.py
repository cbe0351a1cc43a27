"""Whole runs on images: the pictures of a validation, and images that cannot be decoded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import each, rows, trace, train
from tests.wandb_files import ended, history_rows
from torchtitan.data import DataConfig
from torchtitan.job import JobConfig
from torchtitan.models.settings import ModelConfig
from torchtitan.research.vit_mae.masked_autoencoder import MaskedAutoencoder, normalized

MODEL = {**tiny.VIT_MAE, "n_layers": 2}


def job(folder, picture=True, **parallelism):
    validation = {"enable": True, "dataset": "scenes_validation", "freq": 1, "steps": 1}
    return tiny.job(
        folder,
        model=MODEL,
        data={"dataset": "scenes"},
        training={"steps": 2, "local_batch_size": 4, "global_batch_size": 8},
        validation={**validation, "picture": picture},
        metrics={"enable_tensorboard": True},
        parallelism=parallelism,
    )


def drawn(folder):
    return sorted(path.name for path in folder.rglob("*.png"))


def test_what_is_restored_perfectly_is_the_input():
    args = job(Path("unused")).model_args()
    task = MaskedAutoencoder(ModelConfig(), args)
    data = DataConfig(dataset="scenes", num_workers=0)
    stream = task.open_stream(
        data, seed=0, seq_len=1, local_batch_size=3, accumulation=1, rank=0, ranks=1
    )
    batch = next(stream).to("cpu")
    picture = task.picture(batch, normalized(batch.targets))
    assert picture.shape == (3, 3 * 16 + 2 * 2, 3 * 16 + 2 * 2)
    whole, seen, restored = (picture[:, 18 * row : 18 * row + 16] for row in range(3))
    assert torch.allclose(restored, whole, atol=1e-4)
    is_gray = (seen[:, :, :16] - 0.5).abs().amax(0) < 1e-6
    assert is_gray.float().mean() == pytest.approx(0.75), "three patches of four are hidden"
    assert torch.allclose(seen[:, :, :16][:, ~is_gray], whole[:, :, :16][:, ~is_gray], atol=1e-6)


@pytest.mark.gate
def test_a_validation_writes_one_picture_on_one_rank(tmp_path):
    """And none if it is off."""
    one, two, off = (tmp_path / name for name in ("one", "two", "off"))
    run_ranks(each, 1, train, [job(one), job(off, picture=False)])
    run_ranks(train, 2, job(two, data_parallel_shard_degree=2))
    assert drawn(one) == drawn(two) == ["step-000001.png", "step-000002.png"]
    assert drawn(off) == []
    of_one, of_two = (np.asarray(Image.open(f / "pictures/step-000002.png")) for f in (one, two))
    assert of_one.shape == of_two.shape == (52, 4 * 18 - 2, 3)
    difference = np.abs(of_one.astype(int) - of_two.astype(int))
    assert difference.max() <= 1, "rank 0 has the first images of all, whatever the layout"
    shown = b"".join(path.read_bytes() for path in one.glob("tb/*"))
    assert b"\x89PNG" in shown


def test_a_layout_in_which_nothing_can_be_drawn_says_so(tmp_path):
    found = tiny.problems(job(tmp_path, pipeline_parallel_degree=2), severity="note", ranks=2)
    assert "nothing is drawn" in next(p.message for p in found if p.path == "validation.picture")


@pytest.mark.slow
def test_weights_and_biases_is_given_the_picture(tmp_path, offline):
    recipe = job(tmp_path).model_dump()
    recipe["metrics"] |= {"enable_tensorboard": False, "enable_wandb": True}
    run_ranks(train, 1, JobConfig.model_validate(recipe))
    [log] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = [row for row in history_rows(ended(log)) if "validation" in row]
    assert [row["step"] for row in logged] == [1, 2]
    for row in logged:
        picture = log.parent / "files" / row["validation"]["path"]
        ours = tmp_path / f"pictures/step-{row['step']:06}.png"
        assert np.array_equal(np.asarray(Image.open(picture)), np.asarray(Image.open(ours)))


@pytest.mark.slow
def test_the_loss_falls():
    """Far below that of the mean of each patch, in a hundred steps of the tiny model."""
    made = tiny.job(
        model=MODEL,
        data={"dataset": "scenes", "images": {"augment": False}},
        training={"steps": 100, "local_batch_size": 32, "global_batch_size": 32},
        optimizer={"name": "AdamW", "lr": 3e-3},
    )
    ((first, *_, last),) = (found.losses for found in run_ranks(trace, 1, made))
    assert first > 1
    assert last < 0.8


# Images that cannot be decoded.

CORRUPT = (3, 4, 11)
KEYS = ("step", "images", "corrupt_images")


@pytest.fixture
def images(tmp_path):
    """A folder of 16 images, three of which are cut short."""
    folder, draw = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for number in range(16):
        path = folder / f"{number:02}.png"
        Image.fromarray(draw.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(path)
        if number in CORRUPT:
            path.write_bytes(path.read_bytes()[:100])
    return folder


def skipping(folder, images, steps, processes, **parallelism):
    settings = {"corrupt": "skip"}
    data = {"dataset": "image_folder", "dataset_path": str(images), "images": settings}
    return tiny.job(
        folder,
        model=MODEL,
        data={**data, "num_workers": processes},
        training={"steps": steps, "local_batch_size": 2, "global_batch_size": 8},
        lr_scheduler={"total_steps": 6},
        checkpoint={"enable": True, "interval": 3},
        parallelism=parallelism,
    )


def counted(folder):
    found = [row for row in rows(folder) if "loss" in row]
    return [[row[key] for key in KEYS] for row in found], [row["loss"] for row in found]


@pytest.mark.gate
def test_what_is_skipped_is_counted_over_ranks_and_resumes(tmp_path, images):
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    run_ranks(train, 1, skipping(one, images, 6, 0))
    run_ranks(train, 2, skipping(two, images, 6, 2, data_parallel_shard_degree=2))
    run_ranks(train, 2, skipping(resumed, images, 3, 2, data_parallel_shard_degree=2))
    run_ranks(train, 1, skipping(resumed, images, 6, 4))
    counts, losses = counted(one)
    assert [count[:2] for count in counts] == [[step, 8 * step] for step in range(1, 7)]
    # Lanes are read side by side, so that the three of an epoch do not come evenly.
    skipped = [count[2] for count in counts]
    assert skipped == sorted(skipped)
    assert 2 * len(CORRUPT) <= skipped[-1] <= 5 * len(CORRUPT)
    for folder in (two, resumed):
        assert counted(folder)[0] == counts
        assert counted(folder)[1] == pytest.approx(losses, rel=1e-5)


def test_a_run_that_skips_nothing_does_not_count(tmp_path, images):
    for number in CORRUPT:
        (images / f"{number:02}.png").unlink()
    recipe = skipping(tmp_path / "run", images, 1, 0).model_dump()
    recipe["data"]["images"] = {}
    run_ranks(train, 1, JobConfig.model_validate(recipe))
    assert "corrupt_images" not in rows(tmp_path / "run")[0]

"""The model of tests/images.py: another task, from outside the package, on every layout."""

import shutil
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runs import rows, train, train_each
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.models.output import AuxiliaryLoss
from torchtitan.torch_private.compiler import keeps_nodes_of_functions

LAYOUTS = {
    "FSDP 2": ["--parallelism.data_parallel_shard_degree=2"],
    "PP 2": ["--parallelism.pipeline_parallel_degree=2"],
    "DDP 2": ["--parallelism.data_parallel_replicate_degree=2"],
}
ZBV = [*LAYOUTS["PP 2"], "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
TRAINED = LAYOUTS | ({"ZBV": ZBV} if keeps_nodes_of_functions() else {})
KEYS = ("loss", "grad_norm", "loss/activity", "images")


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    shutil.copy(Path(__file__).with_name("images.toml"), tmp_path)
    monkeypatch.chdir(tmp_path)


def read(folder, ranks, *flags, weight=0.01):
    always = ["--activation_checkpoint.mode=full", "--training.global_batch_size=16"]
    always += ["--training.seq_len=32", f"--model.activity_weight={weight}"]
    always += [f"--job.dump_folder={folder}"]
    return load_job("images.toml", [*always, *flags], ranks, "cpu").config


def trained(folder, ranks, *flags, weight=0.01):
    """The rows of the steps of a run, and those of its validations."""
    run_ranks(train, ranks, read(folder, ranks, *flags, weight=weight))
    return rows(Path(folder))


def numbers(found, *keys):
    return [row[key] for row in found for key in keys if key in row]


@pytest.mark.gate
def test_every_layout_trains_as_one_rank():
    one = trained("one", 1)
    assert [row["images"] for row in one if "images" in row] == [16, 32, 48, 64]
    assert all(row["images_per_second"] > 0 for row in one if "images" in row)
    expected = numbers(one, *KEYS, "validation_loss", "validation_psnr")
    assert len(expected) == 4 * 4 + 2 * 2
    for name, flags in TRAINED.items():
        found = numbers(trained(name, 2, *flags), *KEYS, "validation_loss", "validation_psnr")
        assert found == pytest.approx(expected, rel=1e-4), name


@pytest.mark.gate
@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, LAYOUTS["PP 2"])])
def test_an_auxiliary_loss_of_weight_zero_changes_no_bit(ranks, layout):
    weights = {"weighted": 1.0, "zero": 0.0, "without": 0.0}
    flags = [*layout, "--training.steps=2"]
    run_ranks(
        train_and_leave_out,
        ranks,
        *(read(name, ranks, *flags, weight=weight) for name, weight in weights.items()),
    )
    weighted, zero, without = (rows(Path(name)) for name in weights)
    assert all(row["loss/activity"] > 0 for row in zero if "loss" in row)
    keys = ("loss", "grad_norm", "validation_loss")
    assert numbers(zero, *keys) == numbers(without, *keys) != numbers(weighted, *keys)


def train_and_leave_out(weighted, zero, without):
    """Train each, the last without the auxiliary loss."""
    train_each([weighted, zero])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuxiliaryLoss, "forward", lambda self, x, total: x)
        train(without)


@pytest.mark.gate
@pytest.mark.costs("three runs on each of two layouts")
@pytest.mark.parametrize("names", [("FSDP 2", "PP 2"), ("DDP 2",)])
def test_a_run_that_is_resumed_is_the_run_never_stopped(names):
    jobs = []
    for name in names:
        flags = [*LAYOUTS[name], "--lr_scheduler.total_steps=4"]
        jobs.append(read(f"{name}/whole", 2, *flags))
        jobs.append(read(f"{name}/parts", 2, *flags, "--training.steps=2"))
        jobs.append(read(f"{name}/parts", 2, *flags))
    run_ranks(train_each, 2, jobs)
    keys = ("step", *KEYS, "validation_loss")
    for name in names:
        whole, parts = (rows(Path(name) / part) for part in ("whole", "parts"))
        assert numbers(parts, *keys) == numbers(whole, *keys), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.dataset=python_stdlib"], "it holds text, and restorer is trained on images"),
        (["--model.tokenizer_path=x"], "unknown key of restorer"),
        (["--model.dim=0"], "wanted an integer > 0"),
        (["--parallelism.tensor_parallel_degree=2"], "does not say how its matrices are split"),
        (["--parallelism.context_parallel_degree=2"], "cannot be split over a sequence"),
    ],
)
def test_what_images_cannot_do_is_refused_by_name(flags, message):
    ranks = 2 if any("parallelism" in flag for flag in flags) else 1
    with pytest.raises(RecipeError, match=message):
        read("unused", ranks, *flags)


def test_text_is_not_trained_on_images():
    message = "it holds images, and llama3 is trained on text"
    with pytest.raises(RecipeError, match=message):
        load_job(None, ["--job.imports=tests.images", "--data.dataset=squares"], 1, "cpu")

"""The batch of a run: fixed by every recipe that ships, divided by any ranks, kept by a resume."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, train
from torchtitan.checkpoint.start import global_batch
from torchtitan.checks import load_job
from torchtitan.config.files import read_recipe
from torchtitan.parallel import Degrees
from torchtitan.provenance import to_toml
from torchtitan.tools.cli import main
from torchtitan.trainer import main as train_main

FOLDER = Path(__file__).parents[2] / "train_configs"
RECIPES = sorted({*FOLDER.glob("*.toml"), *FOLDER.glob("research/*.toml")})
SMALL = [
    *("--training.seq_len=32", "--training.steps=3", "--metrics.log_freq=1", "--model.dim=32"),
    *("--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=64"),
    *("--lr_scheduler.warmup_steps=2", "--lr_scheduler.total_steps=6", "--checkpoint.interval=3"),
    *("--no-data.report_unigram_loss", "--no-validation.enable"),
]


BATCH = ("training", "global_batch_size")


def test_every_recipe_fixes_its_batch():
    for path in RECIPES:
        mistakes = []
        batches = [s[BATCH].value for s in read_recipe(path, mistakes) if BATCH in s]
        assert not mistakes
        assert batches, path
        assert batches[-1] > 0, path


def test_the_debug_recipe_fits_up_to_eight_ranks():
    assert_fits(FOLDER / "debug_model.toml", [1, 2, 4, 8])


def assert_fits(path, numbers):
    """The batch is the same on these numbers of ranks."""
    batches = set()
    for ranks in numbers:
        job = load_job(path, [], ranks, "cpu").config
        degrees = job.degrees(ranks)
        batches.add(job.global_batch(degrees))
        assert job.local_batch(degrees) * job.accumulation(degrees) * ranks in batches
    assert len(batches) == 1


def trained(folder, ranks, *flags, recipe=None):
    """Train the debug recipe, small, from the command line on some ranks."""
    path = recipe or FOLDER / "debug_model.toml"
    words = ["--job.config_file", str(path), f"--job.dump_folder={folder}", *SMALL, *flags]
    assert run_ranks(train_main, ranks, words) == [0] * ranks


def test_the_debug_recipe_trains_the_same_run_on_any_ranks(tmp_path):
    for ranks in (1, 2, 4):
        trained(tmp_path / str(ranks), ranks)
    one = losses(tmp_path / "1")
    assert list(one) == [1, 2, 3]
    assert losses(tmp_path / "2") == pytest.approx(one, rel=1e-5)
    assert losses(tmp_path / "4") == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resume_on_other_ranks_keeps_the_batch(before, after, tmp_path, capfd):
    follows = ["--training.global_batch_size=-1", "--training.local_batch_size=4"]
    trained(tmp_path / "whole", before, *follows, "--training.steps=6")
    trained(tmp_path / "halves", before, *follows)
    capfd.readouterr()
    trained(tmp_path / "halves", after, *follows, "--training.steps=6")
    said = "".join(capfd.readouterr())
    batch, each = 4 * before, min(4, 4 * before // after)
    ranks = f"{after} data-parallel rank{'s' * (after > 1)}"
    times = batch // (each * after)
    assert (
        f"training.global_batch_size: got -1; the run to resume has {batch} sequences in a step, "
        f"and keeps them: {each} at a time x {times} accumulated x {ranks}"
    ) in said
    assert "changed since the checkpoint: training.global_batch_size" not in said
    assert list(losses(tmp_path / "halves")) == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert f"\nglobal_batch_size = {batch}\n" in (tmp_path / "halves/recipe.toml").read_text()
    state = json.loads((tmp_path / "halves/checkpoint/step-6/train_state.json").read_text())
    assert state["recipe"]["training.global_batch_size"] == batch
    assert state["data"]["samples"] == 6 * batch


def test_ranks_that_cannot_divide_the_batch_are_refused(tmp_path, capfd):
    recipe = tmp_path / "r.toml"
    recipe.write_text(to_toml(tiny.job(tmp_path / "run", training={"global_batch_size": -1})))
    words = ["--job.config_file", str(recipe), "--checkpoint.enable", "--training.local_batch_size"]
    assert train_main([*words, "4"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    more = ["--training.steps=9", "--parallelism.data_parallel_shard_degree=-1"]
    capfd.readouterr()
    assert main(["train", "--processes=3", *words, "4", *more]) == 2
    error, fix = capfd.readouterr().err.splitlines()[-2:]
    assert error.startswith(f"error: {recipe}:")
    assert error.endswith(
        "training.global_batch_size: got -1; the run to resume has 4 sequences in a step, which "
        "3 data-parallel ranks cannot divide"
    )
    assert fix == "  use one of 1, 2, 4"
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_another_batch_in_the_recipe_is_no_kept_one(tmp_path):
    """It is refused if it does not divide the lanes, as ever."""
    sections = {"checkpoint": {"enable": True}}
    run_ranks(train, 1, tiny.job(tmp_path, training={"steps": 2}, **sections))
    other = tiny.job(tmp_path, training={"steps": 4, "global_batch_size": 6}, **sections)
    with pytest.raises(AssertionError, match=r"6 does not divide the 8 lanes of the run to resume"):
        run_ranks(train, 1, other)
    half = tiny.job(tmp_path, training={"steps": 4, "global_batch_size": 4}, **sections)
    run_ranks(train, 1, half)
    state = json.loads((tmp_path / "checkpoint/step-4/train_state.json").read_text())
    assert state["data"]["samples"] == 2 * 8 + 2 * 4


def test_a_rank_has_at_most_its_share_at_a_time():
    for local, batch, ranks, at_a_time, accumulated in [
        *((8, 8, 1, 8, 1), (8, 8, 2, 4, 1), (8, 8, 8, 1, 1), (2, 8, 2, 2, 2), (8, 32, 2, 8, 2))
    ]:
        job = tiny.job(training={"local_batch_size": local, "global_batch_size": batch})
        assert tiny.problems(job, ranks=ranks) == []
        degrees = job.degrees(ranks)
        assert job.local_batch(degrees) == job.layout(degrees).local_batch_size == at_a_time
        assert job.accumulation(degrees) == accumulated


@pytest.mark.parametrize(
    ("kept", "degrees", "microbatch", "at_a_time"),
    [
        (24, Degrees(dp_shard=2), 1, 6),
        (8, Degrees(dp_shard=4), 1, 8),
        (14, Degrees(dp_shard=2), 1, 8),
        (22, Degrees(dp_shard=2), 1, 1),
        (24, Degrees(pp=2, dp_shard=2), 4, 4),
        (None, Degrees(dp_shard=2), 1, 8),
    ],
)
def test_a_kept_batch_is_accumulated(kept, degrees, microbatch, at_a_time):
    pipeline = {"pipeline_parallel_microbatch_size": microbatch}
    sizes = {"local_batch_size": 8, "global_batch_size": -1}
    job = tiny.job(training=sizes, parallelism=pipeline).with_batch(degrees, kept)
    assert job.training.local_batch_size == at_a_time
    assert job.training.global_batch_size == (kept or 16)
    each = job.local_batch(degrees) * job.accumulation(degrees)
    assert each * degrees.data == (kept or 16)


def test_checkpoints_of_before_have_the_batch_of_their_lanes():
    lanes = {"lanes": [None] * 16}
    recipe = {"training.global_batch_size": -1, "data.lanes": -1}
    assert global_batch({"recipe": recipe, "data": lanes}) == 16
    assert global_batch({"recipe": recipe | {"data.lanes": 16}, "data": lanes}) is None
    assert global_batch({"recipe": recipe | {"training.global_batch_size": 4}}) == 4
    assert global_batch({}) is None


def test_check_says_what_the_batch_follows(tmp_path, capsys):
    (tmp_path / "r.toml").write_text("[training]\nlocal_batch_size = 4\n")
    assert main(["check", str(tmp_path / "r.toml"), "--world-size", "3"]) == 0
    assert (
        "training.global_batch_size is -1, so the batch of a new run follows the number of "
        "ranks: 4 sequences x 3 data-parallel ranks = 12 in a step; set it to 12 to train the "
        "same run on any number of ranks\n"
    ) in capsys.readouterr().out
    fixed = ["--training.global_batch_size=6", "--world-size", "3"]
    assert main(["check", str(tmp_path / "r.toml"), *fixed]) == 0
    assert (
        "training.local_batch_size is 4, but each of 3 data-parallel ranks has only 2 of the 6 "
        "sequences in a step (training.global_batch_size)\n"
    ) in capsys.readouterr().out


def test_a_run_says_what_the_batch_follows(tmp_path, capfd):
    trained(tmp_path / "follows", 1, "--training.global_batch_size=-1", "--training.steps=1")
    said = "".join(capfd.readouterr())
    follows = "follows the number of ranks: 8 sequences x 1 data-parallel rank = 8 in a step"
    assert said.index(follows) < said.index("step 1/1")
    trained(tmp_path / "fixed", 1, "--training.steps=1")
    said = "".join(capfd.readouterr())
    assert "step 1/1" in said
    assert "batch_size" not in said

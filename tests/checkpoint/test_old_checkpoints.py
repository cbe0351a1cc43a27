"""A run that an earlier version began goes on as if it had never stopped."""

import shutil

import pytest
import torch

from tests.earlier import COMMITS, EARLIER
from tests.ranks import run_ranks
from tests.runs import rows, train, train_each
from tests.tiers import tiers
from torchtitan.build import resume_policy
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.tools.checkpoint import verify

TWO = {
    "FSDP": "data_parallel_shard_degree",
    "DDP": "data_parallel_replicate_degree",
    "TP": "tensor_parallel_degree",
    "PP": "pipeline_parallel_degree",
    "CP": "context_parallel_degree",
}
"""The degree that is two."""


@pytest.fixture(autouse=True)
def where_it_was_written(monkeypatch):
    """The recipe names its text and its model as they are there."""
    monkeypatch.chdir(EARLIER)
    monkeypatch.syspath_prepend(str(EARLIER))


def resumed(commit, folder, layout, *flags):
    """The recipe, in a folder that has the checkpoint of a commit."""
    shutil.copytree(EARLIER / commit / "checkpoint", folder / "checkpoint")
    shard = "--parallelism.data_parallel_shard_degree=1"
    degrees = [f"--parallelism.{TWO[layout]}=2"] if layout in TWO else []
    words = [f"--job.dump_folder={folder}", shard, *degrees, *flags]
    return load_job("recipe.toml", words, 1 + (layout in TWO), "cpu").config


def curve(rows, key):
    return {int(row["step"]): row[key] for row in rows if "loss" in row and row["step"] > 3}


def test_the_versions_that_are_promised():
    assert {"6ebf193", "38f6c66", "ff7c037", "c54eb56"} <= set(COMMITS)


@pytest.mark.parametrize("layout", tiers(["one rank", *TWO], ["one rank", "FSDP"]))
def test_it_goes_on_with_the_same_numbers(layout, tmp_path):
    jobs = [resumed(commit, tmp_path / commit, layout) for commit in COMMITS]
    run_ranks(train_each, 1 + (layout in TWO), jobs)
    for commit in COMMITS:
        found, expected = rows(tmp_path / commit), rows(EARLIER / commit / "run")
        for key, tolerance in {"loss": 1e-5, "grad_norm": 1e-4, "lr": 0, "tokens": 0}.items():
            where = f"{commit}: {key}"
            assert list(curve(found, key)) == [4, 5, 6], where
            assert curve(found, key) == pytest.approx(curve(expected, key), rel=tolerance), where


@pytest.mark.parametrize("commit", COMMITS)
def test_it_keeps_the_separators_of_its_documents(commit, tmp_path):
    """Which were added wherever the tokenizer had them, whatever it said."""
    job = resumed(commit, tmp_path, "one rank")
    assert (job.data.add_bos, job.data.add_eos) == (None, None)
    start = resume_policy(job).start()
    kept = job.with_kept(start.kept).data
    assert (kept.add_bos, kept.add_eos) == (True, True)
    assert not any("add_" in change for change in start.changes)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("part", ["optimizer", "data"])
def test_the_numbers_show_what_is_not_loaded(commit, part, tmp_path):
    left_out = f"--checkpoint.exclude_from_loading={part}"
    run_ranks(train, 1, resumed(commit, tmp_path, "one rank", left_out))
    runs = tmp_path, EARLIER / commit / "run"
    found, expected = (curve(rows(run), "loss") for run in runs)
    assert abs(found[6] - expected[6]) > 1e-3 * expected[6]


@pytest.mark.parametrize("commit", COMMITS)
def test_its_digests_are_verified(commit, tmp_path):
    path = EARLIER / commit / "checkpoint/step-3"
    assert verify(path) == (True, [f"{path}: OK"])
    saved = SavedTensors(path)
    for name in saved.shapes():
        tensor = saved.read(name).clone()
        assert saved.is_intact(name, tensor)
        tensor.reshape(-1).view(torch.uint8)[0] ^= 1
        assert not saved.is_intact(name, tensor), name

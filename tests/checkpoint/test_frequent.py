"""Frequent checkpoints beside rare ones, in folders that each node has for itself."""

import json
import shutil
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.checkpoint.test_folder import flip
from tests.layouts import LAYOUTS
from tests.ranks import run_ranks
from tests.reliability.trials import at_call
from tests.runs import listening, losses, train
from tests.tiers import tiers
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.folder import read_state, read_verified_manifest, replace_state
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.tiers import is_past
from torchtitan.checkpoint.weights.opening import find

STEP = "torchtitan.trainer:Trainer.step"
ALL = (0, 1, 2, 3)


class Ended(NamedTuple):
    """A rank that trained to the end."""

    weights: dict[str, Tensor]
    said: list[str]


class Death(NamedTuple):
    """Ranks that are killed when they call a function for the n-th time."""

    place: str
    number: int
    ranks: tuple[int, ...] = ALL


def recipe(folder, /, layout="FSDP 2", mode="disabled", **keys):
    """Six steps, each of which is saved, and every third for good."""
    frequent = {"interval": 1, "folder": str(folder / "disk")} | keys
    sections = {
        "job": {"dump_folder": str(folder / "run")},
        "training": {"steps": 6},
        "checkpoint": {"enable": True, "interval": 3, "async_mode": mode, "frequent": frequent},
    }
    return layouts.job(LAYOUTS[layout], "AdamW", **sections)


def on_nodes(job, disks, death=None):
    """Train on nodes whose disks are folders; `disks`: that of each rank, if there are several."""
    rank, said = dist.get_rank(), listening()
    frequent = job.checkpoint.frequent
    folder = f"{frequent.folder}-{disks[rank]}" if disks else frequent.folder
    own = frequent.model_copy(update={"folder": folder})
    checkpoint = job.checkpoint.model_copy(update={"frequent": own})
    if death and rank in death.ranks:
        at_call(death.place, death.number)()
    return Ended(train(job.model_copy(update={"checkpoint": checkpoint})), said)


def shared(job, death=None):
    """Train on ranks that see the same disks."""
    return on_nodes(job, (), death)


def run(job, *disks):
    """Train to the end, on ranks with these disks; what rank 0 says."""
    return run_ranks(on_nodes, len(disks), job, disks or (0, 1))[0]


def killed(job, death, *disks):
    """Train until ranks die."""
    with pytest.raises(AssertionError, match="ended with status -9"):
        run_ranks(on_nodes, len(disks), job, disks, death)


def disk(folder, node):
    """The folder of the frequent checkpoints on a disk."""
    (found,) = (folder / f"disk-{node}").iterdir()
    return found


def held(folder, node):
    """The ranks whose files a node has, by step."""
    return {
        step: sorted(int(file.stem.partition("-")[2]) for file in path.glob("*.safetensors"))
        for step, path in saved_steps(disk(folder, node)).items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on two nodes that is never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(recipe(folder), 0, 1)


@pytest.fixture(scope="module")
def after_5(tmp_path_factory):
    """A run on two nodes that is killed after its fifth step."""
    folder = tmp_path_factory.mktemp("killed")
    killed(recipe(folder), Death(STEP, 6), 0, 1)
    return folder


def copied(source, target, *lost):
    """Copy the folders of a run, whose disks have names by it, without those of lost nodes."""
    for path in source.iterdir():
        shutil.copytree(path, target / path.name)
    for node in range(2):
        # The name says which run they are of, by its path, which is another now.
        own = disk(target, node)
        shutil.move(own, own.with_name(name_of(target)))
    for node in lost:
        shutil.rmtree(target / f"disk-{node}")


def name_of(folder):
    import xxhash

    full = (folder / "run").resolve()
    return f"run-{xxhash.xxh3_64_hexdigest(str(full).encode())[:8]}"


def is_the_same(folder, ended, whole):
    """A run that was broken ended with every bit of one that was not."""
    assert losses(folder / "run") == losses(whole[0] / "run")
    assert all(torch.equal(ended.weights[name], w) for name, w in whole[1].weights.items())


def test_each_node_keeps_few_files_of_its_own(whole):
    folder, _ = whole
    # Step 6 is due in both tiers, and is saved once.
    assert held(folder, 0) == {4: [0], 5: [0]}
    assert held(folder, 1) == {4: [1], 5: [1]}
    assert list(saved_steps(folder / "run/checkpoint")) == [3, 6]
    manifests = [read_manifest(disk(folder, node) / "step-5") for node in (0, 1)]
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].start == manifests[1].start != ""
    rare = json.loads((folder / "run/checkpoint/step-6/manifest.json").read_text())
    assert "start" not in rare  # as any version reads it


def test_resumes_from_local_disks(after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    ended = run(recipe(tmp_path), 0, 1)
    assert f"resumed from {disk(tmp_path, 0)}/step-5 at step 5" in ended.said
    assert not any("lost" in line for line in ended.said)
    is_the_same(tmp_path, ended, whole)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.gate)])
def test_lost_node_costs_the_steps_since_the_rare_checkpoint(lost, after_5, tmp_path, whole):
    copied(after_5, tmp_path, lost)
    ended = run(recipe(tmp_path), 0, 1)
    (line,) = (line for line in ended.said if "is lost" in line)
    assert line.startswith(f"checkpoint.frequent: step-5 is lost: it is not on node {lost} (")
    assert line.endswith("). The run goes on from step 3: 2 steps are trained again")
    is_the_same(tmp_path, ended, whole)
    assert held(tmp_path, 1 - lost) == {4: [1 - lost], 5: [1 - lost]}


def test_a_rollback_that_one_node_recorded_costs_its_checkpoint(after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    path = disk(tmp_path, 0) / "step-5"
    replace_state(path, read_state(path, read_verified_manifest(path)) | {"rollbacks": 1})
    ended = run(recipe(tmp_path), 0, 1)
    (line,) = (line for line in ended.said if "is lost" in line)
    assert "step-5 is lost: its state differs between nodes" in line
    assert line.endswith("The run goes on from step 4: 1 step is trained again")
    is_the_same(tmp_path, ended, whole)


def test_no_disk_is_left(after_5, tmp_path, whole):
    copied(after_5, tmp_path, 0, 1)
    ended = run(recipe(tmp_path), 0, 1)
    assert any("no node holds a checkpoint of this run" in line for line in ended.said)
    is_the_same(tmp_path, ended, whole)


def test_node_that_comes_back_does_not_bring_back_the_past(after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    for node in range(2):
        shutil.move(tmp_path / f"disk-{node}", tmp_path / f"away-{node}")
    killed(recipe(tmp_path), Death(STEP, 2), 0, 1)  # from step 3, after step 4
    for node in range(2):
        shutil.rmtree(tmp_path / f"disk-{node}")
        shutil.move(tmp_path / f"away-{node}", tmp_path / f"disk-{node}")
    ended = run(recipe(tmp_path), 0, 1)
    assert f"resumed from {tmp_path}/run/checkpoint/step-3 at step 3" in ended.said
    is_the_same(tmp_path, ended, whole)


def test_past_of_a_run():
    starts = [("a", 0), ("b", 4), ("c", 6)]
    assert [is_past(starts, "a", step) for step in (3, 4, 5)] == [True, True, False]
    assert [is_past(starts, "b", step) for step in (6, 7)] == [True, False]
    assert is_past(starts, "c", 9)
    assert not is_past(starts, "d", 1)


def test_damaged_file_is_named_and_the_one_before_is_used(after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    path = disk(tmp_path, 1) / "step-5/rank-1.safetensors"
    flip(path, -5)
    ended = run(recipe(tmp_path), 0, 1)
    (line,) = (line for line in ended.said if "is lost" in line)
    assert f"step-5 is lost: {path}: damaged: its bytes differ from those saved. The run" in line
    assert line.endswith("goes on from step 4: 1 step is trained again")
    assert (disk(tmp_path, 1) / "step-5.damaged").is_dir()
    is_the_same(tmp_path, ended, whole)


@pytest.mark.parametrize("name", ["train_state.json", "manifest.json"])
def test_damaged_description_costs_a_checkpoint(name, after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    path = disk(tmp_path, 0) / "step-5" / name
    path.write_text(path.read_text().replace("0", "1"))
    ended = run(recipe(tmp_path), 0, 1)
    assert any(f"{path}: damaged" in line for line in ended.said)
    assert any("step-4 at step 4" in line for line in ended.said)
    is_the_same(tmp_path, ended, whole)


@pytest.mark.parametrize(
    ("layout", "disks"),
    tiers(
        [("FSDP 2", (1, 0)), ("TP 2", (0, 1)), ("one rank, accumulating 8", (0,))],
        [("FSDP 2", (1, 0))],
    ),
)
def test_files_of_other_ranks_do_not_count(layout, disks, after_5, tmp_path, whole):
    """Nodes in another order, another layout, or one node alone."""
    copied(after_5, tmp_path)
    ended = run(recipe(tmp_path, layout), *disks)
    (line,) = (line for line in ended.said if "is lost" in line)
    assert "step-5 is lost: it has the files of another layout, or of other nodes. The run" in line
    assert any("step-3 at step 3" in line for line in ended.said)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0] / "run"), rel=1e-5)


DEATHS = {
    "before a byte": Death("torchtitan.checkpoint.saver:write_file", 4, (1,)),
    "before the manifest of one node": Death(
        "torchtitan.checkpoint.saver:write_manifest_of", 3, (1,)
    ),
    "before one node has committed": Death("torchtitan.checkpoint.store:Disk.commit", 3, (1,)),
    "while it is read back": Death("torchtitan.checkpoint.saver:_read_back", 4, (0,)),
    "while an old one is deleted": Death("torchtitan.checkpoint.store:Disk.delete", 2, (1,)),
}
"""Of the fourth step, which is the third of those that the second node commits."""


@pytest.mark.parametrize(
    ("when", "mode"),
    tiers(
        [(when, mode) for when in DEATHS for mode in ("disabled", "async")],
        [(when, "disabled") for when in DEATHS if "manifest" not in when and "read" not in when],
    ),
)
def test_killed_during_a_save(when, mode, tmp_path, whole):
    killed(recipe(tmp_path, mode=mode), DEATHS[when], 0, 1)
    ended = run(recipe(tmp_path, mode=mode), 0, 1)
    assert any(line.startswith("resumed from") for line in ended.said)
    is_the_same(tmp_path, ended, whole)


def test_tools_tell_what_is_on_this_node(after_5, tmp_path, says):
    copied(after_5, tmp_path)
    own = disk(tmp_path, 0)
    history = tmp_path / "run/checkpoint/frequent.json"
    told = json.loads(history.read_text()) | {"folder": str(own)}
    history.write_text(json.dumps(told))
    rows = says("checkpoint", "ls", tmp_path / "run")
    assert [f"step-{step}" in rows for step in (2, 3, 4, 5)] == [True] * 4
    assert rows.count("1 of 2 ranks") == 3
    lines = says("checkpoint", "verify", tmp_path / "run").splitlines()
    assert lines[0] == f"{tmp_path}/run/checkpoint/step-3: OK"
    assert lines[3] == f"{own}/step-5: OK, the files of 1 of 2 ranks"
    # What starts from a run's newest checkpoint takes one that is whole.
    assert find(tmp_path / "run")[-1].name == "step-3"
    data = (own / "step-5/rank-0.safetensors").read_bytes()
    (own / "step-5/rank-0.safetensors").write_bytes(data[:-1] + b"?")
    assert "step-5/rank-0.safetensors: damaged" in says("checkpoint", "verify", own, status=1)


def test_folder_that_all_share_is_one_node(tmp_path, whole):
    job = recipe(tmp_path, folder="often")
    with pytest.raises(AssertionError, match="ended with status -9"):
        run_ranks(shared, 2, job, Death(STEP, 5))
    folder = tmp_path / "run/often"
    assert max(saved_steps(folder)) == 4
    assert len(list((folder / "step-4").glob("rank-*"))) == 2
    alone = recipe(tmp_path, "one rank, accumulating 8", folder="often")
    ended = run_ranks(shared, 1, alone)[0]
    assert f"resumed from {folder}/step-4 at step 4" in ended.said
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0] / "run"), rel=1e-5)
    assert [path.parent.name for path in find(tmp_path / "run", True)][-1] == "often"


def full(function, path, *rest):
    raise OSError(28, "No space left on device", str(path))


def on_a_full_disk(job):
    """Train where the second write of the second node fails."""
    if dist.get_rank() == 1:
        at_call("torchtitan.checkpoint.saver:write_file", 2, full)()
    return on_nodes(job, (0, 1))


def test_full_disk_of_one_node_costs_a_save(tmp_path, whole):
    job = recipe(tmp_path, keep_latest_k=8)
    once = job.checkpoint.model_copy(update={"save_attempts": 1})
    ended = run_ranks(on_a_full_disk, 2, job.model_copy(update={"checkpoint": once}))[0]
    assert any("step 2 could NOT be saved" in line for line in ended.said)
    assert list(held(tmp_path, 0)) == list(held(tmp_path, 1)) == [1, 4, 5]
    assert not list(tmp_path.glob("disk-*/*/*.saving"))
    is_the_same(tmp_path, ended, whole)


@pytest.mark.gate
@pytest.mark.parametrize(
    "place",
    [
        "torchtitan.checkpoint.tiers:FrequentTier.begin",
        "torchtitan.checkpoint.tiers:FrequentTier._clear",
    ],
)
def test_killed_while_it_resumes(place, after_5, tmp_path, whole):
    copied(after_5, tmp_path)
    killed(recipe(tmp_path), Death(place, 1, (1,)), 0, 1)
    is_the_same(tmp_path, run(recipe(tmp_path), 0, 1), whole)


@pytest.mark.parametrize(
    "layout", tiers(["FSDP 4", "FSDP 2 x TP 2", "HSDP 2 x 2"], [], gate=["HSDP 2 x 2"])
)
def test_two_nodes_of_two_ranks(layout, tmp_path, whole):
    """Each node writes what its ranks hold, once."""
    job = recipe(tmp_path, layout, "async")
    killed(job, Death(STEP, 6), 0, 0, 1, 1)
    assert held(tmp_path, 0)[4] == [0, 1]
    assert held(tmp_path, 1)[4] == [2, 3]
    ended = run(job, 0, 0, 1, 1)
    assert any(f"resumed from {disk(tmp_path, 0)}/step-" in line for line in ended.said)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0] / "run"), rel=1e-5)
    steps = saved_steps(disk(tmp_path, 0)), saved_steps(tmp_path / "run/checkpoint")
    sizes = [sum(path.stat().st_size for path in each[max(each)].iterdir()) for each in steps]
    assert sizes[0] < 1.05 * sizes[1] / (1 if "HSDP" in layout else 2) + 20_000

"""A run of TorchTitan resumes here: its names, what it saves, and the steps that follow."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import tiny, torchtitan_run
from tests.layouts import LAYOUTS
from tests.ranks import run_ranks
from tests.runs import each, listening, losses, rows, train, train_until_killed, weights, world_of
from tests.tables import table
from torchtitan.build import build
from torchtitan.checkpoint.dcp.items import Item
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.dcp.torchtitan import to_ours
from torchtitan.config import ConfigError
from torchtitan.device import Device
from torchtitan.provenance import to_toml
from torchtitan.trainer import choose

ALONE = "one rank, accumulating 8"
State = dict[str, Any]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("layers.0.attention.wq.weight", "model.layers.0.attention.wq.weight"),
        ("optimizer.state.norm.weight.exp_avg", "optimizer.norm.weight.exp_avg"),
        ("optimizer.param_groups.norm.weight.lr", None),
        ("train_state", None),
        ("dataloader.dp_rank_0", None),
    ],
)
def test_tensors_have_one_name_here(theirs, ours):
    assert to_ours(theirs) == ours


def recipe(folder, layout=ALONE, **sections):
    defaults = {
        "model": {"flavor": "flat"},
        "training": {"steps": 6, "max_norm": 0.3},
        "optimizer": {"name": "AdamW", "lr": 1e-3},
        "lr_scheduler": {"warmup_steps": 2, "decay_type": "cosine", "min_lr_factor": 0.1},
    }
    return tiny.job(folder, **LAYOUTS[layout].recipe(**tiny.merged(defaults, sections)))


class Theirs(NamedTuple):
    """What a run of TorchTitan left after three steps."""

    folder: Path
    """With checkpoints of v0.2, and others."""
    losses: dict[int, float]
    """Of the steps 4 to 6."""
    state: State
    """What was saved after step 3."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    run = torchtitan_run.TorchTitanRun(recipe(folder))
    seed = torchtitan_run.save(folder / "seed/step-0", {**run.state(), "train_state.step": 0})
    assert (seed / ".metadata").exists()
    run.train(3)
    state = {n: v.clone() if isinstance(v, Tensor) else v for n, v in run.state().items()}
    torchtitan_run.save(folder / "checkpoint/step-3", state)
    torchtitan_run.save(folder / "v01/step-3", torchtitan_run.as_v01(state))
    torchtitan_run.save(folder / "v03/step-3", torchtitan_run.as_v03(state))
    torchtitan_run.save(folder / "weights/step-3", torchtitan_run.weights_only(state))
    torchtitan_run.save_for_hugging_face(run, folder / "hf/step-3", whole=True)
    torchtitan_run.save_for_hugging_face(run, folder / "hf blocks/step-3", whole=False)
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    torchtitan_run.save_safetensors(folder / "safetensors/step-3", tensors, whole=False)
    return Theirs(folder, dict(enumerate(run.train(3), 4)), state)


def resumed(folder, path, layout=ALONE, **sections):
    """The recipe with a checkpoint of TorchTitan to go on from."""
    given = {"initial_load_path": str(path), "initial_load_model_only": False}
    checkpoint = given | sections.pop("checkpoint", {})
    data = {"skip_samples": -1} | sections.pop("data", {})
    return recipe(folder, layout, checkpoint=checkpoint, data=data, **sections)


# --- the steps that follow ---


@pytest.mark.parametrize("names", [[ALONE], ["FSDP 2", "TP 2", "PP 2, 1F1B"]])
def test_the_losses_are_those_that_it_goes_on_with(names, tmp_path, theirs):
    jobs = [resumed(tmp_path / name, theirs.folder / "checkpoint", name) for name in names]
    run_ranks(each, LAYOUTS[names[0]].ranks, train, jobs)
    for name in names:
        assert losses(tmp_path / name) == pytest.approx(theirs.losses, rel=1e-5), name
        tokens = [row["tokens"] for row in rows(tmp_path / name) if "loss" in row]
        assert tokens == [1024, 1280, 1536]


@pytest.mark.parametrize("part", ["optimizer", "lr_scheduler", "data"])
def test_each_part_matters(part, tmp_path, theirs):
    """Without one of them, or on other samples, the losses differ by more than rounding."""
    without = {"checkpoint": {"exclude_from_loading": [part]}}
    sections = {"data": {"skip_samples": 0}} if part == "data" else without
    run_ranks(train, 1, resumed(tmp_path, theirs.folder / "checkpoint/step-3", **sections))
    assert losses(tmp_path).keys() == theirs.losses.keys()
    assert losses(tmp_path) != pytest.approx(theirs.losses, rel=1e-4)


def test_a_checkpoint_of_v01_is_the_same(tmp_path, theirs):
    run_ranks(train, 1, resumed(tmp_path, theirs.folder / "v01"))
    assert losses(tmp_path) == pytest.approx(theirs.losses, rel=1e-5)


def test_a_checkpoint_of_v03_goes_on_without_moments(tmp_path, theirs):
    without = {"checkpoint": {"exclude_from_loading": ["optimizer"]}}
    for name, there in {"v03": "v03", "v02": "checkpoint"}.items():
        train(resumed(tmp_path / name, theirs.folder / there, **without))
    assert losses(tmp_path / "v03") == losses(tmp_path / "v02") != theirs.losses
    words = refusal(resumed(tmp_path / "run", theirs.folder / "v03"))
    assert "missing: optimizer.state.layers.0.attention.wq.weight.exp_avg" in words


def test_adam_goes_on_from_adam(tmp_path):
    adam = {"optimizer": {"name": "Adam"}}
    run = torchtitan_run.TorchTitanRun(recipe(tmp_path, **adam))
    run.train(3)
    torchtitan_run.save(tmp_path / "theirs/step-3", run.state())
    run_ranks(train, 1, resumed(tmp_path / "run", tmp_path / "theirs", **adam))
    expected = dict(enumerate(run.train(3), 4))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_a_run_that_is_killed_resumes_from_a_checkpoint_of_its_own(tmp_path, theirs):
    """On another layout; and before it has one, from that of TorchTitan again."""
    checkpoint = {"enable": True, "interval": 1}
    where = theirs.folder / "checkpoint"
    job = resumed(tmp_path, where, checkpoint=checkpoint)
    for step, saved in {4: [], 6: ["step-4", "step-5"]}.items():
        with pytest.raises(AssertionError, match="rank 0"):
            run_ranks(train_until_killed, 1, job, step)
        assert [path.name for path in sorted((tmp_path / "checkpoint").glob("step-?"))] == saved
    state = json.loads((tmp_path / "checkpoint/step-5/train_state.json").read_text())
    assert state["data"]["samples"] == 40
    assert state["train_state"]["tokens"] == 5 * 8 * 32
    run_ranks(train, 2, resumed(tmp_path, where, "FSDP 2", checkpoint=checkpoint))
    assert losses(tmp_path) == pytest.approx(theirs.losses, rel=1e-5)


# --- what is loaded, and what is told ---


class Begun(NamedTuple):
    """A run that has loaded what it begins with."""

    weights: dict[str, Tensor]
    step: int
    tokens: int
    samples: int
    schedule_start: tuple[int, int]  # its step, and its tokens
    log: list[str]


def begin(job):
    log = listening()
    with world_of(job) as world:
        start = world.broadcast_object(choose(job) if world.rank == 0 else None)
        run = build(job, world)
        with closing(run.batches):
            run.checkpoint.load(start)
            position = run.checkpoint.contents.position()["data"]
        state, samples = run.state, position["samples"]
        schedule = (state.schedule_start, state.schedule_start_tokens)
        return Begun(weights(run), state.step, state.tokens, samples, schedule, log)


def begun(job):
    return run_ranks(begin, 1, job)[0]


@pytest.mark.parametrize(
    "kind", ["checkpoint", "v01", "v03", "weights", "hf", "hf blocks", "safetensors", "seed"]
)
def test_weights_alone_are_taken(kind, tmp_path, theirs):
    """Of a full checkpoint, an export in bfloat16, one for Hugging Face, a seed checkpoint."""
    path = theirs.folder / kind
    only = {"initial_load_model_only": True}
    found = begun(resumed(tmp_path, path, checkpoint=only, data={"skip_samples": 5}))
    assert (found.step, found.tokens, found.samples) == (0, 0, 5)
    if kind == "seed":
        assert not torch.equal(found.weights["norm.weight"], theirs.state["norm.weight"])
        return
    for name, weight in found.weights.items():
        expected = theirs.state[name]
        assert torch.equal(weight, expected.bfloat16().float() if kind == "weights" else expected)


def test_samples_are_not_skipped_where_the_position_is_known(tmp_path, theirs, monkeypatch):
    """A full checkpoint of this project has it; samples of another length are as many tokens."""
    ours = tmp_path / "ours"
    sections = {"checkpoint": {"enable": True}, "training": {"steps": 4}}
    run_ranks(train, 1, resumed(ours, theirs.folder / "checkpoint", **sections))
    again = resumed(tmp_path / "again", ours / "checkpoint", data={"skip_samples": 5})
    with pytest.raises(ConfigError, match=r"the position of its data.*skip_samples = 5 would"):
        choose(again)
    alone = {"checkpoint": {"initial_load_model_only": True}, "training": {"seq_len": 64}}
    assert begun(resumed(tmp_path / "longer", ours / "checkpoint", **alone)).samples == 16
    on_cuda = {**Device("cpu").rng_state(), "cuda": torch.zeros(1)}
    monkeypatch.setattr(Device, "rng_state", lambda device: on_cuda)
    assert begun(resumed(tmp_path / "moved", ours / "checkpoint")).samples == 32


def test_a_seed_checkpoint_is_a_run_that_has_done_nothing(tmp_path, theirs):
    found = begun(resumed(tmp_path, theirs.folder / "seed"))
    assert (found.step, found.tokens, found.samples) == (0, 0, 0)


def test_what_the_recipe_has_otherwise_is_told(tmp_path, theirs):
    groups = [{"roles": ["norm"], "weight_decay": 0.0}]
    optimizer = {"name": "Adam", "lr": 2e-3, "beta2": 0.99, "groups": groups}
    found = begun(
        resumed(
            tmp_path,
            theirs.folder / "checkpoint",
            optimizer=optimizer,
            data={"skip_samples": 0},
            training={"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
        )
    )
    told = [line for line in found.log if line.startswith(("changed", "data:", "resumed"))]
    assert told == [
        f"resumed from {theirs.folder}/checkpoint/step-3 at step 3",
        "data: the position of TorchTitan's data loader is not loaded; data.skip_samples = "
        "-1 skips the samples that it was trained on",
        "changed since the checkpoint: optimizer.lr: 0.001 -> 0.002",
        "changed since the checkpoint: optimizer.beta2: 0.95 -> 0.99",
        "changed since the checkpoint: optimizer.weight_decay: 0.1 -> 0 (for 5 of 21 weights)",
        "changed since the checkpoint: optimizer.name: AdamW -> Adam",
        "changed since the checkpoint: training.dtype: float32 -> bfloat16",
        "changed since the checkpoint: learning rate of step 4: 0.000868198 -> 0.0017364",
    ]


def test_of_a_recipe_that_is_the_same_nothing_is_told(tmp_path, theirs):
    found = begun(resumed(tmp_path, theirs.folder / "checkpoint"))
    assert not [line for line in found.log if line.startswith("changed")]
    assert "data: skipping 24 samples" in found.log


def test_the_schedule_goes_on_where_it_was_begun_anew(tmp_path, theirs):
    """As after `exclude_from_loading = ["lr_scheduler"]` there."""
    path = torchtitan_run.save(
        tmp_path / "theirs/step-3", {**theirs.state, "lr_scheduler.last_epoch": 1}
    )
    found = begun(resumed(tmp_path / "run", path))
    assert (found.step, found.schedule_start) == (3, (2, 2 * 8 * 32))


def test_another_optimizer_begins_with_the_weights(tmp_path, theirs):
    without = {"exclude_from_loading": ["optimizer"]}
    path = f"file://{theirs.folder}/checkpoint"
    found = begun(resumed(tmp_path, path, checkpoint=without, optimizer={"name": "SGD"}))
    assert (found.step, found.samples) == (3, 24)
    assert all(torch.equal(w, theirs.state[name]) for name, w in found.weights.items())


def test_the_newest_checkpoint_that_is_complete_is_taken(tmp_path, theirs):
    folder = tmp_path / "theirs"
    shutil.copytree(theirs.folder / "checkpoint", folder)
    shutil.copytree(folder / "step-3", folder / "step-6")
    (folder / "step-6/.metadata").unlink()
    (folder / "step-9").mkdir()
    found = begun(resumed(tmp_path / "run", folder))
    assert found.step == 3
    assert [line for line in found.log if "skipped, as" in line] == [
        f"{folder}/step-{n}: skipped, as its save is unfinished: it has no .metadata"
        for n in (9, 6)
    ]


# --- what cannot be resumed ---


def refusal(job):
    """What is said, before there is a process group, of what a recipe is to go on from."""
    with pytest.raises(ConfigError) as error:
        choose(job)
    return str(error.value)


def changed(state, words):
    """A state as a row of `bad_starts.txt` says."""
    kind, _, rest = words.partition(" ")
    match kind:
        case "without":
            return {name: v for name, v in state.items() if not re.search(rest, name)}
        case "with":
            return {**state, "optimizer.state.norm.weight.max_exp_avg_sq": torch.ones(32)}
        case "step":
            return {**state, "train_state.step": json.loads(rest)}
        case "weights":
            return torchtitan_run.weights_only(state)
    return state


@pytest.mark.parametrize(("change", "sections", "told"), table(__file__, "bad_starts.txt"))
def test_what_does_not_fit_is_refused(change, sections, told, tmp_path, theirs):
    path = torchtitan_run.save(tmp_path / "theirs/step-3", changed(theirs.state, change))
    folder = tmp_path / "run"
    words = refusal(resumed(folder, path, **json.loads(sections)))
    assert words.startswith("checkpoint.initial_load_path: ")
    assert told in words.replace(str(path), "HERE")
    assert not folder.exists()


def refused_on(job):
    """What this rank says of a load that fails, and what of its run is then otherwise."""
    with world_of(job) as world:
        start = world.broadcast_object(choose(job) if world.rank == 0 else None)
        run = build(job, world)
        before = run.checkpoint.contents.position()
        with closing(run.batches), pytest.raises(ConfigError) as error:
            run.checkpoint.load(start)
        same = run.checkpoint.contents.position() == before
        return str(error.value), run.state.step, run.state.tokens, same


@pytest.mark.parametrize("name", ["output.weight", "optimizer.state.output.weight.exp_avg"])
def test_what_one_rank_finds_in_the_middle_of_a_load_ends_all(name, tmp_path, theirs):
    """Only the last stage reads this item; the others would wait for it."""
    path = shutil.copytree(theirs.folder / "checkpoint/step-3", tmp_path / "theirs/step-3")
    item = DcpCheckpoint(path).contents.tensors[name].chunks[0].place
    assert isinstance(item, Item)
    with (path / item.file).open("r+b") as file:
        file.seek(item.offset + item.length - 100)
        file.write(bytes(100))  # the directory of its records
    job = resumed(tmp_path / "run", path, "PP 2, 1F1B", checkpoint={"enable": True})
    first, last = run_ranks(refused_on, 2, job)
    assert first == last
    told, step, tokens, is_same = first
    assert told.startswith(f"{path / item.file}: {name}: damaged: not what torch.save writes")
    assert (step, tokens, is_same) == (0, 0, True)
    assert not (tmp_path / "run/checkpoint").exists()


def test_one_that_is_still_being_written_is_refused(tmp_path, theirs):
    path = tmp_path / "step-3"
    shutil.copytree(theirs.folder / "checkpoint/step-3", path)
    (path / ".metadata").unlink()
    assert "still being written" in refusal(resumed(tmp_path / "run", path))


@pytest.mark.parametrize("kind", ["checkpoint", "hf", "hf blocks"])
def test_it_does_not_write_beside_their_checkpoints(kind, tmp_path, theirs):
    shutil.copytree(theirs.folder / kind, tmp_path / "checkpoint")
    job = recipe(tmp_path, checkpoint={"enable": True})
    assert refusal(job) == (
        f"checkpoint.folder: {tmp_path}/checkpoint/step-3 was saved by torch's distributed "
        "checkpoint, not by a run of this recipe; choose another job.dump_folder, and to start "
        f'from it set checkpoint.initial_load_path = "{tmp_path}/checkpoint" and '
        "initial_load_model_only = false"
    )


@pytest.mark.usefixtures("no_plan")
def test_check_says_what_a_run_begins_with(tmp_path, theirs, says):
    job = resumed(tmp_path, theirs.folder / "checkpoint", optimizer={"weight_decay": 0.2})
    (tmp_path / "recipe.toml").write_text(to_toml(job))
    words = ["check", str(tmp_path / "recipe.toml")]
    lines = says(*words).splitlines()
    at = lines.index(f"resumes from {theirs.folder}/checkpoint/step-3")
    assert lines[at + 1] == "optimizer.weight_decay: 0.1 -> 0.2"
    told = says(*words, "--model.ffn_dim", "96", status=2)
    assert "checkpoint.initial_load_path: got" in told
    assert "layers.0.feed_forward.w1.weight: has shape (64, 32); wanted (96, 32)" in told

"""Checkpoints of ours in the classic form of DCP: torch opens them, and TorchTitan continues."""

import dataclasses
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from tests import tiny
from tests.checkpoint.test_torch_reader import eager
from tests.layouts import case
from tests.ranks import run_ranks
from tests.runs import losses, train
from tests.small_weights import FLAVORS, IN_META, SCALING, content, run, same, saved, weights
from tests.tiers import tiers
from tests.torchtitan_run import TorchTitanRun, save
from torchtitan.checkpoint.dcp import torchtitan as export
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.dcp.torchtitan import translated
from torchtitan.checkpoint.folder import read_state, replace_state
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checkpoint.weights.network import in_recipe
from torchtitan.checkpoint.weights.opening import Verified
from torchtitan.models import MODELS
from torchtitan.provenance import to_toml
from torchtitan.tools.cli import main

pytestmark = [
    pytest.mark.usefixtures("small"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # so it is
]


# --- weights ---


def theirs(flavor):
    return {name.removeprefix("model."): tensor for name, tensor in weights(flavor).items()}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_torch_opens_weights(flavor, tmp_path):
    folder = run(saved(tmp_path / "ours", flavor), tmp_path / "dcp", target_format="dcp")
    state = {name: torch.zeros_like(tensor) for name, tensor in theirs(flavor).items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(state, theirs(flavor))


def test_sizes_that_torchtitan_does_not_have_are_named(tmp_path, caplog):
    run(saved(tmp_path / "ours", "window"), tmp_path / "dcp", target_format="dcp")
    assert [message.split("TorchTitan cannot: ")[1] for message in caplog.messages] == [
        "model.head_dim: TorchTitan's Llama has heads of dim / n_heads",
        "model.sliding_window: TorchTitan's Llama attends to all tokens",
    ]


def test_that_torchtitan_has_norms_is_said(tmp_path, caplog, monkeypatch):
    without = dataclasses.replace(FLAVORS["plain"], norm="none")
    monkeypatch.setitem(FLAVORS, "without", without)
    run(saved(tmp_path / "ours", "without"), tmp_path / "dcp", target_format="dcp")
    (message,) = caplog.messages
    assert message.endswith("TorchTitan cannot: model.norm: TorchTitan's Llama has norms")


def test_torch_makes_one_file_of_it(tmp_path):
    folder = run(saved(tmp_path / "ours"), tmp_path / "dcp", target_format="dcp", dtype="bfloat16")
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    rounded = {name: tensor.bfloat16() for name, tensor in theirs("plain").items()}
    assert same(torch.load(tmp_path / "one.pt"), rounded)


def test_files_and_items_are_of_limited_size(tmp_path, monkeypatch):
    """So that a rank that needs a few rows reads but these."""
    monkeypatch.setattr(export, "CHUNK_BYTES", 5_000)
    source = saved(tmp_path / "ours")
    folder = run(source, tmp_path / "dcp", target_format="dcp", max_shard_size="60KB")
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) > 5
    assert max(sizes) < 70_000
    found = DcpCheckpoint(folder)
    assert same({name: found.read(name) for name in found.shapes()}, theirs("plain"))
    chunks = found.contents.tensors["output.weight"].chunks
    assert [chunk.offsets for chunk in chunks[:2]] == [(0, 0), (19, 0)]
    state = {name: torch.zeros_like(tensor) for name, tensor in theirs("plain").items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(state, theirs("plain"))


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive = []
    read = Verified.read

    def watched(source, name, *block):
        assert not any(ref() is not None for ref in alive), name
        tensor = read(source, name, *block).clone()
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Verified, "read", watched)
    run(saved(tmp_path / "ours"), tmp_path / "dcp", target_format="dcp")
    assert len(alive) == len(weights())


def sharded(folder, found):
    """Whether this rank reads its half of what is there."""
    mesh = init_device_mesh("cpu", (2,))
    how = {"device_mesh": mesh, "placements": [Shard(0)]}
    state = {n: zeros(tensor.shape, dtype=tensor.dtype, **how) for n, tensor in found.items()}
    dcp.load(state, checkpoint_id=folder)
    halves = {n: [*each.chunk(2), each[:0]][mesh.get_rank()] for n, each in found.items()}
    return same({name: tensor.to_local() for name, tensor in state.items()}, halves)


def test_each_rank_reads_its_part(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "CHUNK_BYTES", 5_000)
    folder = run(saved(tmp_path / "ours"), tmp_path / "dcp", target_format="dcp")
    assert run_ranks(sharded, 2, folder, theirs("plain")) == [True, True]


def test_weights_that_torchtitan_cannot_open_are_told(tmp_path, caplog):
    run(saved(tmp_path / "ours", "tied"), tmp_path / "dcp", target_format="dcp")
    assert "PyTorch can read this checkpoint, but TorchTitan cannot: model.tied" in caplog.text


# --- runs ---


def recipe(folder, layout, **sections):
    """Three of six steps, each of which is saved."""
    defaults = {
        "training": {"steps": 3},
        "optimizer": {"lr": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3},
        "lr_scheduler": {"warmup_steps": 1, "total_steps": 6},
        "checkpoint": {"enable": True, "interval": 1},
    }
    return tiny.job(folder, **layout.recipe(**tiny.merged(defaults, sections)))


def converted(folder, step):
    """The run after a step, as TorchTitan has it."""
    target = folder / f"dcp/step-{step}"
    words = [str(folder / f"checkpoint/step-{step}"), str(target), "--to", "dcp"]
    assert main(["checkpoint", "convert", *words, "--with-optimizer"]) == 0
    return target


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run on two ranks, by AdamW."""
    folder = tmp_path_factory.mktemp("straight")
    run_ranks(train, 2, recipe(folder, case(shard=2), optimizer={"name": "AdamW"}))
    return folder


@pytest.mark.parametrize("name", tiers(["AdamW", "Adam"], daily=["AdamW"]))
def test_torch_takes_the_step_that_the_run_takes(name, tmp_path, straight):
    """What torch makes of all keys is the next update of the run, and the rate after it."""
    if name == "AdamW":
        shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    else:
        run_ranks(train, 2, recipe(tmp_path, case(shard=2), optimizer={"name": name}))
    folder = converted(tmp_path, 2)

    spec = MODELS["tiny"]
    model = spec.build(spec.flavors[recipe(tmp_path, case()).model.flavor], 32)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1.0, fused=True)
    peak = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
    assert peak == [1.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor))
    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **model.state_dict(),
        "optimizer": state_dict.get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": schedule.state_dict(),
        "train_state": {"step": 0, "ntokens_seen": 0},
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    schedule.load_state_dict(state["lr_scheduler"])
    assert state["train_state"] == {"step": 2, "ntokens_seen": 2 * 8 * 32}

    before, after = (SavedTensors(tmp_path / f"checkpoint/step-{n}") for n in (2, 3))
    for weight, parameter in model.named_parameters():
        assert torch.equal(parameter, before.read(f"model.{weight}"))
        old, new = (t.read(f"optimizer.{weight}.exp_avg") for t in (before, after))
        decay = 0.3 * parameter.detach() if name == "Adam" else 0.0  # a part of its moments
        parameter.grad = (new - 0.8 * old) / (1 - 0.8) - decay
    optimizer.step()
    for weight, parameter in model.named_parameters():
        wanted = after.read(f"model.{weight}")
        torch.testing.assert_close(parameter, wanted, atol=1e-6, rtol=1e-6)
        found = optimizer.state[parameter]["exp_avg_sq"]
        wanted = after.read(f"optimizer.{weight}.exp_avg_sq")
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-4)
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([1e-2 * factor(3)])


def factor(done):
    """Of the rate after `done` steps, as the recipe has it: one of warm-up, then five down."""
    return 1.0 if not done else 1 - (done - 1) / 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(train, 1, recipe(folder, case(batch=8), training={"steps": 1}))
    return folder / "checkpoint/step-1"


CANNOT = {
    ("optimizer.name", "SGD"): 'optimizer.name: got "SGD"; TorchTitan has AdamW, Adam',
    ("optimizer.no_weight_decay_on", ("norms",)): "optimizer.no_weight_decay_on: TorchTitan "
    "updates all weights with the same settings",
    ("optimizer.groups.0.lr_factor", 0.5): "optimizer.groups: TorchTitan updates all weights "
    "with the same settings",
    ("model.tied", True): "model.tied: TorchTitan's Llama has a separate output matrix",
}


@pytest.mark.parametrize("change", CANNOT, ids=lambda change: change[0])
def test_run_that_torchtitan_cannot_continue_is_refused(change, trained, tmp_path, says):
    source = Path(shutil.copytree(trained, tmp_path / "step-1"))
    state = read_state(source, read_manifest(source))
    replace_state(source, {**state, "recipe": {**state["recipe"], change[0]: change[1]}})
    words = ["checkpoint", "convert", str(source), str(tmp_path / "new"), "--to", "dcp"]
    if change[0] != "model.tied":  # else there would be a matrix too much
        assert main([*words[:3], str(tmp_path / "weights"), *words[4:]]) == 0
    said = says(*words, "--with-optimizer", status=2)
    assert f"TorchTitan cannot continue this run:\n  {CANNOT[change]}\n" in said
    assert not (tmp_path / "new").exists()


def test_only_a_run_has_an_optimizer(trained, tmp_path, capsys):
    def refused(source, *options):
        words = ["checkpoint", "convert", str(source), str(tmp_path / "new")]
        assert main([*words, "--with-optimizer", *options]) == 2
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err.partition("error: ")[2]

    ours = saved(tmp_path / "ours")
    assert (
        refused(ours, "--to", "dcp")
        == f"--with-optimizer: {ours} has only weights\n  leave it out\n"
    )
    assert refused(trained, "--to", "hf") == (
        "--with-optimizer: not supported from ours to hf; supported from ours to dcp, and back\n"
    )
    assert refused(trained, "--to", "dcp", "--dtype", "bfloat16") == (
        "--with-optimizer: not supported with --dtype, as another dtype would change the "
        "run\n  leave one out\n"
    )


# --- and back ---


def all_of(path):
    """What a checkpoint of ours holds that TorchTitan has too."""
    found = SavedTensors(path)
    return {name: found.read(name) for name in found.shapes() if not name.startswith("rng.")}


@pytest.mark.parametrize(
    ("other", "flavor"),
    [
        (other, flavor)
        for other in ("ours", "hf", "meta")
        for flavor in (IN_META if other == "meta" else FLAVORS)
    ],
)
def test_weights_come_back_to_the_bit(other, flavor, tmp_path):
    away = run(saved(tmp_path / "ours", flavor), tmp_path / "dcp", target_format="dcp")
    back = run(away, tmp_path / "back", target_format=other, flavor=flavor, model="small")
    if other != "ours":
        back = run(back, tmp_path / "ours again", flavor=flavor, model="small")
    assert same(content(back), weights(flavor))


def test_sizes_that_no_flavor_has_come_back_by_the_recipe(tmp_path, says):
    """Shapes do not say all of them: how many heads there are, say."""
    model = {"flavor": "flat", "dim": 48, "n_heads": 6, "n_kv_heads": 3, "rope_theta": 1e4}
    job = recipe(tmp_path / "ours", case(batch=8), model=model, training={"steps": 1})
    run_ranks(eager, 1, job)
    (tmp_path / "recipe.toml").write_text(to_toml(job))
    away, back = converted(tmp_path / "ours", 1), tmp_path / "back/step-1"
    words = ["checkpoint", "convert", str(away), str(back), "--model", "tiny"]
    told = f"name it: torchtitan checkpoint convert {away} NEW --recipe RECIPE.toml"
    assert says(*words, status=2).rstrip().endswith(told)
    words = [*words[:4], "--recipe", str(tmp_path / "recipe.toml")]
    told = "--recipe: it already selects the model\n  leave out --model"
    assert told in says(*words, "--flavor", "flat", status=2)
    ours = [*words[:2], str(tmp_path / "ours"), *words[3:]]
    assert "--recipe: not supported from ours" in says(*ours, status=2)
    assert main([*words, "--with-optimizer"]) == 0
    wanted = tmp_path / "ours/checkpoint/step-1"
    assert same(all_of(back), all_of(wanted))
    found = read_state(back, read_manifest(back))["recipe"]
    assert in_recipe(found).args == job.model_args()


def test_what_shapes_do_not_show_is_said(tmp_path, capsys):
    """The base of RoPE has no part in any shape."""
    model = {"flavor": "flat", "rope_theta": 1e4}
    job = recipe(tmp_path / "ours", case(batch=8), model=model, training={"steps": 1})
    run_ranks(eager, 1, job)
    away = converted(tmp_path / "ours", 1)
    words = ["checkpoint", "convert", str(away), str(tmp_path / "back"), "--model", "tiny"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "its shapes match tiny flat, from which settings that do not" in said.out + said.err


def test_run_comes_back_to_the_bit_and_goes_on(tmp_path, straight):
    """On one rank after two, as the run that never left, but for the position of the data."""
    shutil.copytree(straight, tmp_path / "straight")
    away = converted(tmp_path / "straight", 2)
    back = tmp_path / "back/step-2"
    words = [str(away), str(back), "--with-optimizer", "--model", "tiny", "--flavor", "flat"]
    assert main(["checkpoint", "convert", *words]) == 0
    assert same(all_of(back), all_of(tmp_path / "straight/checkpoint/step-2"))
    manifest = read_manifest(back)
    assert (manifest.step, manifest.model_only) == (2, False)
    counters = read_state(back, manifest)["train_state"]
    assert (counters["step"], counters["tokens"]) == (2, 2 * 8 * 32)

    given = {"initial_load_path": str(back), "initial_load_model_only": False}
    data = {"skip_samples": -1}
    run_ranks(train, 1, recipe(tmp_path / "on", case(batch=8), checkpoint=given, data=data))
    assert losses(tmp_path / "on") == pytest.approx({3: losses(tmp_path / "straight")[3]}, rel=1e-5)


@pytest.fixture(scope="module")
def theirs_step(tmp_path_factory):
    """A run of TorchTitan, after two steps."""
    folder = tmp_path_factory.mktemp("theirs")
    theirs = TorchTitanRun(recipe(folder, case(batch=8)))
    theirs.train(2)
    save(folder / "checkpoint/step-2", theirs.state())
    return folder / "checkpoint"


def test_run_of_torchtitan_becomes_one_of_ours(theirs_step, tmp_path):
    words = ["--with-optimizer", "--model", "tiny", "--flavor", "flat"]
    back = tmp_path / "step-2"
    assert main(["checkpoint", "convert", str(theirs_step), str(back), *words]) == 0
    found = DcpCheckpoint(theirs_step / "step-2")
    wanted = {ours: found.read(theirs) for ours, theirs in translated(found).items()}
    assert same(all_of(back), wanted)
    options = read_state(back, read_manifest(back))["recipe"]
    assert options["optimizer.lr"] == 1e-2
    assert options["optimizer.beta1"] == 0.8


def test_what_cannot_become_one_of_ours(theirs_step, tmp_path, capsys, monkeypatch):
    def refused(source, name, *options):
        words = ["checkpoint", "convert", str(source), str(tmp_path / name), *options]
        assert main([*words, "--model", "tiny"]) == 2
        assert not (tmp_path / name).exists()
        return capsys.readouterr().err.strip().removeprefix("error: ")

    whole = ["--with-optimizer", "--flavor", "flat"]
    assert refused(theirs_step, "step-3", *whole) == (
        f"{tmp_path}/step-3: wanted the name step-2, as the run has taken 2 steps"
    )
    path = theirs_step / "step-2"
    said = refused(path, "new", "--flavor", "falt")
    assert said.startswith(f'{path}: flavor: got "falt"\n  did you mean flat?\n  allowed: tiny, ')
    found = DcpCheckpoint(path)
    items = [((name,), found.read(name)) for name in found.shapes()]
    items += [((name,), found.value(name)) for name in found.values()]
    lost = "optimizer.state.norm.weight.exp_avg_sq"
    (tmp_path / "part").mkdir()
    export.write_dcp(tmp_path / "part", [item for item in items if item[0] != (lost,)], 10**9)
    assert refused(tmp_path / "part", "new", *whole).endswith(f":\n  missing: {lost}")
    # The weights are there, and their shapes tell the flavor, if it is the only one.
    assert main(["checkpoint", "convert", str(tmp_path / "part"), str(tmp_path / "new")]) == 0
    shutil.rmtree(tmp_path / "new")
    capsys.readouterr()
    scaled = dataclasses.replace(tiny.FLAVORS["flat"], rope_scaling=SCALING)
    twins = dataclasses.replace(MODELS["tiny"], flavors={**tiny.FLAVORS, "scaled": scaled})
    monkeypatch.setitem(MODELS._entries, "tiny", twins)
    assert refused(path, "new") == (
        f"{path}: it could be tiny flat or tiny scaled\n  choose one with --model and --flavor"
    )
    others = dataclasses.replace(MODELS["tiny"], flavors={"wide": tiny.FLAVORS["wide"]})
    monkeypatch.setitem(MODELS._entries, "tiny", others)
    assert refused(path, "new").startswith(f"{path}: not the weights of tiny wide:\n  tok_emb")

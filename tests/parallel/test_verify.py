"""`torchtitan verify-parallelism`: it passes what is right, and names what is wrong."""

import math
import os
import re
from pathlib import Path

import pytest
import torch

import torchtitan.tools.verify as tools_verify
from tests import tiny
from tests.recipes.test_recipes import main_road
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.models import MODELS
from torchtitan.parallel import ParallelModel, tensor
from torchtitan.tools.cli import main
from torchtitan.tools.verify.measure import (
    EXEMPT,
    WEIGHT,
    Slack,
    Step,
    TensorDifference,
    difference,
)
from torchtitan.tools.verify.recipe import derive_checked
from torchtitan.tools.verify.report import Comparison

pytestmark = pytest.mark.usefixtures("in_empty_folder")
RECIPES = main_road("*.toml")

TINY = Path(__file__).with_name("verify.toml").read_text()
SHARD = "data_parallel_shard_degree = 2"


def verify(parallelism, *words):
    Path("r.toml").write_text(TINY + parallelism, encoding="utf-8")
    return main(["verify-parallelism", "r.toml", "--steps", "2", *words])


def test_a_layout_that_is_right(capsys):
    assert verify(f'{SHARD}\n[[auxiliary_losses]]\nname = "z_loss"\n') == 0
    said = capsys.readouterr()
    assert said.out.startswith("r.toml on 2 ranks: pp 1, dp_replicate 1, dp_shard 2, cp 1, tp 1\n")
    assert "\nauxiliary loss z_loss: weight 0.0001\n" in said.out
    assert '\n  training.mixed_precision_param = "float32" (was "bfloat16"): ' in said.out
    assert "\n  model.tokenizer_path = nothing (was " in said.out
    assert "\nSGD with momentum\n" in said.out
    assert "\nAdamW of the recipe\n" in said.out
    last = said.out.splitlines()[-1]
    assert last.startswith("PASS: 2 steps on one rank and on 2; max weight difference ")
    assert not said.err
    assert sorted(path.name for path in Path().rglob("*")) == ["r.toml"]


@pytest.mark.gate
def test_a_gradient_that_no_rank_sums_is_named(capsys, monkeypatch):
    monkeypatch.setattr(tensor, "redistribute_grads", lambda parameters: None)
    assert verify("tensor_parallel_degree = 2", "--world-size", "2") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    # Which of the two ranks has none of it depends on how torch adds up what awaits a sum.
    where = r"FAIL: SGD with momentum, step 1, rank [01]: gradient of layers.0.attention_norm"
    assert re.match(where, last)
    assert last.endswith("; 5 of 21 parameters differ")


@pytest.mark.gate
def test_gradients_that_are_averaged_are_named(capsys, monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor
    monkeypatch.setattr(
        FSDPModule, "set_gradient_divide_factor", lambda module, by: divide(module, 2 * by)
    )
    assert verify(SHARD) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "step 1, rank 0: gradient of tok_embeddings.weight[" in last
    assert "; 21 of 21 parameters differ" in last


@pytest.mark.parametrize("number", [0, 1], ids=["SGD", "AdamW"])
def test_a_gradient_that_is_off_by_a_thousandth_is_named(number, capsys, monkeypatch):
    whole, optimizers = ParallelModel.forward_backward, tools_verify._optimizers

    def spoiled(model, batches, tokens):
        share = whole(model, batches, tokens)
        if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1":
            model.parts[0].get_parameter("layers.1.attention.wk.weight").grad *= 1.001
        return share

    def one_of(job):
        return dict([[*optimizers(job).items()][number]])

    monkeypatch.setattr(ParallelModel, "forward_backward", spoiled)
    monkeypatch.setattr(tools_verify, "_optimizers", one_of)
    assert verify(SHARD) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"step \d, rank 1: gradient of layers\.1\.attention\.wk\.weight\[", last)
    assert number or last.endswith("; 1 of 21 parameters differ")


def test_gradients_near_eps_are_allowed_what_adam_makes_of_their_rounding():
    """And no more: an update that does not follow from its gradient is a fault."""
    expected = torch.tensor([3e-9, 0.1, 0.1])
    found = expected + torch.tensor([5e-9, 1e-9, 0.0])
    job = tiny.job(optimizer={"lr": 1e-3, "eps": 1e-8})
    eps, slack = job.optimizer.eps, Slack(job)
    slack.add("a", found, expected)
    before = torch.ones(3)
    updated = [before - 1e-3 * each / (each.abs() + eps) for each in (found, expected)]
    assert (updated[0] - updated[1]).abs().max() > WEIGHT
    off = difference("weight", "a", updated[0], updated[1], slack=slack.allowed("a"))
    assert off.is_allowed
    updated[0][2] += 2 * WEIGHT
    off = difference("weight", "a", updated[0], updated[1], slack=slack.allowed("a"))
    assert off.index == (2,)
    assert not off.is_allowed


@pytest.mark.parametrize("entries", tiers([1024, 2048], daily=[], slow=[1024]))
def test_a_right_layout_with_small_gradients_passes(entries):
    """Some of half a million elements have a gradient of rounding, also with the recipe's eps."""
    assert main(["tokenizer", "train", "--vocab-size", str(entries), "--output", "own.json"]) == 0
    sizes = {"dim": 192, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "vocab_size": entries}
    words = ["verify-parallelism", "debug_model", "--world-size", "2", "--steps", "2"]
    words += ["--parallelism.tensor_parallel_degree", "2", "--model.tokenizer_path", "own.json"]
    words += [word for key, size in sizes.items() for word in (f"--model.{key}", str(size))]
    assert main(words) == 0
    assert main([*words, "--optimizer.eps", "1e-8"]) == 0


def test_a_rank_that_fails_is_told(capsys, monkeypatch):
    whole = ParallelModel.forward_backward

    def fail(model, batches, tokens):
        assert os.environ["RANK"] == "0", "a rank that fails"
        return whole(model, batches, tokens)

    monkeypatch.setattr(ParallelModel, "forward_backward", fail)
    assert verify(SHARD) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: no comparison: SGD with momentum on 2 ranks: rank 1 ended with status 1:\n"
    )
    assert "AssertionError: a rank that fails" in error


@pytest.mark.gate
def test_a_recipe_that_is_wrong(capsys):
    assert verify(SHARD, "--world-size", "3") == 2
    assert "r.toml:15: parallelism.data_parallel_shard_degree: got 2; " in capsys.readouterr().err
    assert verify(SHARD, "--data.dataset", "pyton_stdlib") == 2
    assert "did you mean python_stdlib?" in capsys.readouterr().err


def test_a_model_that_is_too_large(says):
    Path("r.toml").write_text('[model]\nflavor = "405B"\n')
    error = says("verify-parallelism", "r.toml", status=2)
    assert error.startswith('error: r.toml:2: model.flavor: got "405B"; checking its 405,853,388')
    assert error.endswith("\n  use --shrink\n")


def shrunk(path, *flags, world_size=None):
    recipe = load_job(path, flags, world_size, "cuda", exempt=EXEMPT)
    return derive_checked(recipe, world_size=world_size, steps=None, shrink=True)


@pytest.mark.gate
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_shrunk(path):
    can_be_shrunk(path)


def can_be_shrunk(path):
    """It is valid in its layout and on one rank, with batches as large."""
    checked = shrunk(path)
    assert 2 <= checked.ranks <= 8
    assert not tiny.problems(checked.job, ranks=checked.ranks)
    # Replicas that agree otherwise are modelled, and have no recipe for one rank.
    assert not checked.is_exact or not tiny.problems(checked.one, ranks=1)
    batch = checked.job.global_batch(checked.job.degrees(checked.ranks))
    assert batch == checked.one.global_batch(checked.one.degrees(1))


def test_a_shrunk_recipe_has_the_structure_of_the_large_one():
    Path("r.toml").write_text(
        '[model]\nflavor = "405B"\n[training]\nseq_len = 8192\n[parallelism]\n'
        "tensor_parallel_degree = 8\npipeline_parallel_degree = 4\ncontext_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_layers_per_stage = 8\ndisable_loss_parallel = true\n"
    )
    checked = shrunk(Path("r.toml"))
    large, small = MODELS["llama3"].flavors["405B"], checked.job.model_args()
    chosen = checked.job.parallelism
    assert checked.ranks == 16
    assert chosen.pipeline_parallel_schedule == "Interleaved1F1B"
    assert chosen.disable_loss_parallel
    assert checked.one.parallelism.tensor_parallel_degree == 1
    assert small.n_heads > small.n_kv_heads == 2
    assert small.rope_scaling == large.rope_scaling
    assert small.n_layers == 4
    wider = shrunk(Path("r.toml"), world_size=64)
    assert wider.job.parallelism.tensor_parallel_degree == 8
    small = wider.job.model_args()
    assert (small.n_layers, small.n_kv_heads) == (8, 8)  # two stages on each of four ranks
    Path("r.toml").write_text('[model]\nflavor = "1B"\n')
    assert shrunk(Path("r.toml")).job.model_args().tied


def test_the_flavor_of_a_flag_is_shrunk():
    Path("r.toml").write_text("[training]\nglobal_batch_size = 8\n")
    checked = shrunk(Path("r.toml"), "--model.flavor=8B")
    assert checked.job.model.flavor == "8B"
    large, small = MODELS["llama3"].flavors["8B"], checked.job.model_args()
    assert small.dim < large.dim
    assert small.n_heads // small.n_kv_heads == large.n_heads // large.n_kv_heads
    assert checked.job.training.global_batch_size == 4


def test_what_is_not_there_is_replaced():
    Path("r.toml").write_text(
        '[model]\ntokenizer_path = "none"\n[data]\ndataset = "text"\ndataset_path = "none"\n'
    )
    recipe = load_job("r.toml", [], None, "cuda", exempt=EXEMPT)
    job = derive_checked(recipe, world_size=None, steps=7, shrink=False).job
    assert (job.model.tokenizer_path, job.data.dataset_path) == (None, None)
    assert job.data.dataset == "python_stdlib"
    assert job.training.steps == 7
    assert job.model == recipe.config.model.model_copy(update={"tokenizer_path": None})


def test_what_a_flag_says_stays():
    Path("r.toml").write_text("[training]\nsteps = 50\n")
    flags = ("--training.seq_len=128", "--training.steps=3")
    checked = shrunk(Path("r.toml"), *flags, "--parallelism.tensor_parallel_degree=4")
    assert checked.job.training.seq_len == 128
    assert checked.job.training.steps == 3
    assert checked.job.degrees(checked.ranks).tp == 4
    assert not any("seq_len" in line or "tensor" in line for line in checked.changes)


@pytest.mark.gate
def test_a_pipeline_with_context_parallelism():
    degrees = "pipeline_parallel_degree = 4\ncontext_parallel_degree = 4\n"
    assert verify(degrees, "--shrink", "--model.flavor", "deep", "--world-size", "4") == 2
    degrees += "data_parallel_shard_degree = 1"
    assert verify(degrees, "--shrink", "--model.flavor", "deep") == 0


def step(number=2, loss=2.0, norm=1.0, off=0.0, **rest):
    difference = TensorDifference("weight", "a", (3, 4), 1.0 + off, 1.0, off)
    return Step(number, loss, norm, **{"names": ("a",), "differences": (difference,), **rest})


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (step(), None),
        (step(loss=2.00001), None),
        (step(loss=2.0001), "rank 1: the loss is 2.0001, on one rank 2; no parameter differs yet"),
        (step(loss=math.nan), "rank 1: the loss is nan, on one rank 2; no parameter differs yet"),
        (step(norm=1.001), "rank 1: the gradient norm is 1.001, on one rank 1; no parameter"),
        (step(off=2e-5), "rank 1: a[3, 4] is 1.00002, on one rank 1; 1 of 1 parameters differ"),
        (step(off=math.nan), "rank 1: a[3, 4] is nan, on one rank 1; 1 of 1 parameters differ"),
    ],
)
def test_what_is_a_fault(found, fault):
    comparison = Comparison([step(1), step()], [[step(1), step()], [step(1), found]])
    said = comparison.fault()
    assert said is None if fault is None else said and said.startswith(f"step 2, {fault}")
    assert comparison.table("x").row_count == 2


def test_a_parameter_that_no_rank_has_is_a_fault():
    comparison = Comparison([step(1, names=("a", "b"))], [[step(1)], [step(1)]])
    assert comparison.fault() == "step 1, all ranks: none has b"

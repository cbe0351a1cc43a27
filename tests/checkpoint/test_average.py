"""Averages of weights: the one that a run keeps, and the mean of several checkpoints."""

import shutil

import pytest
import torch
from torch.testing import assert_close

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import rows, train, train_each
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.config import ConfigError
from torchtitan.optim.average import AverageRule
from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import ParameterGroup
from torchtitan.tools.cli import main

STEPS, DECAY = 4, 0.5


def recipe(folder, dtype="float32", decay=DECAY, steps=STEPS, **sections):
    """A run that saves every step, and keeps an average of its weights."""
    sections = {
        "optimizer": {"name": "SGD", "lr": 0.5, "average": decay},
        "training": {"steps": steps, "dtype": dtype, "global_batch_size": 4},
        "checkpoint": {"enable": True, "interval": 1},
        **sections,
    }
    return tiny.job(folder, **sections)


def saved(folder, step, kind="model.", end=""):
    """Tensors of a checkpoint by the name of their parameter."""
    tensors = SavedTensors(folder / f"checkpoint/step-{step}")
    names = [n for n in tensors.shapes() if n.startswith(kind) and n.endswith(end)]
    return {n.removeprefix(kind).removesuffix(end): tensors.read(n).clone() for n in names}


def averages(folder, step):
    return saved(folder, step, "optimizer.", ".average")


def test_it_is_the_average_of_the_weights_after_each_step(tmp_path):
    train(recipe(tmp_path))
    expected = saved(tmp_path, 1)
    for step in range(1, STEPS + 1):
        expected = {
            name: DECAY * expected[name] + (1 - DECAY) * weight
            for name, weight in saved(tmp_path, step).items()
        }
        assert_close(averages(tmp_path, step), expected)


def test_it_is_kept_in_float32_and_gives_place_to_the_weights_again():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    named = NamedParameter(weight, "w", "matrix")
    average = AverageRule(decay=0.999).build([ParameterGroup((named,), AverageRule(decay=0.999))])
    average.step()
    with torch.no_grad():
        weight.add_(1)
    average.step()
    found = average.state[weight]["average"]
    assert_close(found, torch.full((3,), 1.001))  # in bfloat16 it would stay 1
    with average.in_use():
        assert weight.eq(found.bfloat16()).all()
    assert weight.eq(2).all()
    assert_close(found, torch.full((3,), 1.001))


LAYOUTS = {
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
    "ddp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
}


def of_layout(folder, name, steps=STEPS):
    validation = {"enable": True, "freq": 2, "steps": 1, "average": True}
    layout = LAYOUTS.get(name, {})
    folder = folder / name
    return recipe(folder, steps=steps, validation=validation, parallelism=layout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one rank, those of two ranks, and one that two ranks continue."""
    folder = tmp_path_factory.mktemp("runs")
    train(of_layout(folder, "alone"))
    shutil.copytree(folder / "alone", folder / "resumed")
    for step in (3, 4):
        shutil.rmtree(folder / f"resumed/checkpoint/step-{step}")
    run_ranks(train_each, 2, [of_layout(folder, name) for name in (*LAYOUTS, "resumed")])
    return folder


def validations(folder):
    return [row["validation_loss"] for row in rows(folder) if "validation_loss" in row]


@pytest.mark.costs("runs on six layouts")
@pytest.mark.parametrize("name", [*LAYOUTS, "resumed"])
def test_it_is_that_of_one_rank_on_every_layout(name, alone):
    expected = averages(alone / "alone", STEPS)
    assert_close(averages(alone / name, STEPS), expected, rtol=1e-4, atol=1e-6)
    known = validations(alone / "alone")
    assert_close(validations(alone / name)[-len(known) :], known, rtol=1e-5, atol=0)


def test_a_validation_measures_it_and_changes_nothing(alone, tmp_path):
    without = recipe(tmp_path, validation={"enable": True, "freq": 2, "steps": 1})
    train(without)
    assert_close(saved(tmp_path, STEPS), saved(alone / "alone", STEPS), rtol=0, atol=0)
    assert validations(tmp_path) != validations(alone / "alone")


def command(*words):
    return main(["checkpoint", *map(str, words)])


def weights_in(folder):
    source = SavedTensors(folder)
    return {name.removeprefix("model."): source.read(name) for name in source.shapes()}


def test_it_is_converted_in_place_of_the_weights(alone, tmp_path, capsys):
    convert = "convert", alone / "alone", tmp_path / "new", "--to", "ours"
    assert command(*convert, "--average") == 0
    assert_close(weights_in(tmp_path / "new"), averages(alone / "alone", STEPS), rtol=0, atol=0)
    assert command("convert", tmp_path / "new", tmp_path / "no", "--average") == 2
    assert "has no average of its weights" in capsys.readouterr().err


def test_a_checkpoint_without_it_is_refused(tmp_path):
    train(recipe(tmp_path, decay=None, steps=1))
    with pytest.raises(ConfigError, match=r"optimizer\.\S+\.average is not in the checkpoint"):
        train(recipe(tmp_path))


def test_recipes_that_lack_it_are_refused():
    job = recipe("unused", decay=None, validation={"enable": True, "average": True})
    (problem,) = tiny.problems(job)
    assert problem.path == "validation.average"
    apart = {"replicas": {"every": 4}}
    job = recipe("unused", communication=apart, parallelism={"data_parallel_replicate_degree": 2})
    (problem,) = tiny.problems(job, ranks=2)
    assert problem.path == "optimizer.average"


# --- checkpoint merge ---


def test_the_mean_of_checkpoints_is_one_to_train_from(alone, tmp_path, capsys):
    folder, merged = alone / "alone", tmp_path / "merged"
    assert (
        command("merge", folder, "--steps", "1,2,4", "--weights", "1,2,5", "--output", merged) == 0
    )
    parts = [(saved(folder, step), weight) for step, weight in ((1, 1), (2, 2), (4, 5))]
    expected = {n: sum(part[n] * weight for part, weight in parts) / 8 for n in parts[0][0]}
    assert_close(weights_in(merged), expected)
    start = {"enable": True, "initial_load_path": str(merged)}
    train(tiny.job(tmp_path / "run", checkpoint=start, training={"steps": 1}))
    assert command("merge", merged, "--steps", "1", "--output", tmp_path / "no") == 2
    assert "has no step 1; it has none" in capsys.readouterr().err


def test_of_several_runs_the_newest_are_merged(alone, tmp_path):
    runs = alone / "alone", alone / "resumed"
    assert command("merge", *runs, "--output", tmp_path / "merged") == 0
    assert_close(weights_in(tmp_path / "merged"), saved(runs[0], STEPS), rtol=1e-4, atol=1e-6)


BAD = [
    ("--steps 1,7,9", "has no step 7, 9; it has 1, 2, 3, 4"),
    ("--steps 1", "got one checkpoint wanted several"),
    ("--steps 1,x", "wanted an integer >= 1"),
    ("--steps 1,2 --weights 1", "got 1 for 2 checkpoints"),
    ("--steps 1,2 --weights 1,-1", "they add up to 0"),
    ("--steps 1,2 --weights 1,nan", "wanted a number"),
    ("{other}", "dim is 64 instead of 32"),
    ("--output {run}", "exists already"),
]


@pytest.mark.parametrize(("words", "told"), BAD)
def test_what_cannot_be_merged_is_refused(words, told, alone, tmp_path, capsys):
    run, new = alone / "alone", tmp_path / "new"
    if "{other}" in words:
        train(recipe(tmp_path / "other", steps=1, model={"flavor": "wide"}))
    given = words.format(other=tmp_path / "other", run=run).split()
    output = () if "--output" in given else ("--output", new)
    assert command("merge", run, *given, *output) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not new.exists()

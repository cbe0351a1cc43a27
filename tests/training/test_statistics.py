"""What is said of each layer: the same on every layout, and saying it changes nothing."""

import dataclasses
import math

import pytest
import torch

from tests import layouts
from tests.layouts import case, schedule
from tests.ranks import run_ranks
from tests.runs import rows, running, train, train_each, train_from_scratch
from torchtitan.metrics.statistics import CHUNK, TensorSums, values
from torchtitan.optim.parameters import local

UNITS = ("tok_embeddings", *(f"layers.{n}" for n in range(2)), "norm", "output")


def test_values_are_those_of_all_parts():
    whole = torch.tensor([3.0, -4.0, 0.0, 0.0, math.inf, math.nan])
    seen = TensorSums(torch.device("cpu"))
    for part in whole.split(4):
        seen.look(part)
    found = values(seen.sums.tolist(), float(seen.largest), copies=1)
    assert found == {
        "rms": pytest.approx(2.5),
        "absmax": 4.0,
        "mean": -0.25,
        "zeros": pytest.approx(1 / 3),
        "non_finite": 2,
    }


def test_large_tensors_are_looked_at_in_pieces():
    seen = TensorSums(torch.device("cpu"))
    seen.look(torch.full((CHUNK + 3,), 2.0, dtype=torch.bfloat16))
    assert seen.sums.tolist() == [CHUNK + 3, 2 * (CHUNK + 3), 4 * (CHUNK + 3), 0, 0]


def test_a_rank_without_any_of_it_and_copies_do_not_count():
    assert values([4, 0, 4, 0, 2], 1.0, copies=2)["non_finite"] == 1
    seen = TensorSums(torch.device("cpu"))
    seen.look(torch.zeros(0, 5))
    assert seen.sums.tolist() == [0.0] * 5


def recipe(folder, layout, freq=2, steps=2):
    return layouts.job(
        layout,
        "SGD",
        model={"flavor": "flat"},
        job={"dump_folder": str(folder)},
        training={"steps": steps},
        metrics={"statistics_freq": freq},
    )


def measured(folder):
    """The only report of a run."""
    [row] = [row for row in rows(folder) if row.get("event") == "statistics"]
    assert row["step"] == 2
    return {key: value for key, value in row.items() if "/" in key}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_ranks(train, 1, recipe(folder, case()))
    return measured(folder)


def test_every_layer_and_parameter_is_told_of(one_rank):
    told = {key.rpartition("/")[0] for key in one_rank}
    assert {key for key in told if key.startswith("activation")} == {
        f"activation/{name}" for name in UNITS
    }
    parameters = {key.partition("/")[2] for key in told if key.startswith("weight")}
    assert parameters == {key.partition("/")[2] for key in told if key.startswith("gradient")}
    assert len(parameters) == 2 * 9 + 3
    assert one_rank["weight/norm.weight/mean"] == pytest.approx(1.0, rel=0.1)
    assert all(value == 0 for key, value in one_rank.items() if key.endswith("non_finite"))
    # The rows of tokens that the batch does not have.
    assert 0 < one_rank["gradient/tok_embeddings.weight/zeros"] < 1


WHOLE = {"disable_sequence_parallel": True, "disable_loss_parallel": True}


SPLIT = {
    "FSDP, full recomputation": case(shard=2, recompute={"mode": "full"}),
    "TP": case(tp=2),
    "TP, whole sequences and logits": case(tp=2, **WHOLE),
    "PP": schedule("1F1B"),
    "CP": case(cp=2),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder with a run of each layout."""
    folder = tmp_path_factory.mktemp("two")
    jobs = [recipe(folder / name, layout) for name, layout in SPLIT.items()]
    run_ranks(train_each, 2, jobs)
    return folder


@pytest.mark.parametrize("layout", SPLIT)
def test_values_do_not_depend_on_the_layout(layout, one_rank, two_ranks):
    found = measured(two_ranks / layout)
    assert found.keys() == one_rank.keys()
    for key, value in found.items():
        name, _, which = key.rpartition("/")
        scale = one_rank[f"{name}/rms"] if which == "mean" else one_rank[key]
        assert abs(value - one_rank[key]) <= 1e-5 * abs(scale), key


def test_what_is_not_finite_is_counted_once_however_many_copies_there_are(tmp_path):
    for name, layout in {"one": case(), "two": case(tp=2, **WHOLE)}.items():
        run_ranks(with_an_infinite_weight, layout.ranks, recipe(tmp_path / name, layout))
    one, two = measured(tmp_path / "one"), measured(tmp_path / "two")
    # Of gradients there are more with the vocabulary split: 0 times what is not a number is none.
    counts = {
        key: value
        for key, value in one.items()
        if key.endswith("non_finite") and not key.startswith("gradient")
    }
    assert counts == {key: two[key] for key in counts}
    assert counts["weight/norm.weight/non_finite"] == 1
    # The norm gives one number for each of 8 x 32 tokens that is not finite.
    assert counts["activation/norm/non_finite"] == 8 * 32
    assert counts["activation/layers.1/non_finite"] == 0


def with_an_infinite_weight(job):
    with running(job) as run:
        [norm] = [p for p, name in run.optimizers.inner.names.items() if name == "norm.weight"]
        local(norm.detach())[0] = math.inf
        train_from_scratch(run)


def compiled(granularity):
    settings = {"enable": True, "backend": "aot_eager", "granularity": granularity}
    return {"compile": settings}


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        (case(shard=2), {}),
        (case(shard=2, fsdp_reshard_after_forward="never"), {}),
        (case(), compiled("block")),
    ],
)
def test_the_run_is_the_same_to_the_bit(layout, sections, one_rank, tmp_path):
    is_the_same_to_the_bit(layout, sections, one_rank, tmp_path)


def is_the_same_to_the_bit(layout, sections, one_rank, tmp_path):
    layout = dataclasses.replace(layout, sections=layout.sections | sections)
    jobs = [recipe(tmp_path / str(freq), layout, freq, steps=4) for freq in (0, 2)]
    weights = run_ranks(train_each, layout.ranks, jobs)[0]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
    assert not [row for row in rows(tmp_path / "0") if row.get("event") == "statistics"]
    found = [row for row in rows(tmp_path / "2") if row.get("event") == "statistics"]
    assert [row["step"] for row in found] == [2, 4]
    values = {key: value for key, value in found[0].items() if "/" in key}
    assert values.keys() == one_rank.keys()
    for name in UNITS:
        key = f"activation/{name}/rms"
        assert values[key] == pytest.approx(one_rank[key], rel=1e-5)

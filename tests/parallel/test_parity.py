"""The spine: every layout trains the same run as one rank.

Loss, gradient norm and every weight are compared after each of 3 steps, with targets that differ
in number from rank to rank, so that a gradient that is averaged where it should be summed, or
summed twice, cannot hide. The optimizer is SGD, because Adam's update does not change with the
scale of the gradient.
"""

from functools import cache

import pytest
import torch

from tests import layouts, tiny
from tests.layouts import DAILY, GATE, LAYOUTS, ONE, alone, compared_by
from tests.ranks import run_ranks
from tests.runs import assert_complete, compare, compare_converted, compare_routers, each, trace
from tests.tiers import tiers
from torchtitan.job import JobConfig


def reference(device, layout, flavor, steps=3):
    """A run on one rank, by each of the layout's optimizers."""
    sections = {"model": {"flavor": flavor}, "training": {"steps": steps}}
    jobs = [layouts.job(alone(layout), by, **sections) for by in compared_by(layout)]
    return _reference(device, *(job.model_dump_json() for job in jobs))


@cache
def _reference(device, *recipes):
    jobs = [JobConfig.model_validate_json(recipe) for recipe in recipes]
    (result,) = run_ranks(each, 1, trace, jobs, True, device, device=device)
    return result


def bound(layout):
    """How far off a weight may be.

    AdamW moves a weight by 1e-3 g / (|g| + 1e-8), so an error of 1e-10 in a gradient near zero
    moves it by 1e-5. Gradients of auxiliary losses are further terms, which pipelines and rotated
    weights add in another order.
    """
    return 2e-5 if layout.auxiliary else 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", tiers(LAYOUTS, DAILY, gate=GATE))
def test_layout_trains_the_same_run_as_one_rank(name, device):
    is_the_run_of_one_rank(LAYOUTS[name], device)


def is_the_run_of_one_rank(layout, device, steps=3):
    jobs = [layouts.job(layout, by, training={"steps": steps}) for by in compared_by(layout)]
    results = run_ranks(each, layout.ranks, trace, jobs, True, device, device=device)
    for number, expected in enumerate(reference(device, layout, jobs[0].model.flavor, steps)):
        found = [ranks[number] for ranks in results]
        assert_complete(found, expected)
        for rank, trace_of_rank in enumerate(found):
            where = f"{jobs[number].optimizer.name}, rank {rank}"
            if layout.convert:
                compare_converted(trace_of_rank, expected, where, bound(layout))
            else:
                compare(trace_of_rank, expected, where, bound(layout))
                if jobs[number].optimizer.name == "SGD":
                    compare_routers(trace_of_rank, expected, where)


def test_reference_learns_and_is_uneven():
    """The comparison means something: weights move, norms are clipped, counts differ by rank."""
    expected = reference("cpu", ONE, "deep")[0]
    first, last = expected.weights[0], expected.weights[-1]
    assert all((first[name].local - last[name].local).abs().max() > 1e-4 for name in first)
    assert min(expected.grad_norms) > 0.3


def test_a_gradient_of_another_scale_is_seen_where_layers_are_converted():
    layout = LAYOUTS["FSDP 2, Float8 rowwise"]
    expected = reference("cpu", layout, "even")[0]
    job = layouts.job(alone(layout), "SGD", model={"flavor": "even"})
    faster = job.optimizer.model_copy(update={"lr": 1.1 * job.optimizer.lr})
    (found,) = run_ranks(trace, 1, job.model_copy(update={"optimizer": faster}), True)
    with pytest.raises(AssertionError, match="is off by"):
        compare_converted(found, expected, "SGD")
    found.weights[0] = expected.weights[0]
    with pytest.raises(AssertionError, match=r"step 2: .* is off by"):
        compare_converted(found, expected, "SGD")


def test_start_is_bit_identical():
    job = tiny.job(training={"steps": 1}, optimizer={"name": "SGD", "lr": 1e-30})
    (one,) = run_ranks(trace, 1, job)
    for found in run_ranks(trace, 4, job):
        for name, part in found.weights[0].items():
            assert torch.equal(part.local, part.of(one.weights[0][name]))


@pytest.mark.gate
@pytest.mark.parametrize("name", ["FSDP 2 x TP 2 x PP 2", "PP 2, ZBVZeroBubble"])
def test_bf16_stays_close(name):
    """In bf16 sums round in another order on each layout; the run is the same but for that."""
    layout = LAYOUTS[name]
    job = layouts.job(layout, "SGD", training={"mixed_precision_param": "bfloat16"})
    expected = reference("cpu", ONE, "deep")[0]
    for found in run_ranks(trace, layout.ranks, job, True):
        assert found.losses == pytest.approx(expected.losses, rel=3e-3)
        assert found.losses != expected.losses
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=3e-2)

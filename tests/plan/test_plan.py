"""Plans of whole recipes."""

import dataclasses
import itertools
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from tests import layouts
from tests.plan import recorded
from torchtitan.config import RecipeError
from torchtitan.optim import Optimizers
from torchtitan.parallel.schedules import SCHEDULES, order
from torchtitan.plan.expansion import expand
from torchtitan.plan.fitting import FittingChange
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import plan
from torchtitan.plan.recording import Kernel
from torchtitan.plan.speed import step_time


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_keeps_more_microbatches_than_the_first(name):
    """So the first of the ranks that are alike is planned."""
    stages = 4 if SCHEDULES[name].stages == "one" else 8
    orders = order(name, stages, 4, 2 * stages)
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    changes = ([change[action.kind] for action in orders[rank]] for rank in range(4))
    kept = [max(itertools.accumulate(of_rank)) for of_rank in changes]
    assert kept == sorted(kept, reverse=True)


def test_host_memory_is_not_of_a_device():
    job = recorded.job("FSDP 2, CPU offload")
    steps = [recorded.step(job, 2, device_type=kind) for kind in ("cpu", "cuda")]
    host, device = (each.peak()[1] for each in steps)
    assert not [*steps[1].levels()][-1][1]["gradients"]
    assert host["optimizer states"] > 0
    assert not device["optimizer states"]
    assert device.total() < host.total()


def test_a_step_of_unknown_shapes_is_refused_with_its_operator(monkeypatch):
    def norm(optimizers):
        return torch.unique(next(iter(optimizers.names)))

    monkeypatch.setattr(Optimizers, "norm", norm)
    with pytest.raises(RecipeError, match=r"cannot be planned yet: aten\._unique2"):
        plan(layouts.job(layouts.ONE, "SGD"), 1)
    monkeypatch.setattr("torchtitan.plan.plan.record", made := Mock(side_effect=RuntimeError))
    with pytest.raises(RecipeError):
        plan(layouts.job(layouts.layout("CP 4, ring, unbalanced"), "SGD"), 4)
    assert made.call_args.args[2] == 3  # which attends to the most keys


@pytest.mark.parametrize("kind", ["attention", "mm"])
def test_a_plan_without_some_of_the_work_of_the_model_refuses_itself(kind, monkeypatch):
    def without(source, passes):
        events = (
            each._replace(flops=0) if isinstance(each, Kernel) and kind in each.name else each
            for each in source.recording.events
        )
        recording = dataclasses.replace(source.recording, events=[*events])
        return expand(dataclasses.replace(source, recording=recording), passes)

    monkeypatch.setattr("torchtitan.plan.plan.expand", without)
    with pytest.raises(RecipeError, match=r"cannot be planned yet: its .* would execute 0\.0%"):
        recorded.plan(recorded.job("FSDP 2"), 2)


def test_a_plan_that_is_faster_than_the_device_refuses_itself(monkeypatch):
    def fast(*words):
        return dataclasses.replace(step_time(*words), mfu=1.01)

    planned = partial(recorded.plan, recorded.job("FSDP 2"), 2, hardware=find_hardware("h100"))
    found = planned()
    assert FittingChange((), dataclasses.replace(found, ranks=4)).slowdown(found) == 2
    monkeypatch.setattr("torchtitan.plan.plan.step_time", fast)
    with pytest.raises(RecipeError, match="its MFU would be"):
        planned()


def test_a_probe_is_planned_first_and_alone_if_it_does_not_fit():
    plan, counts = partial(recorded.plan, recorded.job("PP 4, 1F1B"), 4), list[int]()
    whole = plan(device_type="cpu", count=counts.append)
    assert counts == [1, 2, 3]
    assert [kind.stage_ranks[0] for kind in whole.kinds] == [0, 1, 3]
    fitting = plan(device_type="cpu", capacity_gib=80, probe=3)
    assert [kind.memory for kind in fitting.kinds] == [kind.memory for kind in whole.kinds]
    probed = plan(device_type="cpu", capacity_gib=1e-6, probe=3)
    assert [kind.stage_ranks for kind in probed.kinds] == [[3]]
    assert probed.kinds[0].memory == whole.kinds[-1].memory
    assert probed.fits is False

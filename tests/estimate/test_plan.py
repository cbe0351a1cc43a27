"""Plans of whole recipes."""

import itertools
from functools import partial

import pytest
import torch

from tests import layouts
from tests.estimate import recorded
from torchtitan.config import RecipeError
from torchtitan.estimate.plan import plan
from torchtitan.optim import Optimizers
from torchtitan.parallel.schedules import SCHEDULES, order


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_keeps_more_microbatches_than_the_first(name: str) -> None:
    """So the first of the ranks that are alike is planned."""
    stages = 4 if SCHEDULES[name].stages == "one" else 8
    orders = order(name, stages, 4, 2 * stages)
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    kept = [
        max(itertools.accumulate(change[action.kind] for action in orders[rank]))
        for rank in range(4)
    ]
    assert kept == sorted(kept, reverse=True)


def test_host_memory_is_not_of_a_device() -> None:
    job = recorded.job("FSDP 2, CPU offload")
    host, device = (recorded.step(job, 2, device_type=kind).peak()[1] for kind in ("cpu", "cuda"))
    assert host["optimizer states"] > 0
    assert not device["optimizer states"]
    assert device.total() < host.total()


def test_a_step_of_unknown_shapes_is_refused_with_its_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def norm(optimizers: Optimizers) -> torch.Tensor:
        return torch.unique(next(iter(optimizers.names)))

    monkeypatch.setattr(Optimizers, "norm", norm)
    with pytest.raises(RecipeError, match=r"cannot be planned yet: aten\._unique2"):
        plan(layouts.job(layouts.ONE, "SGD"), 1)


def test_a_probe_is_planned_first_and_alone_if_it_does_not_fit() -> None:
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

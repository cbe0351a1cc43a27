"""Memory that libraries take in addition to tensors."""

import pytest

from tests.layouts import LAYOUTS
from tests.plan import recorded
from torchtitan.device import GIB
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.memory import PAIR_GIB, outside, reserved, workspaces

H100 = find_hardware("h100")


def step_of(name):
    job, ranks = recorded.job(name), LAYOUTS[name].ranks
    step = recorded.step(job, ranks, device_type="cuda")
    return step, outside(job, ranks, 0, step, H100)


@pytest.mark.parametrize(
    ("layout", "groups", "pairs"),
    [
        ("one rank, loss in chunks", 0, 0),
        ("FSDP 2, CPU offload", 1, 0),
        ("HSDP 2 x 2", 3, 0),  # replicas, shards, and all ranks
        ("PP 2, 1F1B", 1, 1),
        ("CP 2, ring", 1, 1),
    ],
)
def test_each_group_that_sends_has_a_communicator(layout, groups, pairs):
    found = step_of(layout)[1]
    assert found.pop("context and kernels") == H100.outside_allocator_gib
    expected = groups * H100.communicator_gib + pairs * PAIR_GIB
    assert found == ({"communicators": pytest.approx(expected)} if groups else {})


def test_workspaces_are_in_the_allocator():
    step, _ = step_of("FSDP 2, CPU offload")
    sizes = workspaces(H100)
    without, found = reserved(step), reserved(step, workspaces=sizes)
    assert sum(sizes) == 64 * 1024**2
    assert found.peak_allocated - without.peak_allocated == sum(sizes)
    assert found.peak_reserved - without.peak_reserved >= sum(sizes)
    assert sum(workspaces(find_hardware("a100-80"))) / GIB < 0.02

"""CUDA where there is no device: a fake `torch.cuda` that notes who asks what."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from torchtitan import trainer
from torchtitan.checkpoint.saver import Staging, after, in_thread
from torchtitan.cluster import launcher
from torchtitan.device import Device


class Joined(Exception):
    """The rank has read its recipe and joins the others."""


@pytest.fixture
def contexts(monkeypatch, tmp_path):
    """The indices of the devices on which this process makes a context, on a machine with two."""
    current, made = [0], list[int]()

    def memory(index=None):
        made.append(current[0] if index is None else index)
        return 2**34, 2**35

    def choose(index):
        current[0] = index
        made.append(index)

    def about(index=0):
        return SimpleNamespace(name="H100", total_memory=2 ** (35 - index), major=9, minor=0)

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": about,
        "get_device_name": lambda index=0: about(index).name,
        "get_device_capability": lambda index=0: (9, 0),
        "mem_get_info": memory,
        "set_device": choose,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("asked the real CUDA"))
    monkeypatch.chdir(tmp_path)
    return made


RECIPE = ["--training.steps", "1", "--job.dump_folder", "run", "--model.n_layers", "1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_touches_its_own_device_alone(rank, contexts, monkeypatch):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(trainer, "open_world", Mock(side_effect=Joined))
    with pytest.raises(Joined):
        trainer.main(RECIPE)
    assert contexts == [rank]


def test_who_only_looks_at_a_recipe_touches_no_device(contexts, says):
    launcher.check(launcher.LaunchOptions(processes=2), RECIPE)
    assert "valid on 2 ranks" in says("check", "--here", "--world-size", "2", *RECIPE)
    assert contexts == []


def test_the_smallest_of_the_devices_of_a_run_is_its_limit(contexts, says):
    large = ["check", "--here", "--model.flavor", "405B", "--training.steps", "1"]
    assert "GiB, and H100 has 16.0" in says(*large, "--world-size", "2", status=2)
    assert contexts == []


def test_a_thread_that_saves_uses_the_device_of_its_rank(contexts):
    """A new thread has the first device of the machine."""

    class OnHost(Device):
        """Its tensors are on the host, and it is made current like a CUDA device."""

        def make_current(self):
            torch.cuda.set_device(1)

    staging = Staging(pinned=False, device=OnHost("cpu"))
    copies = staging.begin([])
    assert in_thread(copies).get() == []
    staging.device = Device("cuda", 1)
    event = SimpleNamespace(synchronize=lambda: contexts.append(-1))
    assert in_thread(lambda: after(event, [], staging.device, [])).get() == []
    assert contexts == [1, 1, -1]

"""What a step need not wait for: reading and joining samples, and pinning batches."""

import threading

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import train
from tests.token_shards import build_stream
from torchtitan.data import DataConfig, load_tokenizer
from torchtitan.device import Device
from torchtitan.research.vit_mae import masked_autoencoder
from torchtitan.research.vit_mae.images.crop import Crop
from torchtitan.research.vit_mae.masked_autoencoder import MaskedPatches

READING = ("part", "finish", "mask_order")


def main_thread_prepares(job):
    """Train; for each thing that is done to a batch before a step, whether the step did it."""
    found = {}

    def watched(name, function):
        def call(*args):
            is_main = threading.current_thread() is threading.main_thread()
            found[name] = found.get(name, False) or is_main
            return function(*args)

        return call

    places = dict.fromkeys(("part", "finish"), Crop) | {"mask_order": masked_autoencoder}
    places |= {"collate": MaskedPatches, "pin": Device}
    with pytest.MonkeyPatch.context() as patch:
        for name, place in places.items():
            patch.setattr(place, name, watched(name, getattr(place, name)))
        train(job)
    return found


@pytest.mark.parametrize("processes", [0, 2])
def test_images_are_read_by_processes_and_joined_by_a_thread(processes, tmp_path):
    data = {"dataset": "scenes", "num_workers": processes}
    job = tiny.job(tmp_path, model=tiny.VIT_MAE, data=data, training={"steps": 2})
    (found,) = run_ranks(main_thread_prepares, 1, job)
    here = ("collate", "pin") if processes else (*READING, "collate", "pin")
    assert found == dict.fromkeys(here, not processes)


@pytest.fixture
def pinned(monkeypatch):
    """Each call of a CUDA that is not there: in the main thread, its current device, and where
    what it returns is in memory."""
    calls = []
    thread = threading.local()

    def pin_memory(tensor):
        copy = tensor.clone()
        is_main = threading.current_thread() is threading.main_thread()
        calls.append((is_main, getattr(thread, "device", 0), copy.data_ptr()))
        return copy

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(thread, "device", index))
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return calls


@pytest.mark.parametrize(
    ("workers", "device", "is_pinned"),
    [(2, Device("cuda", 3), True), (2, Device("cpu"), False), (0, Device("cuda", 3), True)],
)
def test_batches_are_pinned_for_cuda_by_a_thread(workers, device, is_pinned, pinned):
    """If there is one."""
    config = DataConfig(dataset="synthetic", num_workers=workers)
    part = {"seq_len": 8, "local_batch_size": 2, "accumulation": 2, "device": device}
    stream = build_stream(config, load_tokenizer(None), **part)
    batches = [next(stream) for _ in range(3)]
    stream.close()
    tensors = {
        t.data_ptr()
        for batch in batches
        for name, t in vars(batch).items()
        if t is not None and name not in batch.on_host
    }
    assert {(is_main, index) for is_main, index, _ in pinned} == (
        {(not workers, 3)} if is_pinned else set()
    )
    assert (tensors <= {place for *_, place in pinned}) == is_pinned

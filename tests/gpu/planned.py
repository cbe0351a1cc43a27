"""A rank whose others do not exist, its plan to stand beside, and the calibration of a device."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.device import GIB
from torchtitan.models import MODELS
from torchtitan.optim import Optimizers
from torchtitan.parallel import ParallelModel, allocate, build_on_meta, build_optimizers
from torchtitan.parallel.world import make_world
from torchtitan.plan.hardware import find_hardware, hardware_names
from torchtitan.plan.hardware.calibrate import calibrate
from torchtitan.plan.plan import plan
from torchtitan.tasks import TASKS
from torchtitan.timeline import Timeline
from torchtitan.torch_private.pipeline_stages import skip_shape_inference


class FakeRank(NamedTuple):
    """What a rank trains with, and a batch of zeros."""

    model: ParallelModel
    optimizers: Optimizers
    batch: Batch


@contextmanager
def fake_rank(job, ranks, rank, device):
    """Be a rank of torch's fake group, which says that there are the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        device.make_current()
        world = make_world(job.degrees(ranks), job.comm, device, dist.group.WORLD)
        layout, args, spec = job.layout(world.degrees), job.model_args(), MODELS[job.model.name]
        model = build_on_meta(job.model, args, layout, world, Timeline(device))
        if model.pipeline:
            skip_shape_inference(model.pipeline.schedule)
        allocate(model, layout, world)
        optimizers = build_optimizers(job.optimizer, model, spec, args, job.compile)
        size, seq_len = job.training.local_batch_size, job.training.seq_len
        blank = TASKS[spec.task].blank_batch(size, seq_len, args, False)
        yield FakeRank(model, optimizers, blank.to(device.torch_device))
    finally:
        dist.destroy_process_group()
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(key, None)


def planned(job, ranks, rank, device):
    """Return GiB that a rank reserves and, on hardware that has a file, tokens per second."""
    found = plan(job, ranks, hardware_of(device), device_type=device.type)
    stage = rank * job.degrees(ranks).pp // ranks
    kind = next(each for each in found.kinds if stage in each.stage_ranks)
    figures = {"planned GiB": kind.memory.peak_reserved / GIB}
    if found.time is not None:
        figures["planned tokens/s"] = found.time.tokens_per_second_per_device
    return figures


def hardware_of(device):
    """Return the hardware of a device, if its name is in a file."""
    known = map(find_hardware, hardware_names())
    return next((each for each in known if each.device == device.name), None)


def calibration(job, device):
    """Return what `torchtitan plan --calibrate` finds, beside the numbers of the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(job, 1, Path(folder) / "measured.toml")
    figures = {"memory, GB/s": found.memory_bandwidth, "launch, us": found.launch_us}
    for each in found.products:
        figures[f"{each.dtype} {each.m} x {each.n} x {each.k}, TFLOP/s"] = each.tflops
    for rate in found.attention:
        heads = f"attention with heads of {rate.head_dim}"
        figures |= {f"{heads}, forward": rate.forward, f"{heads}, backward": rate.backward}
    if (file := hardware_of(device)) is not None:
        figures["memory in the file, GB/s"] = file.memory_bandwidth
    return figures

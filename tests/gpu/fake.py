"""A step on CUDA tensors without a device: they have shapes and places, and no values.

A tensor on the wrong device, an operator that only a CPU has, and a dtype that an operator refuses
are found so, as far as fake tensors know them; kernels are not run. This needs torch as it is built
for CUDA. Torch's engine of gradients asks the CUDA runtime for streams, and FSDP2 for events, so a
runtime that does nothing is compiled and put in the place of NVIDIA's:

    python -m venv cuda && cuda/bin/pip install torch==2.12.1 -e ".[dev]"
    cuda/bin/python -m tests.gpu.fake [PART OF A NAME ...]

Blocks are not compiled, as that would need values, and the process group is torch's fake one, with
one rank that says that there are the others.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.optim import Optimizers, name_parameters
from torchtitan.optim.optimizer_group import local
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.world import make_world
from torchtitan.parts import allocate, lay_out
from torchtitan.research.vit_mae.masked_autoencoder import MaskedImages
from torchtitan.research.vit_mae.model import ViTMAEArgs
from torchtitan.tasks.next_token import TokenBatch, look_ahead
from torchtitan.timeline import Timeline
from torchtitan.torch_private.pipeline_stages import skip_shape_inference

HERE = Path(__file__).parent
CALLED = re.compile(r" U (cuda\w+|cu[A-Z]\w+)(?:@libcuda\S*)?$", re.MULTILINE)
NEEDS_VALUES = "_local_scalar_dense"
"""An element is read: by torch 2.12 to divide some views of DTensors, and by states of 8 bits."""
MARKS = (
    *("__host__", "__device__", "__device_builtin__", "__align__(n)", "__builtin_align__(n)"),
    *("__device_builtin_texture_type__", "__device_builtin_surface_type__", "CUDARTAPI"),
)
DEFINED = re.compile(r"^(?:int|const char \*)\s?\*?(cu\w+)\(", re.MULTILINE)


def step(job: JobConfig, ranks: int, rank: int, kind: str = "cpu") -> dict[str, int]:
    """A step of one rank of many, on fake tensors; what there was to see."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    degrees, device = job.degrees(ranks), Device(kind)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    world = make_world(degrees, job.comm, device, dist.group.WORLD)
    model = lay_out(job, world, Timeline(world.device))
    if isinstance(model.executor, Pipeline):
        skip_shape_inference(model.executor.schedule)
    batch = None
    if job.parallelism.balancing == "documents":  # whose boundaries are values
        batch = model.shard_batch(empty_batch(job, kind))
        model = dataclasses.replace(model, shard_batch=lambda batch: batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate(model, job, world)
        parameters = name_parameters(model.parts, MODELS[job.model.name].role)
        optimizers = Optimizers(parameters, job.optimizer, world.groups["pp"])
        batch = batch or empty_batch(job, kind)
        count = torch.tensor(1.0, device=kind)
        loss = model.forward_backward([batch, batch], count)["loss"]
        gradients = sum(p.grad is not None for p in optimizers.names)
        norm = optimizers.norm()
        if job.training.max_norm:
            optimizers.clip(job.training.max_norm, norm)
        optimizers.step()
    assert loss.shape == norm.shape == ()
    assert loss.device.type == kind
    return {
        "parameters": sum(p.numel() for p in optimizers.names),
        "own": sum(local(p).numel() for p in optimizers.names),
        "tensors": len(optimizers.names),
        "gradients": gradients,
        "stages": len(model.parts),
    }


def empty_batch(job: JobConfig, kind: str) -> Batch:
    """Texts or images of zeros."""
    size, args = job.training.local_batch_size, job.model_args()
    if isinstance(args, ViTMAEArgs):
        visible = torch.zeros(size, args.visible, args.patch_numbers, device=kind)
        hidden = torch.zeros(size, args.masked, args.patch_numbers, device=kind)
        order = torch.zeros(size, args.patches, dtype=torch.int64, device=kind)
        return MaskedImages(visible, hidden, order)
    shape = size, job.training.seq_len
    texts = TokenBatch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))
    ahead = getattr(args, "ahead", 0)
    return (look_ahead(texts, ahead) if ahead else texts).to(kind)


def in_the_place_of_cuda(folder: Path) -> Path:
    """Compile the runtime: what is written here, and of all else that torch calls a stub."""
    libraries = (Path(torch.__file__).parent / "lib").glob("lib*.so")
    names = subprocess.run(["nm", "-D", *libraries], capture_output=True, text=True, check=False)
    text = (HERE / "runtime.c").read_text()
    missing = sorted(set(CALLED.findall(names.stdout)) - set(DEFINED.findall(text)))
    source, made = folder / "runtime.c", folder / "libcuda.so.1"  # the driver too
    source.write_text(text + "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    headers = Path(torch.__file__).parent.parent.glob("nvidia/*/include")
    include = [f"-I{path}" for path in headers if (path / "driver_types.h").exists()]
    # Of the words that they mark functions with, which come with a compiler of CUDA.
    marks = folder / "crt/host_defines.h"
    marks.parent.mkdir()
    marks.write_text("".join(f"#define {word}\n" for word in MARKS))
    include.append(f"-I{folder}")
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", *include, "-o", made, source], check=True)
    return made


def cases() -> dict[str, JobConfig]:
    """Every layout, and every option that a step has on one device, eager."""
    from tests import layouts
    from tests.gpu import right
    from tests.research.layouts import COMPRESSED, LAYOUTS

    found = {
        f"{name}, {optimizer}": layouts.job(layout, optimizer)
        for name, layout in (COMPRESSED | layouts.LAYOUTS | LAYOUTS).items()
        for optimizer in layouts.OPTIMIZERS
    }
    for name, case in right.CASES.items():
        if "compile" not in case.sections:
            found[name] = right.job(case.sections, "AdamW", case, emulated=False)
    return found


def ranks_of(job: JobConfig) -> int:
    """As many as its layout says."""
    wanted = job.parallelism
    return math.prod(
        (
            wanted.pipeline_parallel_degree,
            wanted.data_parallel_replicate_degree,
            max(1, wanted.data_parallel_shard_degree),  # -1: what is left
            wanted.context_parallel_degree,
            wanted.tensor_parallel_degree,
        )
    )


def real(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Let a method read a counter of steps, which is on the host and no fake."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def outside(tensor: torch.Tensor) -> Any:
        with unset_fake_temporarily():
            return read(tensor)

    return outside


def main() -> int:
    wanted = sys.argv[1:]
    if torch.version.cuda is None:
        print("this torch is built without CUDA; see the head of tests/gpu/fake.py")
        return 2
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            made = in_the_place_of_cuda(Path(folder))
            environment = os.environ | {"LD_PRELOAD": str(made), "LD_LIBRARY_PATH": folder}
            words = [sys.executable, "-m", "tests.gpu.fake", *wanted]
            return subprocess.run(words, env=environment, check=False).returncode
    torch.Tensor.pin_memory = lambda self: self  # fake tensors do not know it
    for name in ("__int__", "__bool__"):
        setattr(torch.Tensor, name, real(getattr(torch.Tensor, name)))
    failed = 0
    for name, job in cases().items():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            with torch.compiler.set_stance("force_eager"):  # few-bit states compile their update
                step(job, ranks_of(job), 0, "cuda")
            said = ""
        except Exception:
            said = traceback.format_exc()
        if NEEDS_VALUES in said:
            print(f"left out, as this torch wants values  {name}", flush=True)
            continue
        failed += bool(said)
        print(f"{'FAILED' if said else 'passed'}  {name}", flush=True)
        if said:
            print("\n".join(f"        {line}" for line in said.splitlines()[-12:]), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Whether precision, compiler, data parallelism and optimizer go together, and this machine can."""

import shutil
from collections.abc import Iterator

from torchtitan import convert, optim
from torchtitan.checks.layout import DEGREES, smallest_world
from torchtitan.config import Problem, show
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import activation_checkpoint, async_tensor, cuda_graphs
from torchtitan.resilience import replicas


def problems_of_precision(job: JobConfig) -> Iterator[Problem]:
    t = job.training
    if t.dtype == "bfloat16" and t.mixed_precision_param == "float32":
        message = (
            "parameters stored in bfloat16 (training.dtype) gain nothing from it; "
            "use bfloat16 here or float32 there"
        )
        yield Problem("training.mixed_precision_param", message, ("training.dtype",))
    if job.debug.deterministic_warn_only and not job.debug.deterministic:
        message = "it means nothing without debug.deterministic = true"
        yield Problem("debug.deterministic_warn_only", message, ("debug.deterministic",))
    if getattr(job.optimizer, "nesterov", False) and not getattr(job.optimizer, "momentum", 0):
        yield Problem("optimizer.nesterov", "it needs optimizer.momentum > 0", ("optimizer",))
    c = job.compile
    if c.enable and not c.components:
        message = "with compile.enable = true, wanted at least one of model, loss"
        yield Problem("compile.components", message, ("compile",))
    if c.cache_folder is not None and c.backend != "inductor":
        message = f'compile.backend = "{c.backend}" keeps no graphs; use "inductor"'
        yield Problem("compile.cache_folder", message, ("compile.backend",))


def problems_of_data_parallelism(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees, t = job.degrees(world_size or smallest_world(job)), job.training
    casts = t.dtype != t.mixed_precision_param
    for key, message in job.sharding.problems(
        job.parallelism,
        job.compile,
        job.communication,
        has_work=degrees.data * degrees.cp > 1 or casts or t.enable_cpu_offload,
        cpu_offload=t.enable_cpu_offload,
    ):
        yield Problem(key, message, ("compile", "training", "parallelism", "sharding.name"))
    after_backward = degrees.dp_replicate > 1 and not job.communication.replicas.in_backward
    if job.optimizer.early_step_in_backward and after_backward:
        message = (
            "copies of the model agree on gradients after the backward "
            f"(communication.replicas.name = {show(job.communication.replicas.name)}), when they "
            'are gone; use false, or "all_reduce" with overlap = true there'
        )
        also = ("communication.replicas", *DEGREES)
        yield Problem("optimizer.early_step_in_backward", message, also)


def problems_of_cuda_graphs(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees, t = job.degrees(world_size or smallest_world(job)), job.training
    for key, message in cuda_graphs.problems(
        job.compile,
        job.parallelism,
        job.sharding,
        accumulation=job.accumulation(degrees) if job.data_ranks(degrees) > 0 else 1,
        moves_parameters=degrees.data > 1 or t.dtype != t.mixed_precision_param,
        cpu_offload=t.enable_cpu_offload,
    ):
        yield Problem(key, message, ("compile", "training", "parallelism"))


def problems_of_compiler(job: JobConfig, device_type: str | None) -> Iterator[Problem]:
    """What the compiler cannot do, on any device (None) or on this kind."""
    p, recompute = job.parallelism, job.activation_checkpoint
    for key, message in (
        *activation_checkpoint.problems(recompute, job.compile, p, job.sharding, device_type),
        *async_tensor.problems(p, job.compile, device_type),
    ):
        yield Problem(key, message, ("compile", "parallelism", "activation_checkpoint"))


def problems_of_optimizer(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees = job.degrees(world_size or smallest_world(job))
    accumulation = job.accumulation(degrees) if job.data_ranks(degrees) > 0 else 1
    for key, message in optim.problems(job.optimizer, job.flat(), accumulation):
        yield Problem(key, message, ("optimizer", "training", *DEGREES))
    spec = MODELS[job.model.name]
    if job.optimizer.groups and job.model.flavor in spec.flavors:
        network = build_empty(spec.build, job.model_args(), 1)
        parameters = optim.name_parameters([network], spec.role)
        for key, message in optim.group_problems(job.optimizer, parameters):
            yield Problem(f"optimizer.{key}", message, ("optimizer", "model"))


def problems_of_machine(job: JobConfig, device_type: str) -> Iterator[Problem]:
    """What this very machine cannot do; a check made for another one does not ask."""
    anywhere = set(problems_of_compiler(job, None))
    yield from (p for p in problems_of_compiler(job, device_type) if p not in anywhere)
    for key, message in replicas.problems_of_machine(job.fault_tolerance):
        yield Problem(key, message)
    if job.convert:
        capability = Device("cuda").capability if device_type == "cuda" else None
        for number, message in convert.lacking(job.convert, capability):
            yield Problem(f"convert.{number}.emulate", message, ("convert",))
    for key, message in optim.problems_of_machine(job.optimizer, device_type):
        yield Problem(key, message, ("optimizer",))
    for key, message in cuda_graphs.problems_of_machine(job.compile, device_type):
        yield Problem(key, message)
    for key, message in job.sharding.problems_of_machine(device_type):
        yield Problem(key, message)
    on_cpu = job.compile.backend == "inductor" and device_type == "cpu"
    if job.compile.enable and on_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        message = (
            "torch.compile on a CPU needs g++ or clang++, and there is neither; install one, or "
            'use compile.backend = "aot_eager"'
        )
        yield Problem("compile.enable", message)

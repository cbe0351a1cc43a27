"""Assembles a run from a recipe: the one path from settings to live objects."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from torchtitan.checkpoint import Checkpointer, TrainState
from torchtitan.data import DataStream, Tokenizer, build_stream, check_vocabulary, load_tokenizer
from torchtitan.elastic import StopSignal
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.metrics import Meter, SinkContext, build_sinks
from torchtitan.models import MODELS
from torchtitan.models.initialize import initialize
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import Optimizers, learning_rate_factor
from torchtitan.parallel import Layout, ParallelModel, Precision, World, parallelize, stages
from torchtitan.profiling import Profiler
from torchtitan.provenance import about_run
from torchtitan.validate import Validator


@dataclass
class Run:
    """The live objects of a run, by name."""

    job: JobConfig
    world: World
    tokenizer: Tokenizer
    model: ParallelModel
    optimizers: Optimizers
    schedule: Callable[[int], float]
    accumulation: int
    data: DataStream
    state: TrainState
    checkpoint: Checkpointer
    validator: Validator
    meter: Meter
    profiler: Profiler
    stop: StopSignal


def build(job: JobConfig, world: World) -> Run:
    """Make every object of the run that `job` describes, for this rank of `world`.

    Raises:
        ConfigError: where the tokenizer or the data turn out not to fit the recipe.
    """
    set_determinism(job)
    folder = Path(job.job.dump_folder).expanduser()
    tokenizer = open_tokenizer(job)
    model = build_model(job, world)
    optimizers = Optimizers(model.parts, job.optimizer, world.groups["pp"])
    open_stream = partial(
        build_stream,
        tokenizer=tokenizer,
        seed=job.debug.seed,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        accumulation=(accumulation := job.accumulation(world.degrees)),
        rank=world.data_rank,
        ranks=world.degrees.data,
    )
    state, data = TrainState(), open_stream(job.data)
    checkpoint = Checkpointer(
        job.checkpoint,
        folder,
        world,
        model=model.parts,
        optimizers=optimizers,
        state=state,
        data=data,
        about=about_run(job) if world.rank == 0 else {},
    )
    validation_data = partial(open_stream, job.validation.data(job.data))
    return Run(
        job=job,
        world=world,
        tokenizer=tokenizer,
        model=model,
        optimizers=optimizers,
        schedule=lambda step: learning_rate_factor(job.lr_scheduler, step, job.schedule_steps()),
        accumulation=accumulation,
        data=data,
        state=state,
        checkpoint=checkpoint,
        validator=Validator(job.validation, validation_data, accumulation, model, world),
        meter=build_meter(job, world, folder),
        profiler=Profiler(job.profiling, folder, world.rank, world.device),
        stop=StopSignal(),
    )


def open_tokenizer(job: JobConfig) -> Tokenizer:
    """The recipe's tokenizer, known to fit the model's vocabulary."""
    tokenizer = load_tokenizer(job.model.tokenizer_path)
    check_vocabulary(tokenizer, MODELS[job.model.name].flavors[job.model.flavor].vocab_size)
    return tokenizer


def build_model(job: JobConfig, world: World) -> ParallelModel:
    """Build the network without memory, lay it out, then fill in only what this rank owns."""
    model = lay_out(job, world)
    allocate(model, job, world)
    spec = MODELS[job.model.name]
    rule = partial(spec.init_std, spec.flavors[job.model.flavor])
    for part in model.parts:
        initialize(part.named_parameters(), rule, job.debug.seed)
    return model


def lay_out(job: JobConfig, world: World) -> ParallelModel:
    """The network in the recipe's layout, still on the meta device."""
    spec = MODELS[job.model.name]
    args = spec.flavors[job.model.flavor]
    layout = layout_of(job)
    network = build_empty(spec.build, args, layout.seq_len, layout.precision.parameters)
    logger.info(
        "%s %s: %s parameters, computed in %s, on %d x %s",
        job.model.name,
        job.model.flavor,
        f"{count_parameters(network).total:,}",
        job.training.mixed_precision_param,
        world.size,
        world.device.name,
    )
    if world.degrees.pp > 1:
        microbatches = job.parallelism.microbatches(job.training.local_batch_size)
        logger.info("%s", stages.describe(job.parallelism, args.n_layers, microbatches))
    return parallelize(network, spec, args, layout, world)


def layout_of(job: JobConfig) -> Layout:
    """What `parallelize` has to know of a recipe."""
    return Layout(
        parallelism=job.parallelism,
        precision=Precision(
            parameters=getattr(torch, job.training.dtype),
            compute=getattr(torch, job.training.mixed_precision_param),
            reduce=getattr(torch, job.training.mixed_precision_reduce),
        ),
        cpu_offload=job.training.enable_cpu_offload,
        activation_checkpoint=job.activation_checkpoint,
        compile=job.compile,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        document_mask=job.model.attn_mask_type == "block_causal",
    )


def allocate(model: ParallelModel, job: JobConfig, world: World) -> None:
    """Give the parts of a model memory, uninitialised, and fill their buffers."""
    device = world.device.torch_device
    for part in model.parts:
        part.to_empty(device="cpu" if job.training.enable_cpu_offload else device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()  # type: ignore[operator]


def build_meter(job: JobConfig, world: World, folder: Path) -> Meter:
    """The meter with the sinks that the recipe enables."""
    spec = MODELS[job.model.name]
    context = SinkContext(
        folder=folder,
        rank=world.rank,
        total_steps=job.training.steps,
        tensorboard_folder=job.metrics.save_tb_folder,
        color=not job.metrics.disable_color_printing,
        recipe=job.flat(),
    )
    flops = spec.flops_per_token(spec.flavors[job.model.flavor], job.training.seq_len)
    return Meter(
        build_sinks(job.metrics, context),
        log_freq=job.metrics.log_freq,
        total_steps=job.training.steps,
        tokens_per_step=job.global_batch(world.degrees) * job.training.seq_len,
        flops_per_token=flops,
        peak_flops=world.device.peak_flops(getattr(torch, job.training.mixed_precision_param)),
        devices=world.size,
        device=world.device,
        rank=world.rank,
        reduce_max=world.max if world.size > 1 else None,
    )


def set_determinism(job: JobConfig) -> None:
    """Seed the generators and, if asked, allow only deterministic algorithms."""
    torch.manual_seed(job.debug.seed)
    if job.debug.deterministic:
        # Read by cuBLAS when it is first used; without it torch refuses matrix products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        job.debug.deterministic, warn_only=job.debug.deterministic_warn_only
    )

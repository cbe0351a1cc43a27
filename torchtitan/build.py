"""Assembles a run from a recipe: the one path from settings to live objects."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from torchtitan.checkpoint import (
    Checkpointable,
    Checkpointer,
    InMemoryState,
    ResumePolicy,
    TrainState,
)
from torchtitan.data import DataStream, Tokenizer, build_stream, check_vocabulary, load_tokenizer
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.metrics import (
    EVENTS_FOLDER,
    EventLog,
    Meter,
    SinkContext,
    StragglerWatch,
    build_sinks,
)
from torchtitan.metrics.precision import PrecisionWatch
from torchtitan.metrics.startup import Startup
from torchtitan.metrics.statistics import Statistics
from torchtitan.models import MODELS
from torchtitan.models.initialize import initialize
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import (
    Optimizers,
    learning_rate_factor,
    name_parameters,
    open_optimizers,
)
from torchtitan.parallel import Layout, ParallelModel, Precision, World, parallelize, stages
from torchtitan.parallel.tensor import redistribute_grads
from torchtitan.profiling import Evidence, Profiler
from torchtitan.provenance import about_run
from torchtitan.resilience.replicas import Alone, ReplicaGroup, Replicas
from torchtitan.resilience.stop import StopSignal
from torchtitan.timeline import Timeline
from torchtitan.validate import Validator

# What the replica groups of a run have in common.
SAME_RECIPE = (
    *("model", "data", "training", "optimizer", "lr_scheduler", "spikes", "parallelism", "debug"),
)


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
    live: InMemoryState
    replicas: Replicas
    validator: Validator
    precision: PrecisionWatch
    statistics: Statistics
    timeline: Timeline
    meter: Meter
    profiler: Profiler
    stop: StopSignal

    def startup(self) -> Startup:
        """What watches the first steps."""
        return Startup(self.meter.events, self.timeline, self.world)


def build(job: JobConfig, world: World) -> Run:
    """Make every object of the run that `job` describes, for this rank of `world`.

    Raises:
        ConfigError: where the tokenizer or the data turn out not to fit the recipe.
    """
    set_determinism(job)
    folder = Path(job.job.dump_folder).expanduser()
    tokenizer, timeline = open_tokenizer(job), Timeline(world.device)
    model = build_model(job, world, timeline)
    parameters = name_parameters(model.parts, MODELS[job.model.name].role)
    optimizers = open_optimizers(
        parameters, job.optimizer, world.groups["pp"], world.device, redistribute_grads
    )
    open_stream = partial(
        build_stream,
        tokenizer=tokenizer,
        seed=job.debug.seed,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
    )
    accumulation, groups = job.accumulation(world.degrees), job.fault_tolerance
    state = TrainState()
    data = open_stream(
        job.data,
        accumulation=accumulation,
        rank=groups.group * world.degrees.data + world.data_rank,
        ranks=job.data_ranks(world.degrees),
        groups=groups.groups,
    )
    contents = Checkpointable(model.parts, optimizers, state, data, world)
    about = about_run(job) if world.rank == 0 else {}
    checkpoint = Checkpointer(choice(job), contents, world, about)
    live = InMemoryState(contents, checkpoint.wait_staging)
    # A replica group validates by itself, on the batches of all, and can be lost meanwhile.
    alone = accumulation * groups.groups
    validation_data = {
        name: partial(
            open_stream,
            config,
            accumulation=alone,
            rank=world.data_rank,
            ranks=world.degrees.data,
        )
        for name, config in job.validation.data(job.data).items()
    }
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
        live=live,
        replicas=open_replicas(job, world, data, live),
        validator=Validator(job.validation, validation_data, alone, tokenizer, model, world),
        precision=PrecisionWatch(job.metrics.precision_freq, job.convert, model, world),
        statistics=open_statistics(job, model, optimizers, world),
        timeline=timeline,
        meter=build_meter(job, world, folder, timeline),
        profiler=Profiler(
            job.profiling,
            folder,
            world.rank,
            world.device,
            timeline,
            Evidence(world.device, timeline, optimizers, job.flat()),
        ),
        stop=StopSignal(),
    )


def open_replicas(job: JobConfig, world: World, data: DataStream, live: InMemoryState) -> Replicas:
    """The other replica groups of the run, as the recipe has them."""
    if not job.fault_tolerance.enable:
        return Alone()
    tree = job.model_dump(mode="json")
    return ReplicaGroup(
        job.fault_tolerance,
        world,
        data,
        get=live.get,
        put=live.put,
        history=lambda: asdict(live.state),
        recipe={f"[{section}]": tree[section] for section in SAME_RECIPE}
        | {"fault_tolerance.group_size": job.fault_tolerance.group_size, "ranks": world.size},
    )


def open_statistics(
    job: JobConfig, model: ParallelModel, optimizers: Optimizers, world: World
) -> Statistics:
    """What measures the layers, as the recipe has it."""
    spec, chosen = MODELS[job.model.name], job.parallelism

    def copies(name: str) -> int:
        is_logits = spec.tensor_plan.get(name) == "logits"
        whole = chosen.disable_loss_parallel if is_logits else chosen.disable_sequence_parallel
        return world.degrees.tp if whole else 1

    units = {name for part in model.parts for unit in stages.units(spec, part) for name in unit}
    freq = job.metrics.statistics_freq
    return Statistics(freq, model, optimizers, world, units, copies)


def choice(job: JobConfig) -> ResumePolicy:
    """What decides on the start of this run."""
    folder = Path(job.job.dump_folder).expanduser()
    return ResumePolicy(job.checkpoint, folder, job.in_effect(), job.same_run())


def open_tokenizer(job: JobConfig) -> Tokenizer:
    """The recipe's tokenizer, known to fit the model's vocabulary."""
    tokenizer = load_tokenizer(job.model.tokenizer_path)
    check_vocabulary(tokenizer, job.model_args().vocab_size)
    return tokenizer


def build_model(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """Build the network without memory, lay it out, then fill in only what this rank owns."""
    model = lay_out(job, world, timeline)
    allocate(model, job, world)
    spec = MODELS[job.model.name]
    rule = partial(spec.init_std, job.model_args())
    for part in model.parts:
        initialize(part.named_parameters(), rule, job.debug.seed)
    return model


def lay_out(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """The network in the recipe's layout, still on the meta device."""
    spec = MODELS[job.model.name]
    args = job.model_args()
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
    return parallelize(network, spec, args, layout, world, timeline)


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
        loss=job.loss,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        document_mask=job.model.attn_mask_type == "block_causal",
        convert=job.convert,
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


def build_meter(job: JobConfig, world: World, folder: Path, timeline: Timeline) -> Meter:
    """The meter with the sinks that the recipe enables."""
    spec = MODELS[job.model.name]
    context = SinkContext(
        folder=folder,
        rank=world.rank,
        total_steps=job.training.steps,
        tensorboard_folder=job.metrics.save_tb_folder,
        color=not job.metrics.disable_color_printing,
        run_name=job.metrics.run_name,
        tags=job.metrics.tags,
        recipe=job.in_effect(),
    )
    flops = spec.flops_per_token(job.model_args(), job.training.seq_len)
    return Meter(
        build_sinks(job.metrics, context),
        log_freq=job.metrics.log_freq,
        total_steps=job.training.steps,
        tokens_per_step=job.global_batch(world.degrees) * job.training.seq_len,
        flops_per_token=flops,
        peak_flops=world.device.peak_flops(getattr(torch, job.training.mixed_precision_param)),
        devices=world.size * job.fault_tolerance.groups,
        device=world.device,
        rank=world.rank,
        gather=world.table if world.size > 1 else None,
        timeline=timeline,
        events=EventLog(folder / EVENTS_FOLDER if job.metrics.save_events else None, world.rank),
        stragglers=StragglerWatch(job.metrics.straggler_pct, world.degrees.pp),
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

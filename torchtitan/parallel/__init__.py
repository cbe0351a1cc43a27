"""Turns a single-device model into this rank's part of a parallel run, in one explicit order."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan import convert
from torchtitan.comm import CommunicationConfig
from torchtitan.convert import ConverterConfig
from torchtitan.logging import logger
from torchtitan.losses import AuxiliaryLossConfig, LossConfig
from torchtitan.models import MODELS, attention
from torchtitan.models.experts import parameters_in_words
from torchtitan.models.output import auxiliary_losses
from torchtitan.models.settings import ModelConfig
from torchtitan.models.spec import Args, ModelSpec, build_empty, initialize
from torchtitan.optim import OptimizerConfig, Optimizers, name_parameters, open_optimizers
from torchtitan.parallel import (
    activation_checkpoint,
    async_tensor,
    compile,
    context,
    expert_parallel,
    loss,
    stages,
    tensor,
)
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.loss import AuxiliaryLosses
from torchtitan.parallel.parallel_model import LocallyUpdatedModel, Losses, ParallelModel
from torchtitan.parallel.pipeline import Pipeline, Shapes
from torchtitan.parallel.replication import open_replicas
from torchtitan.parallel.settings import ParallelismConfig, Precision, ReshardPolicy
from torchtitan.parallel.sharding import (
    FSDP2,
    SHARDING,
    Sharding,
    ShardingConfig,
    ShardingTarget,
    compute_in,
)
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.world import RANK_ROLE, CommConfig, Degrees, Launch, World, open_world
from torchtitan.tasks import TASKS
from torchtitan.timeline import Timeline
from torchtitan.torch_private.dtensor import allocate as allocate_weights


@dataclass(frozen=True)
class Layout:
    """All settings of how a model is distributed and computed."""

    parallelism: ParallelismConfig
    precision: Precision
    cpu_offload: bool
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    loss: LossConfig
    seq_len: int
    local_batch_size: int
    convert: tuple[ConverterConfig, ...] = ()
    auxiliary_losses: tuple[AuxiliaryLossConfig, ...] = ()
    sharding: ShardingConfig = field(default_factory=FSDP2)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)

    @property
    def reshard(self) -> ReshardPolicy:
        """Policy in effect: a pipeline stage stays gathered, since microbatches use it in turn."""
        chosen = self.parallelism
        default = chosen.fsdp_reshard_after_forward == "default"
        in_pipeline = chosen.pipeline_parallel_degree > 1
        return "never" if in_pipeline and default else chosen.fsdp_reshard_after_forward

    def shards(self, degrees: Degrees) -> bool:
        """Whether parameters are gathered and reduced: over data ranks, or from host memory."""
        return degrees.dp_replicate * degrees.fsdp > 1 or self.cpu_offload


def build_model(
    config: ModelConfig, args: Any, layout: Layout, world: World, timeline: Timeline, seed: int
) -> ParallelModel:
    """Build the network without memory, parallelize it, then fill in only this rank's parts."""
    model = build_on_meta(config, args, layout, world, timeline)
    allocate(model, layout, world)
    rule = partial(MODELS[config.name].initial, args)
    for part in model.parts:
        initialize(part.named_parameters(), rule, seed)
    return model


def build_on_meta(
    config: ModelConfig, args: Any, layout: Layout, world: World, timeline: Timeline
) -> ParallelModel:
    """Return the network in this layout, still on the meta device."""
    spec, dtype, chosen = MODELS[config.name], layout.precision.compute, layout.parallelism
    network = build_empty(spec.build, args, layout.seq_len, layout.precision.parameters)
    logger.info(
        "%s %s: %s, computed in %s, on %d x %s",
        config.name,
        config.flavor,
        parameters_in_words(network),
        str(dtype).removeprefix("torch."),
        world.size,
        world.device.name,
    )
    shape = spec.attention(args)
    if mask := attention.describe(
        shape.window_in(layout.seq_len) if shape else 0,
        world.device.type,
        dtype,
        shape.head_dim if shape else 0,
        separates_documents=config.separates_documents,
        is_mixed=shape is not None and shape.is_mixed,
        has_sinks=shape is not None and shape.has_sinks,
    ):
        logger.info("attention: %s", mask)
    if world.degrees.pp > 1:
        microbatches = chosen.microbatches(layout.local_batch_size)
        logger.info("%s", stages.describe(chosen, len(spec.blocks(network)), microbatches))
    return parallelize(network, spec, args, layout, world, timeline)


def allocate(model: ParallelModel, layout: Layout, world: World) -> None:
    """Allocate the parts of a model, uninitialized, and fill their buffers."""
    device = world.device.torch_device
    for part in model.parts:
        allocate_weights(part, "cpu" if layout.cpu_offload else device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()  # type: ignore[operator]


def build_optimizers(
    config: OptimizerConfig,
    model: ParallelModel,
    spec: ModelSpec[Args],
    args: Args,
    compiling: CompileConfig,
) -> Optimizers:
    """Build the optimizers of this rank's parts of a model."""
    return open_optimizers(
        name_parameters(
            model.parts, spec.role, partial(spec.heads, args), partial(spec.growth, args)
        ),
        config,
        model.world.groups["pp"],
        model.world.device,
        partial(compile.compiled, config=compiling) if compiling.enable else None,
    )


def parallelize(
    model: nn.Module,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    timeline: Timeline,
    plan: Stages | None = None,
) -> ParallelModel:
    """Apply every technique of the layout to `model`; `timeline` measures forward and backward.

    `plan` cuts the model into stages, by default as the recipe says.

    The order is policy: convert, cut into stages, split over tensor ranks, place experts,
    recompute, compile, shard. Recomputation is thus compiled, and both are inside the unit of
    gathers and reductions.
    """
    chosen, degrees, shards = layout.parallelism, world.degrees, layout.shards(world.degrees)
    splits_stream = degrees.tp > 1 and not chosen.disable_sequence_parallel
    stream = world.groups["tp"] if splits_stream else None
    compile.prepare(layout.compile)
    if layout.convert:
        shared = {axis: world.groups[axis] for axis in ("cp", "tp") if getattr(degrees, axis) > 1}
        convert.apply(model, layout.convert, world.device.capability, shards, shared)
    if degrees.cp > 1:
        rotation = chosen.context_parallel_rotate_method
        context.apply(model, world.groups["cp"], rotation, chosen.balancing)
    if chosen.enable_async_tensor_parallel:
        async_tensor.enable(world.groups["tp"])
    degree = chosen.expert_parallel_degree
    expert_mesh = world.expert_mesh(degree) if degree > 1 else None
    order = list(spec.all_blocks(model))
    names = [each.name for each in auxiliary_losses(model)]
    auxiliary = AuxiliaryLosses(names, [each for each in layout.auxiliary_losses if each.reported])
    sharding = open_sharding(spec, args, layout, world, order[-1], expert_mesh)
    plan = plan or stages.plan(chosen, spec, args, model, layout.seq_len)
    parts = [stages.build(model, plan, stage) for stage in plan.of(world.stage_rank)]
    for part in parts:
        blocks = spec.all_blocks(part)
        if degrees.tp > 1:
            tensor.apply(
                part,
                spec.tensor_plan,
                world.parameter_mesh["tp"],
                sequence_parallel=not chosen.disable_sequence_parallel,
                loss_parallel=not chosen.disable_loss_parallel,
            )
        if expert_mesh is not None:
            expert_parallel.apply(part, expert_mesh)
        if layout.loss.vocabulary_chunk:
            loss.apply(
                part,
                layout.loss,
                spec.shapes(args, layout.seq_len).outputs[-1],
                world.parameter_mesh["tp"] if degrees.tp > 1 else None,
                sequence_parallel=not chosen.disable_sequence_parallel,
                compile_config=layout.compile,
                auxiliary=auxiliary,
            )
        for added in layout.auxiliary_losses:
            sequence = world.groups["cp"] if degrees.cp > 1 else None
            added.distribute(part, sequence, chosen.balancing, stream)
        is_compiled = layout.compile.compiles("model")
        activation_checkpoint.apply(
            blocks, order, layout.activation_checkpoint, is_compiled=is_compiled
        )
        if is_compiled:
            options = sharding.compile_options(blocks, stages.units(spec, part))
            in_one = layout.compile.granularity == "model"
            compile.apply([part] if in_one else blocks.values(), layout.compile, options)
        if shards:
            sharding.apply(part, blocks)
        elif layout.precision.casts:
            compute_in(part, layout.precision.compute)
    blocks_of_parts = [block for part in parts for block in spec.all_blocks(part).values()]
    auxiliary.attach(parts, blocks_of_parts, stream)
    return _model(parts, plan, auxiliary, spec, args, layout, world, sharding, timeline)


def open_sharding(
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    last_block: str,
    expert_mesh: DeviceMesh | None,
) -> Sharding:
    """Open the sharding of a model on `world`.

    Args:
        last_block: name of the model's last block.
        expert_mesh: mesh of experts (`World.expert_mesh`), if ranks have different ones.
    """
    # Context parallelism sends all heads together, so they cannot be divided.
    has_heads = bool(spec.tensor_plan) and world.degrees.cp == 1
    in_backward = layout.communication.replicas.in_backward
    mesh = world.data_mesh if in_backward else world.parameter_mesh["fsdp"]
    *copies, _ = mesh.mesh_dim_names or ()
    target = ShardingTarget(
        mesh=mesh,
        expert_mesh=expert_mesh[*copies, "efsdp"] if expert_mesh is not None else None,
        tensor_mesh=world.parameter_mesh["tp"],
        precision=layout.precision,
        reshard=layout.reshard,
        last_block=last_block,
        ends=spec.ends(args),
        compile=layout.compile,
        communication=layout.communication,
        cpu_offload=layout.cpu_offload,
        device_type=world.device.type,
        tensor_plan=spec.tensor_plan,
        heads=math.gcd(*spec.tensor_splits(args).heads.values()) or 1 if has_heads else 1,
        vocabulary_chunk=layout.loss.vocabulary_chunk,
    )
    return layout.sharding.open(target)


def _model(
    parts: list[nn.Module],
    plan: Stages,
    auxiliary: AuxiliaryLosses,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    sharding: Sharding,
    timeline: Timeline,
) -> ParallelModel:
    """Return the model of these parts, with the calls around its passes in order."""
    chosen, degrees, replicated = layout.parallelism, world.degrees, layout.communication.replicas
    sample, computes_loss = spec.shapes(args, layout.seq_len), bool(layout.loss.vocabulary_chunk)
    is_split = degrees.tp > 1 and not chosen.disable_loss_parallel
    group = world.groups["tp"] if is_split else None
    loss_of_outputs = None
    if not computes_loss:
        loss_of_outputs = loss.of_outputs(
            TASKS[spec.task], group, sample.outputs[-1], layout.compile, auxiliary
        )
    runs_apart = replicated.runs_apart and degrees.dp_replicate > 1
    model = (LocallyUpdatedModel if runs_apart else ParallelModel)(
        parts, loss_of_outputs, sharding, auxiliary, world, timeline
    )
    if degrees.cp > 1:
        model.shard_batch = partial(
            context.shard,
            rank=dist.get_rank(world.groups["cp"]),
            size=degrees.cp,
            balancing=chosen.balancing,
            window=shape.window if (shape := spec.attention(args)) else 0,
        )
    if degrees.pp > 1:
        model.pipeline = Pipeline(
            parts,
            plan,
            world.groups["pp"],
            chosen,
            microbatches=chosen.microbatches(layout.local_batch_size),
            seq_len=layout.seq_len,
            shapes=lambda seq_len: Shapes.of(
                chosen,
                spec.shapes(args, seq_len),
                plan,
                layout.precision.compute,
                world,
                has_outputs=not computes_loss,
            ),
            loss=loss_of_outputs,
            device=world.device.torch_device,
            timeline=timeline,
        )
    if layout.convert:
        model.before_pass.append(partial(convert.before_pass, layout.convert, parts))
    if degrees.tp > 1:
        model.complete_gradients.append(partial(tensor.complete_gradients, parts))
    if layout.shards(degrees):
        model.complete_gradients.append(sharding.complete_gradients)
    if degrees.dp_replicate > 1:
        device = torch.device("cpu") if layout.cpu_offload else world.device.torch_device
        replicas = open_replicas(replicated, parts, world.groups["dp_replicate"], device)
        if replicas:
            model.replicas = replicas
            model.before_pass.append(replicas.before_pass)
            model.complete_gradients.append(replicas.complete_gradients)
    return model

"""Turns a single-device model into this rank's part of a parallel run, in one explicit order."""

from functools import partial

import torch.distributed as dist
from torch import nn

from torchtitan import convert
from torchtitan.models.output import auxiliary_losses
from torchtitan.models.spec import Args, ModelSpec
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
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.parallel_model import Losses, ParallelModel
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.replication import LocallyUpdatedModel
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.sharding import (
    FSDP2,
    SHARDING,
    Precision,
    Sharding,
    ShardingConfig,
    casting,
)
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.world import RANK_ROLE, CommConfig, Degrees, Launch, World, open_world
from torchtitan.timeline import Timeline

__all__ = [
    "FSDP2",
    "RANK_ROLE",
    "SHARDING",
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "Degrees",
    "Launch",
    "Layout",
    "Losses",
    "ParallelModel",
    "ParallelismConfig",
    "Precision",
    "ShardingConfig",
    "World",
    "open_world",
    "parallelize",
]


def parallelize(
    model: nn.Module,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    timeline: Timeline,
    plan: Stages | None = None,
) -> ParallelModel:
    """Apply every technique to `model`, in order; `timeline` measures forward and backward.

    `plan` cuts the model into stages, by default as the recipe says.

    The order is policy: convert, cut into stages, split over tensor ranks, place experts,
    recompute, compile, shard. Recomputation is thus compiled, and both are inside the unit of
    gathers and reductions.
    """
    chosen, degrees, shards = layout.parallelism, world.degrees, layout.shards(world.degrees)
    tensor_mesh = world.parameter_mesh["tp"] if degrees.tp > 1 else None
    splits_stream = degrees.tp > 1 and not chosen.disable_sequence_parallel
    stream = world.groups["tp"] if splits_stream else None
    compile.prepare(layout.compile)
    shared = {axis: world.groups[axis] for axis in ("cp", "tp") if getattr(degrees, axis) > 1}
    convert.apply(model, layout.convert, world.device.capability, shards, shared)
    if degrees.cp > 1:
        rotation = chosen.context_parallel_rotate_method
        context.apply(model, world.groups["cp"], rotation, chosen.balancing)
    if chosen.enable_async_tensor_parallel:
        async_tensor.enable(world.groups["tp"])
    expert_mesh = None
    if (degree := chosen.expert_parallel_degree) > 1:
        expert_mesh = world.expert_mesh(degree)
    order = list(spec.all_blocks(model))
    names = [each.name for each in auxiliary_losses(model)]
    auxiliary = AuxiliaryLosses(names, [each for each in layout.auxiliary_losses if each.reported])
    sharding = layout.open_sharding(world, spec, args, order[-1], expert_mesh)
    plan = plan or stages.plan(chosen, spec, args, model, layout.seq_len)
    parts = [stages.build(model, plan, stage) for stage in plan.of(world.stage_rank)]
    for part in parts:
        blocks = spec.all_blocks(part)
        if tensor_mesh is not None:
            tensor.apply(
                part,
                spec.tensor_plan,
                tensor_mesh,
                sequence_parallel=not chosen.disable_sequence_parallel,
                loss_parallel=not chosen.disable_loss_parallel,
            )
        if expert_mesh is not None:
            expert_parallel.apply(part, expert_mesh)
        if layout.loss.vocabulary_chunk:
            loss.apply(
                part,
                layout.loss,
                layout.sample(spec, args).outputs[-1],
                tensor_mesh,
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
        options = sharding.compile_options(blocks, stages.units(spec, part))
        in_one = layout.compile.granularity == "model"
        compile.apply([part] if in_one else blocks.values(), layout.compile, options)
        if shards:
            sharding.apply(part, blocks)
        elif layout.precision.casts:
            casting.compute_in(part, layout.precision.compute)
    blocks_of_parts = [block for part in parts for block in spec.blocks(part).values()]
    auxiliary.attach(parts, blocks_of_parts, stream)
    return _model(parts, plan, auxiliary, spec, args, layout, world, sharding, timeline)


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
    degrees, replicas = world.degrees, layout.open_replicas(world, parts)
    runs_apart = layout.communication.replicas.runs_apart and degrees.dp_replicate > 1
    loss_of_outputs = layout.loss_of_outputs(world, spec, args, auxiliary)
    model = (LocallyUpdatedModel if runs_apart else ParallelModel)(
        parts,
        loss_of_outputs,
        partial(
            context.shard,
            rank=dist.get_rank(world.groups["cp"]),
            size=degrees.cp,
            balancing=layout.parallelism.balancing,
            window=shape.window if (shape := spec.attention(args)) else 0,
        ),
        sharding,
        auxiliary,
        world,
        timeline,
        replicas=replicas,
    )
    if degrees.pp > 1:
        model.pipeline = Pipeline(
            parts,
            plan,
            world.groups["pp"],
            layout.parallelism,
            microbatches=layout.parallelism.microbatches(layout.local_batch_size),
            shapes=layout.shapes(world, spec, args, plan),
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
    if replicas:
        model.before_pass.append(replicas.before_pass)
        model.complete_gradients.append(replicas.complete_gradients)
    return model

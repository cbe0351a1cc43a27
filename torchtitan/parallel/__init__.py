"""Turns a single-device model into this rank's part of a parallel run, in one explicit order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from torchtitan.parallel.executor import Executor, Losses, SingleStage
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.pipeline import Pipeline
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
from torchtitan.parallel.technique import Converters, Technique
from torchtitan.parallel.world import RANK_ROLE, CommConfig, Degrees, Launch, World, open_world
from torchtitan.tasks import Batch
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
    "ParallelModel",
    "ParallelismConfig",
    "Precision",
    "ShardingConfig",
    "World",
    "open_world",
    "parallelize",
]


@dataclass(frozen=True)
class ParallelModel:
    """This rank's parts of the model, and the passes through them."""

    parts: list[nn.Module]
    executor: Executor
    shard_batch: Callable[[Batch], Batch]
    """Returns this rank's shard of a batch of whole sequences."""
    techniques: Sequence[Technique]
    """Enabled techniques, in the order in which their hooks run."""
    auxiliary: AuxiliaryLosses

    def forward_backward(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        """Run forward and backward for the microbatches of one step, accumulating gradients.

        Args:
            batches: this rank's microbatches, of whole sequences.
            count: number of units in the global batch (0-d).

        Returns:
            This rank's shares of the global means of the losses.
        """
        for technique in self.techniques:
            technique.before_pass()
        shares = self.executor.forward_backward(
            [self.shard_batch(batch) for batch in batches], count
        )
        for technique in self.techniques:
            technique.after_backward()
        return shares

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return this rank's share of the sum of the main loss over `batches` (0-d).

        Expects as many batches as in a training step, each of the same size.
        """
        for technique in self.techniques:
            technique.before_pass()
        total = self.executor.evaluate([self.shard_batch(batch) for batch in batches])
        for technique in self.techniques:
            technique.after_evaluate()
        return total

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor | None:
        """Return the model's outputs for a batch; all ranks call it together.

        None if no rank has the whole outputs, as in a pipeline.
        """
        for technique in self.techniques:
            technique.before_pass()
        outputs = self.executor.outputs(self.shard_batch(batch))
        for technique in self.techniques:
            technique.after_evaluate()
        return outputs

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state of all techniques on this rank, by name."""
        return {name: t for technique in self.techniques for name, t in technique.state().items()}

    def start_over(self) -> None:
        """Reset technique state that no checkpoint provides; all ranks call it together."""
        for technique in self.techniques:
            technique.start_over()

    def confirm(self) -> None:
        """Log what the techniques achieved in the first step; raise if one had no effect."""
        for technique in self.techniques:
            technique.confirm()

    def after_update(self) -> None:
        """Run the hooks of each update, before the weights are read."""
        for technique in self.techniques:
            technique.after_update()

    def after_step(self, step: int, is_last: bool) -> None:
        """Run the hooks that follow each step."""
        for technique in self.techniques:
            technique.after_step(step, is_last)


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
    return ParallelModel(
        parts,
        _executor(parts, plan, auxiliary, spec, args, layout, world, sharding, timeline),
        partial(
            context.shard,
            rank=dist.get_rank(world.groups["cp"]),
            size=degrees.cp,
            balancing=chosen.balancing,
            window=shape.window if (shape := spec.attention(args)) else 0,
        ),
        list(_techniques(parts, plan, spec, layout, world, sharding)),
        auxiliary,
    )


def _techniques(
    parts: list[nn.Module],
    plan: Stages,
    spec: ModelSpec[Args],
    layout: Layout,
    world: World,
    sharding: Sharding,
) -> Iterator[Technique]:
    """Yield the enabled techniques, in the order in which their hooks run."""
    blocks = sum(len(spec.all_blocks(part)) for part in parts)
    if layout.compile.cuda_graphs:
        yield compile.Recorded()
    if layout.convert:
        yield Converters(layout.convert, parts)
    if world.degrees.tp > 1:
        yield tensor.SplitGradients(parts)
    if layout.parallelism.enable_async_tensor_parallel and blocks:
        yield async_tensor.Overlap()
    if layout.shards(world.degrees):
        yield sharding
    yield from layout.open_replicas(world, parts)
    if layout.compile.enable:
        has_loss = plan.ranks[-1] == world.stage_rank
        yield compile.CompileMonitor(layout.compile, blocks, has_loss)


def _executor(
    parts: list[nn.Module],
    plan: Stages,
    auxiliary: AuxiliaryLosses,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    sharding: Sharding,
    timeline: Timeline,
) -> Executor:
    loss_of_outputs = layout.loss_of_outputs(world, spec, args, auxiliary)
    if world.degrees.pp == 1:
        return SingleStage(parts[0], loss_of_outputs, sharding, auxiliary, timeline)
    return Pipeline(
        parts,
        plan,
        world.groups["pp"],
        layout.parallelism,
        microbatches=layout.parallelism.microbatches(layout.local_batch_size),
        shapes=layout.shapes(world, spec, args, plan),
        loss=loss_of_outputs,
        device=world.device.torch_device,
        auxiliary=auxiliary,
        timeline=timeline,
    )

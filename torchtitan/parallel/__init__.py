"""Turns a single-device model into this rank's part of a run, in one visible order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import convert
from torchtitan.convert import ConverterConfig
from torchtitan.data import Batch
from torchtitan.losses import LossConfig
from torchtitan.models.spec import Args, ModelArgs, ModelSpec
from torchtitan.parallel import (
    activation_checkpoint,
    async_tensor,
    bucketing,
    compile,
    context,
    cuda_graphs,
    fsdp,
    loss,
    simple_fsdp,
    stages,
    tensor,
)
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.executor import Executor, SingleStage
from torchtitan.parallel.fsdp import Precision
from torchtitan.parallel.loss import LossFunction
from torchtitan.parallel.pipeline import Pipeline, Shapes
from torchtitan.parallel.settings import ParallelismConfig, ReshardPolicy
from torchtitan.parallel.world import CommConfig, Degrees, Launch, World, open_world
from torchtitan.timeline import Timeline

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "Degrees",
    "Launch",
    "Layout",
    "ParallelModel",
    "ParallelismConfig",
    "Precision",
    "World",
    "open_world",
    "parallelize",
]


@dataclass(frozen=True)
class Layout:
    """Every choice about how a model is laid out and computed."""

    parallelism: ParallelismConfig
    precision: Precision
    cpu_offload: bool
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    loss: LossConfig
    seq_len: int
    local_batch_size: int
    document_mask: bool
    """Whether attention stays within a document."""
    convert: tuple[ConverterConfig, ...] = ()


@dataclass(frozen=True)
class ParallelModel:
    """This rank's parts of the model and what can be done with them."""

    parts: list[nn.Module]
    executor: Executor
    shard_batch: Callable[[Batch], Batch]
    """From whole sequences to this rank's part of them."""
    confirm: Callable[[], None]
    """After a step: fail if what was asked for of the compiler is not so."""
    before_pass: Callable[[], None]
    """What the converters need whenever the weights may have changed."""
    compiler: compile.Watch
    """To be told of every step."""

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Forward and backward of the microbatches of one step; gradients accumulate.

        Args:
            batches: this rank's microbatches, of whole sequences.
            tokens: 0-d, the targets that count in the global batch.

        Returns:
            This rank's share of the global mean loss (0-d, detached): over the ranks of `loss`
            the shares add up to it.
        """
        self.before_pass()
        share = self.executor.forward_backward(
            [self.shard_batch(batch) for batch in batches], tokens
        )
        tensor.redistribute_grads(
            parameter for part in self.parts for parameter in part.parameters()
        )
        return share

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """This rank's share of the sum of the loss over the targets of `batches` (0-d).

        There are as many batches as in a training step, each of the same size.
        """
        self.before_pass()
        return self.executor.evaluate([self.shard_batch(batch) for batch in batches])


def parallelize(
    model: nn.Module,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    world: World,
    timeline: Timeline,
) -> ParallelModel:
    """Apply every technique to `model`, in order; `timeline` is told of forward and backward.

    The order is policy: what is converted is cut, what is cut is split, recomputation is inside
    what is compiled, and both are inside the unit that is gathered and reduced.
    """
    chosen, degrees = layout.parallelism, world.degrees
    compile.prepare(layout.compile)
    convert.apply(model, layout.convert, world.device.capability, _has_work(layout, world))
    if degrees.cp > 1:
        context.apply(
            model,
            world.groups["cp"],
            chosen.context_parallel_rotate_method,
            chosen.context_parallel_load_balancer,
        )
    if chosen.enable_async_tensor_parallel:
        async_tensor.enable(world.groups["tp"])
    order = list(spec.blocks(model))
    plan = stages.plan(chosen, spec, args, model, layout.seq_len)
    mine = plan.of(dist.get_rank(world.groups["pp"]))
    parts = [stages.build(model, plan, stage) for stage in mine]
    loss_of_logits = _loss_of_logits(layout, world, args.vocab_size)
    for part in parts:
        named = spec.blocks(part)
        blocks = list(named.values())
        if degrees.tp > 1:
            tensor.apply(
                part,
                spec.tensor_plan,
                world.parameter_mesh["tp"],
                sequence_parallel=not chosen.disable_sequence_parallel,
                loss_parallel=not chosen.disable_loss_parallel,
            )
        if loss_of_logits is None:
            loss.apply(
                part,
                layout.loss,
                args.vocab_size,
                world.parameter_mesh["tp"] if degrees.tp > 1 else None,
                sequence_parallel=not chosen.disable_sequence_parallel,
                compile_config=layout.compile,
            )
        activation_checkpoint.apply(named, order, layout.activation_checkpoint)
        is_simple = chosen.data_parallel_impl == "simple_fsdp"
        options = None
        if is_simple and layout.compile.compiles("model"):
            plan_of_graphs = _plan_of_graphs(part, spec, layout, world, order[-1])
            options = plan_of_graphs.options()
        in_one = layout.compile.granularity == "model"
        compile.apply([part] if in_one else blocks, layout.compile, options)
        if not _has_work(layout, world):
            continue
        if is_simple:
            tensor_mesh = world.parameter_mesh["tp"]
            simple_fsdp.apply(part, world.data_mesh, tensor_mesh, layout.precision)
        else:
            fsdp.apply(
                part,
                blocks,
                world.data_mesh,
                precision=layout.precision,
                reshard=_reshard(chosen),
                cpu_offload=layout.cpu_offload,
                pin_memory=world.device.type == "cuda",
            )
    executor: Executor
    if degrees.pp > 1:
        executor = Pipeline(
            parts,
            plan,
            world.groups["pp"],
            chosen,
            microbatches=chosen.microbatches(layout.local_batch_size),
            shapes=_shapes(layout, world, args),
            loss=loss_of_logits,
            device=world.device.torch_device,
            document_mask=layout.document_mask,
            timeline=timeline,
        )
    else:
        sharded = fsdp.sharded_modules(parts[0])
        executor = SingleStage(parts[0], loss_of_logits, sharded, layout.document_mask, timeline)
    shard_batch = partial(
        context.shard,
        rank=dist.get_rank(world.groups["cp"]),
        size=degrees.cp,
        balancing=chosen.context_parallel_load_balancer,
    )
    has_loss = len(plan.units) - 1 in mine
    blocks_here = sum(len(spec.blocks(part)) for part in parts)
    return ParallelModel(
        parts,
        executor,
        shard_batch,
        confirm=partial(_confirm, layout, blocks_here),
        before_pass=partial(_before_pass, layout, parts),
        compiler=compile.Watch(layout.compile, blocks_here, has_loss),
    )


def _before_pass(layout: Layout, parts: list[nn.Module]) -> None:
    cuda_graphs.begin_pass(layout.compile)
    convert.before_pass(layout.convert, parts)


def _confirm(layout: Layout, blocks: int) -> None:
    cuda_graphs.confirm(layout.compile)
    if blocks and layout.parallelism.enable_async_tensor_parallel:
        async_tensor.confirm()
    parallelism = layout.parallelism
    if parallelism.data_parallel_impl == "simple_fsdp" and layout.compile.compiles("model"):
        bucketing.confirm(parallelism.simple_fsdp_bucketing)


def _plan_of_graphs(
    part: nn.Module, spec: ModelSpec[Args], layout: Layout, world: World, last: str
) -> bucketing.Plan:
    """What to do to the graphs of a part under `simple_fsdp`; `last` is the model's last block."""
    chosen, mesh = layout.parallelism, world.data_mesh
    freed: dict[ReshardPolicy, tuple[str, ...]] = {
        "always": ("",),
        "default": tuple(name for name in spec.blocks(part) if name != last),
        "never": (),
    }
    return bucketing.Plan(
        groups=tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim)),
        units=tuple(stages.units(spec, part)),
        freed=freed[_reshard(chosen)],
        bucketing=chosen.simple_fsdp_bucketing,
        megabytes=chosen.simple_fsdp_bucket_mb,
        device_type=world.device.type,
    )


def _reshard(chosen: ParallelismConfig) -> ReshardPolicy:
    """Under a pipeline a stage is used by one microbatch after the other, so it stays gathered."""
    in_pipeline = chosen.pipeline_parallel_degree > 1
    default = chosen.fsdp_reshard_after_forward == "default"
    return "never" if in_pipeline and default else chosen.fsdp_reshard_after_forward


def _shapes(layout: Layout, world: World, args: ModelArgs) -> Shapes:
    """What this rank has of a pipeline's microbatch."""
    chosen, tp = layout.parallelism, world.degrees.tp
    size, length = chosen.pipeline_parallel_microbatch_size, layout.seq_len // world.degrees.cp
    stream = length if chosen.disable_sequence_parallel else length // tp
    vocabulary = args.vocab_size
    if tp > 1 and not chosen.disable_loss_parallel:
        part = -(-vocabulary // tp)  # all have as many, but the last
        first = part * dist.get_rank(world.groups["tp"])
        vocabulary = min(first + part, vocabulary) - first
    return Shapes(
        tokens=(size, length),
        hidden=(size, stream, args.dim),
        logits=None if layout.loss.vocabulary_chunk else (size, length, vocabulary),
        dtype=layout.precision.compute,
    )


def _loss_of_logits(layout: Layout, world: World, vocabulary: int) -> LossFunction | None:
    if layout.loss.vocabulary_chunk:
        return None
    is_split = world.degrees.tp > 1 and not layout.parallelism.disable_loss_parallel
    mesh = world.parameter_mesh["tp"] if is_split else None
    return loss.of_logits(mesh, vocabulary, layout.compile)


def _has_work(layout: Layout, world: World) -> bool:
    """With one data rank and one dtype there is nothing to gather, to reduce or to cast."""
    precision = layout.precision
    casts = precision.compute != precision.parameters
    return world.data_mesh.size() > 1 or layout.cpu_offload or casts

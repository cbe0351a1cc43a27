"""The layout of a model: all settings of its parallelism, and properties derived from several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.auxiliary_losses import AuxiliaryLossConfig
from torchtitan.comm import CommunicationConfig
from torchtitan.convert import ConverterConfig
from torchtitan.losses import LossConfig
from torchtitan.models.spec import Args, ModelSpec, SampleShapes
from torchtitan.parallel import loss
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.pipeline import Shapes
from torchtitan.parallel.replication import Replicas, open_replicas
from torchtitan.parallel.settings import ParallelismConfig, Precision, ReshardPolicy
from torchtitan.parallel.sharding import FSDP2, Sharding, ShardingConfig, ShardingTarget
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.work import Work
from torchtitan.parallel.world import Degrees, World
from torchtitan.tasks import TASKS
from torchtitan.tasks.task import LossFunction


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

    def work(self, spec: ModelSpec[Args], args: Args, degrees: Degrees, passes: int) -> Work:
        """Return the work of a step with this number of `passes`, for estimates."""
        return Work(
            spec=spec,
            args=args,
            degrees=degrees,
            passes=passes,
            local_batch_size=self.local_batch_size,
            seq_len=self.seq_len,
            parallelism=self.parallelism,
            precision=self.precision,
            communication=self.communication,
            recomputation=self.activation_checkpoint,
            reshard=self.reshard,
            shards=self.shards(degrees),
            logits_in_chunks=bool(self.loss.vocabulary_chunk),
        )

    def open_sharding(
        self,
        world: World,
        spec: ModelSpec[Args],
        args: Args,
        last_block: str,
        expert_mesh: DeviceMesh | None,
    ) -> Sharding:
        """Open the sharding on `world`.

        Args:
            last_block: name of the model's last block.
            expert_mesh: mesh of experts (`World.expert_mesh`), if ranks have different ones.
        """
        # Context parallelism sends all heads together, so they cannot be divided.
        has_heads = bool(spec.tensor_plan) and world.degrees.cp == 1
        in_backward = self.communication.replicas.in_backward
        mesh = world.data_mesh if in_backward else world.parameter_mesh["fsdp"]
        *copies, _ = mesh.mesh_dim_names or ()
        target = ShardingTarget(
            mesh=mesh,
            expert_mesh=expert_mesh[*copies, "efsdp"] if expert_mesh is not None else None,
            tensor_mesh=world.parameter_mesh["tp"],
            precision=self.precision,
            reshard=self.reshard,
            last_block=last_block,
            ends=spec.ends(args),
            compile=self.compile,
            communication=self.communication,
            cpu_offload=self.cpu_offload,
            device_type=world.device.type,
            tensor_plan=spec.tensor_plan,
            heads=math.gcd(*spec.tensor_splits(args).heads.values()) or 1 if has_heads else 1,
            vocabulary_chunk=self.loss.vocabulary_chunk,
        )
        return self.sharding.open(target)

    def open_replicas(self, world: World, parts: Sequence[nn.Module]) -> Replicas | None:
        """Return the synchronization of replicas of `parts`, if any is needed."""
        device = torch.device("cpu") if self.cpu_offload else world.device.torch_device
        config, group = self.communication.replicas, world.groups["dp_replicate"]
        return open_replicas(config, parts, group, device)

    def sample(self, spec: ModelSpec[Args], args: Args) -> SampleShapes:
        """Return the shapes of a whole sample."""
        return spec.shapes(args, self.seq_len)

    def loss_of_outputs(
        self, world: World, spec: ModelSpec[Args], args: Args, auxiliary: AuxiliaryLosses
    ) -> LossFunction | None:
        """Return the loss of the model's outputs; None if the model computes its own."""
        if self.loss.vocabulary_chunk:
            return None
        is_split = world.degrees.tp > 1 and not self.parallelism.disable_loss_parallel
        mesh = world.parameter_mesh["tp"] if is_split else None
        size = self.sample(spec, args).outputs[-1]
        return loss.of_outputs(TASKS[spec.task], mesh, size, self.compile, auxiliary)

    def shapes(self, world: World, spec: ModelSpec[Args], args: Args, stages: Stages) -> Shapes:
        """Return the shapes of this rank's part of a pipeline's microbatch."""
        chosen, tp, cp = self.parallelism, world.degrees.tp, world.degrees.cp
        size, sample = chosen.pipeline_parallel_microbatch_size, self.sample(spec, args)
        stream = cp if chosen.disable_sequence_parallel else cp * tp
        *outputs, last = sample.outputs
        if tp > 1 and not chosen.disable_loss_parallel:
            part = -(-last // tp)  # the last rank may have fewer
            first = part * dist.get_rank(world.groups["tp"])
            last = min(first + part, last) - first
        return Shapes(
            inputs=(size, *_part(sample.inputs, cp)),
            input_dtype=sample.input_dtype,
            hidden=tuple((size, *_part(sample.after(unit[-1]), stream)) for unit in stages.units),
            outputs=None if self.loss.vocabulary_chunk else (size, *_part((*outputs, last), cp)),
            dtype=self.precision.compute,
            extra_hidden=sample.extra_hidden,
        )


def _part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of a sample whose positions, its first dim, are split over `ranks`."""
    return (shape[0] // ranks, *shape[1:])

"""The `[parallelism]` section of a recipe, and the dtypes of a run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from torchtitan.config import Config, Context, Problem
from torchtitan.parallel.world import Degrees

ReshardPolicy = Literal["default", "always", "never"]
Rotation = Literal["allgather", "ring", "ulysses"]
Balancing = Literal["headtail", "documents", "none"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run: of stored parameters, of computation, and of gradient reduction."""

    parameters: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def casts(self) -> bool:
        """Whether parameters are used in a different dtype from the stored one."""
        return self.compute != self.parameters


class ParallelismConfig(Config):
    """Parallelism: the number of ranks of each technique, and its options."""

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Number of replicas of the model: DDP alone, HSDP together with sharding."""
    data_parallel_shard_degree: int = Field(-1, ge=-1)
    """Number of shards of the parameters (FSDP); -1: all remaining ranks."""
    fsdp_reshard_after_forward: ReshardPolicy = "default"
    """When a block's parameters are freed after its forward: always, never, or default (after all
    blocks but the last, and never in a pipeline)."""
    tensor_parallel_degree: int = Field(1, ge=1)
    """Number of ranks that share each matrix."""
    disable_sequence_parallel: bool = False
    """Keep full activations between the matrices on every tensor-parallel rank, instead of sharding
    them along the sequence."""
    disable_loss_parallel: bool = False
    """Gather the logits, instead of computing the loss on sharded logits."""
    enable_async_tensor_parallel: bool = False
    """Overlap the communication of tensor parallelism with its matrix products, by SymmetricMemory;
    needs CUDA and compile.enable."""
    pipeline_parallel_degree: int = Field(1, ge=1)
    """Number of ranks in the pipeline."""
    pipeline_parallel_schedule: str = "1F1B"
    """Order of the microbatches: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble or DualPipeV."""
    pipeline_parallel_schedule_csv: str = ""
    """CSV file with a custom schedule, one row per rank; replaces pipeline_parallel_schedule."""
    pipeline_parallel_microbatch_size: int = Field(1, ge=1)
    """Number of sequences in a pipeline microbatch."""
    pipeline_parallel_layers_per_stage: int | None = Field(None, ge=1)
    """Maximum number of layers in a stage, which determines the number of stages (default: one
    stage per rank, or two with interleaved schedules)."""
    pipeline_parallel_balance: Literal["flops", "parameters"] = "flops"
    """Cost that is balanced between the stages."""
    pipeline_parallel_embedding_weight: float | None = Field(None, ge=0)
    """Cost of the embedding, in layers (default: computed)."""
    pipeline_parallel_head_weight: float | None = Field(None, ge=0)
    """Cost of norm and output, in layers (default: computed)."""
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] = ()
    """Names of the modules of each stage, in order, instead of the automatic split."""
    expert_parallel_degree: int = Field(1, ge=1)
    """Number of neighboring ranks over which experts are distributed: a divisor of model.n_experts
    and of data_parallel_shard_degree x context_parallel_degree."""
    context_parallel_degree: int = Field(1, ge=1)
    """Number of ranks that share a sequence."""
    context_parallel_rotate_method: Rotation = "allgather"
    """Exchange of keys and values. allgather: all at once; ring: from rank to rank (ring
    attention); ulysses: queries too, so that each rank has some of the heads of whole sequences."""
    context_parallel_load_balancer: Balancing = "headtail"
    """Each rank's part of a sequence. headtail: a chunk from its head and the mirrored chunk from
    its tail, so that all ranks have the same work under the causal mask; documents: pieces whose
    documents cause equal work (with attn_mask_type = block_causal); none: one contiguous chunk.
    With ulysses it has no effect, since all ranks have the same work."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.data_parallel_shard_degree == 0:
            message = "wanted -1 (all remaining ranks) or an integer >= 1"
            yield Problem("data_parallel_shard_degree", message)
        key = "context_parallel_load_balancer"
        if key in self.model_fields_set and self.balancing != getattr(self, key):
            message = (
                'it has no effect with self.context_parallel_rotate_method = "ulysses", where all '
                "ranks have the same work"
            )
            yield Problem(key, message, ("context_parallel_rotate_method",), "note")
        key = "enable_async_tensor_parallel"
        if self.enable_async_tensor_parallel and self.tensor_parallel_degree == 1:
            message = "self.tensor_parallel_degree is 1, so there is nothing to overlap"
            yield Problem(key, message, ("tensor_parallel_degree",))
        if self.enable_async_tensor_parallel and self.disable_sequence_parallel:
            message = (
                "it overlaps the all-gathers and reduce-scatters of sequence parallelism; set "
                "self.disable_sequence_parallel = false"
            )
            yield Problem(key, message, ("disable_sequence_parallel",))
        on_cpu = context.world.is_here and context.world.device_type == "cpu"
        if self.enable_async_tensor_parallel and on_cpu:
            message = "SymmetricMemory does not support a CPU; use it on CUDA, or set it to false"
            yield Problem(key, message)

    @property
    def balancing(self) -> Balancing:
        """Partitioning of sequences in effect: with Ulysses, contiguous parts."""
        is_ulysses = self.context_parallel_rotate_method == "ulysses"
        return "none" if is_ulysses else self.context_parallel_load_balancer

    @property
    def least_ranks(self) -> int:
        """Minimum number of ranks that the degrees require."""
        one = self.pipeline_parallel_degree * self.context_parallel_degree
        one *= self.tensor_parallel_degree * self.data_parallel_replicate_degree
        return one * self.least_shards

    @property
    def least_shards(self) -> int:
        """Minimum of data_parallel_shard_degree that the other degrees require."""
        if self.data_parallel_shard_degree != -1:
            return max(self.data_parallel_shard_degree, 1)
        experts = self.expert_parallel_degree
        return experts // math.gcd(experts, self.context_parallel_degree)

    @property
    def has_outputs(self) -> bool:
        """Whether a rank has the model's whole outputs for its samples."""
        whole = self.tensor_parallel_degree == 1 or self.disable_loss_parallel
        return whole and self.pipeline_parallel_degree == 1

    def microbatches(self, local_batch_size: int) -> int:
        """Return the number of microbatches between the filling and draining of a pipeline."""
        return local_batch_size // self.pipeline_parallel_microbatch_size

    def degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes for `world_size` ranks; -1 is resolved (0 if impossible)."""
        fixed = (
            self.pipeline_parallel_degree
            * self.data_parallel_replicate_degree
            * self.context_parallel_degree
            * self.tensor_parallel_degree
        )
        shard = self.data_parallel_shard_degree
        return Degrees(
            pp=self.pipeline_parallel_degree,
            dp_replicate=self.data_parallel_replicate_degree,
            dp_shard=world_size // fixed if shard == -1 else shard,
            cp=self.context_parallel_degree,
            tp=self.tensor_parallel_degree,
        )

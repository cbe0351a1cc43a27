"""The `[parallelism]` section of a recipe."""

from typing import Literal

from pydantic import Field

from torchtitan.config import Config
from torchtitan.parallel.world import Degrees

ReshardPolicy = Literal["default", "always", "never"]
Rotation = Literal["allgather", "ring"]
Balancing = Literal["headtail", "none"]


class ParallelismConfig(Config):
    """How many ranks each technique uses, and how."""

    data_parallel_replicate_degree: int = Field(
        1, ge=1, description="Copies of the model: DDP alone, HSDP together with sharding."
    )
    data_parallel_shard_degree: int = Field(
        -1, ge=-1, description="Parts the parameters are split into (FSDP); -1: all ranks left."
    )
    fsdp_reshard_after_forward: ReshardPolicy = Field(
        "default",
        description="Free a block's parameters after its forward: always, never, or (default) "
        "for all blocks but the last, and for none under a pipeline.",
    )
    tensor_parallel_degree: int = Field(1, ge=1, description="Ranks that share each matrix.")
    disable_sequence_parallel: bool = Field(
        False,
        description="Keep the activations between the matrices whole on every tensor rank, "
        "instead of a part of the sequence each.",
    )
    disable_loss_parallel: bool = Field(
        False, description="Gather the logits instead of sharing the loss over tensor ranks."
    )
    enable_async_tensor_parallel: bool = Field(
        False,
        description="Overlap the communication of tensor parallelism with its matrix products, "
        "by SymmetricMemory; needs CUDA and compile.enable.",
    )
    pipeline_parallel_degree: int = Field(1, ge=1, description="Ranks in the pipeline.")
    pipeline_parallel_schedule: str = Field(
        "1F1B",
        description="Order of the microbatches: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, "
        "InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.",
    )
    pipeline_parallel_schedule_csv: str = Field(
        "", description="File with an order of your own, a row a rank; instead of a schedule."
    )
    pipeline_parallel_microbatch_size: int = Field(
        1, ge=1, description="Sequences in a pipeline microbatch."
    )
    pipeline_parallel_layers_per_stage: int | None = Field(
        None,
        ge=1,
        description="Layers in a stage, at most, which decides the number of stages; absent: one "
        "stage a rank, or two with the schedules that interleave several.",
    )
    pipeline_parallel_balance: Literal["flops", "parameters"] = Field(
        "flops", description="What the stages should have about equally much of."
    )
    pipeline_parallel_embedding_weight: float | None = Field(
        None, ge=0, description="Cost of the embedding in layers; absent: by what is balanced."
    )
    pipeline_parallel_head_weight: float | None = Field(
        None, ge=0, description="Cost of norm and output in layers; absent: by what is balanced."
    )
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] = Field(
        (),
        description="The modules of each stage by name, in order, instead of the automatic cut.",
    )
    context_parallel_degree: int = Field(1, ge=1, description="Ranks that share a sequence.")
    context_parallel_rotate_method: Rotation = Field(
        "allgather",
        description="How the keys and values of the other ranks arrive: all at once, or one "
        "rank's after the other around a ring.",
    )
    context_parallel_load_balancer: Balancing = Field(
        "headtail",
        description="headtail: each rank takes a part from the sequence's head and its mirror "
        "from the tail, so that the causal mask leaves all the same work; none: one part.",
    )

    def microbatches(self, local_batch_size: int) -> int:
        """How many pass through a pipeline between its filling and its draining."""
        return local_batch_size // self.pipeline_parallel_microbatch_size

    def degrees(self, world_size: int) -> Degrees:
        """The sizes of all axes for `world_size` ranks, -1 resolved (to 0 if it cannot be)."""
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

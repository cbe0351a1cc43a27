"""Checks of features that need a compiled model, or do not work with one."""

from collections.abc import Iterator

from torchtitan.checks.auxiliary import in_graphs
from torchtitan.checks.model import attention_of
from torchtitan.checks.shard_groups import others_in_graph
from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig
from torchtitan.torch_private.compiler import compiles_recomputed_attention

SECTIONS = ("compile", "parallelism", "training", "sharding", "model")
OVERWRITE = (
    "would each overwrite the results of the one before it "
    "(https://github.com/pytorch/pytorch/issues/169545)"
)


def async_tensor_parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the compiler can overlap communication with matrix products."""
    key, c = "parallelism.enable_async_tensor_parallel", job.compile
    if not job.parallelism.enable_async_tensor_parallel:
        return
    if not c.compiles("model"):
        message = (
            'it is done by the compiler, so it needs compile.enable = true with "model" in '
            "compile.components"
        )
        yield Problem(key, message, ("compile",))
    elif c.backend != "inductor":
        message = f'it needs compile.backend = "inductor", not "{c.backend}"'
        yield Problem(key, message, ("compile",))


def recomputation(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the compiler supports the requested recomputation."""
    key, c, p = "activation_checkpoint.mode", job.compile, job.parallelism
    config, also = job.activation_checkpoint, ("activation_checkpoint", *SECTIONS)
    if config.mode == "memory_budget" and not c.compiles("model"):
        message = (
            "the compiler chooses what to keep, so it needs compile.enable = true with "
            '"model" in compile.components'
        )
        yield Problem(key, message, also)
    elif config.mode == "memory_budget" and c.backend == "eager":
        message = 'compile.backend = "eager" does not change the backward; use "inductor"'
        yield Problem(key, message, also)
    # Context parallelism has its own attention operator, which is not affected.
    on_a_mesh = p.tensor_parallel_degree * p.expert_parallel_degree > 1 or job.sharding.in_graph
    on_a_mesh = on_a_mesh and p.context_parallel_degree == 1
    recomputes_attention = config.every > 0 and not config.by_operator
    device_type = world.device_type if world.is_here else "cuda"
    if (
        recomputes_attention
        and on_a_mesh
        and c.compiles("model")
        and not compiles_recomputed_attention(device_type)
    ):
        message = (
            "on a CPU this version of torch cannot compile a block that is split over tensor- or "
            "expert-parallel ranks, or gathered in the graph, and recomputes its attention; "
            'use mode = "selective" with selective_ac_option = "op", or leave "model" out of '
            "compile.components"
        )
        yield Problem(key, message, also)


def cuda_graphs(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that nothing moves or accumulates between two replays of a recorded graph."""
    for message in _unreplayable(job, world) if job.compile.cuda_graphs else ():
        yield Problem("compile.cuda_graphs", message, SECTIONS)


def _unreplayable(job: JobConfig, world: PlannedWorld) -> Iterator[str]:
    c, p, t, degrees = job.compile, job.parallelism, job.training, job.degrees(world.ranks)
    if not c.enable or c.backend != "inductor":
        needs = 'compile.enable = true and compile.backend = "inductor"'
        yield f"it records graphs of the compiler, so it needs {needs}"
    if p.pipeline_parallel_degree > 1:
        yield f"the microbatches of a pipeline {OVERWRITE}"
    elif (accumulation := job.accumulation(degrees)) > 1:
        bigger = "use a larger training.local_batch_size"
        yield f"the {accumulation} microbatches of a step {OVERWRITE}; {bigger}"
    if in_graphs(job):
        yield (
            "the sums of auxiliary losses and loads of experts in graphs of the model move in "
            "each step; remove these losses, or use a dense model"
        )
    if job.model.separates_documents:
        yield (
            "documents start at other tokens in each batch, and a recorded graph repeats those of "
            'its first; use model.attn_mask_type = "causal"'
        )
    elif (shape := attention_of(job)) and (shape.has_sinks or shape.window_in(t.seq_len)):
        use = "a model without sinks" if shape.has_sinks else "model.sliding_window = 0"
        what = "with sinks" if shape.has_sinks else "in a sliding window"
        yield (f"attention {what} makes tensors on the host, which cannot be recorded; use {use}")
    if p.context_parallel_degree > 1 or p.enable_async_tensor_parallel:
        yield (
            "the communication of context and async tensor parallelism has not been tested in "
            "CUDA graphs"
        )
    if t.enable_cpu_offload:
        yield "training.enable_cpu_offload moves the parameters in every step"
    elif degrees.data > 1 and not job.sharding.in_graph:
        yield (
            f"{job.sharding.name} gathers parameters into other memory each time; use "
            f"{others_in_graph()}one data rank"
        )

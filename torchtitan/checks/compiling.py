"""Checks of features that need a compiled model, or do not work with one."""

from collections.abc import Iterator

from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig
from torchtitan.torch_private.compiler import compiles_recomputed_attention

SECTIONS = ("compile", "parallelism", "training", "sharding", "model")


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

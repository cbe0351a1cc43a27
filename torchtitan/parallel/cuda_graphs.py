"""Compiled graphs that are recorded once and replayed, so that no kernel waits for Python.

A recording repeats the same kernels on the same addresses. Inductor copies a batch to where the
recording reads it, but expects parameters to stay where they are; and what a graph gives, gradients
included, lies in memory that the next pass writes again (torch's documentation, "CUDAGraph Trees").
So what moves parameters, or adds up gradients over several passes, is refused.

Written from that documentation: no GPU has run it yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan.logging import logger
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.sharding import ShardingConfig
from torchtitan.parallel.technique import Technique
from torchtitan.torch_private.compiler import compiler_counts

KEY = "compile.cuda_graphs"
OVERWRITE = (
    "would each write over what the one before it left for the step "
    "(https://github.com/pytorch/pytorch/issues/169545)"
)


def problems(
    config: CompileConfig,
    parallelism: ParallelismConfig,
    sharding: ShardingConfig,
    *,
    accumulation: int,
    moves_parameters: bool,
    cpu_offload: bool,
) -> Iterator[tuple[str, str]]:
    """What keeps a recording from being replayed.

    Args:
        accumulation: microbatches in a step.
        moves_parameters: whether data parallelism has anything to gather or to cast.
    """
    if not config.cuda_graphs:
        return
    if not config.enable or config.backend != "inductor":
        needs = 'compile.enable = true and compile.backend = "inductor"'
        yield KEY, f"graphs of the compiler are recorded, so it needs {needs}"
    if parallelism.pipeline_parallel_degree > 1:
        yield KEY, f"the microbatches of a pipeline {OVERWRITE}"
    elif accumulation > 1:
        bigger = "use a larger training.local_batch_size"
        yield KEY, f"the {accumulation} microbatches of a step {OVERWRITE}; {bigger}"
    if parallelism.context_parallel_degree > 1 or parallelism.enable_async_tensor_parallel:
        yield KEY, "nobody has recorded what context or async tensor parallelism sends"
    if cpu_offload:
        yield KEY, "training.enable_cpu_offload moves the parameters in every step"
    elif moves_parameters and not sharding.in_graph:
        yield (
            KEY,
            f"{sharding.name} gathers or casts parameters into other memory each time; use "
            'sharding.name = "simple_fsdp", or one data rank whose '
            "training.mixed_precision_param is training.dtype",
        )


def problems_of_machine(config: CompileConfig, device_type: str) -> Iterator[tuple[str, str]]:
    """What this very machine cannot do."""
    if config.cuda_graphs and device_type != "cuda":
        yield KEY, f"CUDA graphs need a CUDA device; there is none here, but {device_type}"


@dataclass(frozen=True)
class Recorded(Technique):
    """CUDA graphs, if they are on."""

    config: CompileConfig

    def before_pass(self) -> None:
        """Tell that what the last pass gave is read: its memory may be written again.

        Blocks are graphs of their own; left alone, torch would take each of them for a pass.
        """
        if self.config.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def confirm(self) -> None:
        """Warn of graphs that were not recorded."""
        if not self.config.cuda_graphs:
            return
        if skipped := compiler_counts()["inductor"]["cudagraph_skips"]:
            logger.warning(
                "compile: %d times a graph was not recorded as a CUDA graph; "
                "TORCH_LOGS=perf_hints says why",
                skipped,
            )

"""Compiled graphs that are recorded once and replayed, so that no kernel waits for Python.

A recording repeats the same kernels on the same addresses. Inductor copies a batch to where the
recording reads it, but expects parameters to stay where they are; and what a graph gives, gradients
included, lies in memory that the next pass writes again (torch's documentation, "CUDAGraph Trees").
So what moves parameters, or adds up gradients over several passes, is refused.
"""

from dataclasses import dataclass

import torch

from torchtitan.logging import logger
from torchtitan.parallel.technique import Technique
from torchtitan.torch_private.compiler import compiler_counts


@dataclass(frozen=True)
class Recorded(Technique):
    """Passes that are recorded as CUDA graphs."""

    def before_pass(self) -> None:
        """Tell that what the last pass gave is read: its memory may be written again.

        Blocks are graphs of their own; left alone, torch would take each of them for a pass.
        """
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def confirm(self) -> None:
        """Warn of graphs that were not recorded."""
        if skipped := compiler_counts()["inductor"]["cudagraph_skips"]:
            logger.warning(
                "compile: %d times a graph was not recorded as a CUDA graph; "
                "TORCH_LOGS=perf_hints says why",
                skipped,
            )

"""Compiled graphs that are recorded once and replayed, so that no kernel waits for Python.

A recording replays the same kernels on the same addresses. Inductor copies each batch to the
recorded addresses, but expects parameters to keep theirs; and the outputs of a graph, gradients
included, are in memory that the next pass overwrites (torch's documentation, "CUDAGraph Trees").
Features that move parameters, or accumulate gradients over several passes, are therefore refused.
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
        """Mark the outputs of the last pass as consumed: their memory may be overwritten.

        Each block is a graph of its own, which torch would otherwise take for a whole pass.
        """
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def confirm(self) -> None:
        """Warn of graphs that were not recorded."""
        if skipped := compiler_counts()["inductor"]["cudagraph_skips"]:
            logger.warning(
                "compile: %d graphs were not recorded as CUDA graphs; TORCH_LOGS=perf_hints "
                "shows the reasons",
                skipped,
            )

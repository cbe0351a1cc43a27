"""Bounds of a rank's memory by formula, in milliseconds; a plan of its step takes seconds.

Of N parameters a rank holds N / (pp x fsdp x tp), with as many gradients, and the states of its
optimizer (Rajbhandari et al., 2020, arXiv:1910.02054). In addition it keeps activations, logits,
and the parameters that it gathers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchtitan.device import GIB
from torchtitan.optim import OptimizerConfig, name_parameters, state_bytes
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.work import Part, Work

MARGIN = 2
"""Factor of the upper bound, for tensors that only exist for a moment, and for fragments."""
OUTSIDE = 2 * GIB
"""Bytes of the upper bound for libraries."""


class Memory(NamedTuple):
    """Bytes that a rank holds, by purpose."""

    parameters: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    on_host: float = 0.0
    """Part of the above that is in host memory instead of on the device."""

    @property
    def total(self) -> float:
        """Sum of all, in device and host memory."""
        return sum(self[:-1])

    @property
    def on_device(self) -> float:
        """Total in the memory of the device."""
        return self.total - self.on_host


@dataclass(frozen=True)
class MemoryBounds:
    """Bounds of the memory of a rank, and everything that determines them."""

    layout: Layout
    work: Work
    optimizer: OptimizerConfig
    has_states: bool
    """Whether a forward follows an update, which creates the states."""

    @property
    def offloads(self) -> bool:
        """Whether some of it is in host memory."""
        return self.layout.cpu_offload or self.optimizer.offload_states

    def of_samples(self, blocks: Sequence[str]) -> Memory:
        """Return a lower bound of the samples' memory on the average rank, given the blocks."""
        work = self.work
        is_by_block = self.layout.compile.granularity != "model"
        keeps_inputs = is_by_block and work.recomputation.mode != "memory_budget"
        inputs = sum(self._input(before) for before in ("", *blocks[:-1])) if keeps_inputs else 0.0
        logits = self._outputs * work.precision.compute.itemsize
        return Memory(activations=inputs / work.degrees.pp, logits=logits / work.degrees.pp)

    def least(self) -> Memory:
        """Return a lower bound of the memory of the average rank.

        It omits everything that some run could do without, so that no run that fits is refused.
        """
        work, held = self.work, self._held
        average = Memory(*(size / work.degrees.pp for size in held))
        samples = self.of_samples([*work.spec.blocks(work.model)])
        in_step = average._replace(
            gradients=average.gradients if work.passes > 1 else 0.0,
            states=average.states if self.has_states else 0.0,
        )
        placed = self._placed(in_step)
        placed = placed._replace(activations=samples.activations, logits=samples.logits)
        return _fullest([self._placed(average), placed])

    def most(self) -> float:
        """Return an upper bound of the bytes of a rank, on its device and in host memory.

        The rank is taken to run the whole model, to hold all of its parameters gathered, to
        recompute nothing, and to keep the activations of all microbatches.
        """
        work, precision = self.work, self.work.precision
        whole = sum(parameter.numel() for parameter in work.model.parameters())
        whole *= precision.compute.itemsize + precision.reduce.itemsize
        blocks = [*work.spec.all_blocks(work.model)]
        kept = sum(map(self._block, blocks)) + (2 + len(blocks)) * self._input("")
        # Logits in the computed dtype, in float32, their log-softmax, and the gradients of these.
        logits = self._outputs * (2 * precision.compute.itemsize + 12)
        samples = work.microbatches * (kept + logits)
        return MARGIN * (self._held.total + whole / work.degrees.tp + samples) + OUTSIDE

    def _placed(self, held: Memory) -> Memory:
        """Return `held` with its part in host memory set."""
        if self.layout.cpu_offload:
            return held._replace(on_host=held.parameters + held.gradients + held.states)
        return held._replace(on_host=held.states if self.optimizer.offload_states else 0.0)

    @cached_property
    def _outputs(self) -> float:
        """Elements of the logits of a microbatch; 0 if computed in chunks."""
        work = self.work
        ranks = 1 if work.parallelism.disable_loss_parallel else work.degrees.tp
        whole = work.sequences * math.prod(work.shapes.outputs) / work.degrees.cp
        return 0.0 if work.logits_in_chunks else whole / ranks

    def _input(self, before: str) -> float:
        """Return the bytes of a microbatch's hidden states after the module `before`."""
        work = self.work
        hidden = work.sequences * math.prod(work.shapes.after(before)) / work.degrees.cp
        ranks = work.degrees.tp if work.splits_stream else 1
        return hidden / ranks * work.precision.compute.itemsize

    def _block(self, block: str) -> float:
        """Return the bytes that a block keeps of a microbatch without recomputation."""
        work, itemsize = self.work, self.work.precision.compute.itemsize
        of_position = work.spec.kept_by_block(work.args, itemsize, block)
        return work.sequences * work.shapes.after(block)[0] * of_position / work.degrees.cp

    @cached_property
    def _held(self) -> Memory:
        """Parameters, gradients and states of a rank without a pipeline."""
        work, each = self.work, self.work.precision.parameters.itemsize
        part, ranks = Part(work, 0, work.model), work.degrees.fsdp * work.degrees.tp
        share = part.sizes.total() / ranks
        gradients = 0.0 if self.optimizer.early_step_in_backward else share * each
        named = name_parameters([part.module], work.spec.role)
        return Memory(share * each, gradients, state_bytes(self.optimizer, named, each) / ranks)


def _fullest(moments: Iterable[Memory]) -> Memory:
    return max(moments, key=lambda memory: memory.total)

"""Memory of a rank by formula, before a run starts.

Of N parameters a rank holds N / (pp x fsdp x tp), with as many gradients, and the states of its
optimizer (Rajbhandari et al., 2020, arXiv:1910.02054). A block keeps for its backward what
`ModelSpec.kept_by_block` counts for each position of a sample, or less if it is recomputed
(Korthikanti et al., 2022, arXiv:2205.05198), for each microbatch that the pipeline schedule has in
flight. Last are the logits, in the computed dtype and in float32.

`MemoryInputs.least` is a lower bound, which omits everything that some run could do without, so
that no run that fits is refused; `MemoryInputs.estimate` is the peak of an eager run, without
fragmentation and the libraries' own memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchtitan.device import GIB
from torchtitan.optim import OptimizerConfig, name_parameters, state_bytes
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.schedules import in_flight
from torchtitan.parallel.work import Part, Work, largest_block, outside_blocks


class Memory(NamedTuple):
    """Bytes that a rank holds, by purpose."""

    parameters: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    gathered: float = 0.0
    """Parameters and gradients of blocks that are whole during their use."""
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

    def __str__(self) -> str:
        parts = {
            name.replace("states", "optimizer states"): size / GIB
            for name, size in self._asdict().items()
            if name != "on_host" and size >= GIB / 20
        }
        terms = [f"{name} {size:.1f}" for name, size in parts.items()]
        return f"{self.total / GIB:.1f} GiB" + (f" ({' + '.join(terms)})" if terms else "")


@dataclass(frozen=True)
class MemoryInputs:
    """Everything that determines the memory of a rank."""

    layout: Layout
    work: Work
    optimizer: OptimizerConfig
    has_states: bool
    """Whether a forward follows an update, which creates the states."""

    def of_samples(self, blocks: Sequence[str]) -> Memory:
        """Return a lower bound of the samples' memory on the average rank, given the blocks."""
        work = self.work
        is_by_block = self.layout.compile.granularity != "model"
        keeps_inputs = is_by_block and work.recomputation.mode != "memory_budget"
        inputs = sum(self._input(before) for before in ("", *blocks[:-1])) if keeps_inputs else 0.0
        logits = self._outputs * work.precision.compute.itemsize
        return Memory(activations=inputs / work.degrees.pp, logits=logits / work.degrees.pp)

    def least(self) -> Memory:
        """Return a lower bound of the memory of the average rank."""
        work = self.work
        held = self._held([Part(work, 0, work.model)])
        average = Memory(*(size / work.degrees.pp for size in held))
        samples = self.of_samples([*work.spec.blocks(work.model)])
        return _fullest([self._placed(average), self._moment(average, samples, work.passes > 1)])

    def estimate(self) -> Memory:
        """Return the estimated peak of the fullest rank."""
        ranks = range(self.work.degrees.pp)
        return _fullest(_fullest(self.moments(rank)) for rank in ranks)

    def moments(self, stage_rank: int) -> Iterator[Memory]:
        """Yield the moments at which a pipeline rank may reach its peak, the update first."""
        work, parts = self.work, self.work.parts(stage_rank)
        compute, held = work.precision.compute.itemsize, self._held(parts)
        if work.shards:
            held = held._replace(gathered=self.layout.sharding.memory(parts))
        cast = 0.0
        if work.precision.casts and not work.shards:  # the backward reads what was cast
            stage = sum(part.sizes.total() for part in parts)
            is_kept = work.recomputation.mode == "none"
            cast = stage if is_kept else max(largest_block(parts), outside_blocks(parts))
        cast *= compute / work.degrees.tp
        yield self._placed(held)
        of_stage = {part.stage: self._kept(part) for part in parts}
        between = {part.stage: self._between_halves(part) for part in parts}
        blocks = [block for part in parts for block in part.blocks]
        again = max((self._block(each) for each in blocks if self._part(each) < 1), default=0.0)
        last = next((part.stage for part in parts if part.is_last), -1)
        forwards = 0
        for action, kept, half_done in in_flight(work.orders[stage_rank]):
            forwards += action.kind == "F"
            # Logits in the computed dtype, and their log-softmax in float32; at the loss also the
            # logits in float32, and the gradient of the log-softmax.
            logits = (kept[last] - half_done[last]) * (compute + 4)
            logits += 8 * (action.stage == last and action.kind == "F")
            kept_bytes = sum(count * of_stage[stage] for stage, count in kept.items())
            samples = Memory(
                gradients=sum(count * between[stage] for stage, count in half_done.items()),
                activations=kept_bytes + cast + again,
                logits=logits * self._outputs,
            )
            yield self._moment(held, samples, work.passes > 1 or forwards > kept.total())

    def _moment(self, held: Memory, samples: Memory, has_gradients: bool) -> Memory:
        """Return the memory during a forward or backward of a rank that holds `held` at updates."""
        now = self._placed(
            held._replace(
                gradients=held.gradients if has_gradients else 0.0,
                states=held.states if self.has_states else 0.0,
            )
        )
        return now._replace(
            gradients=now.gradients + samples.gradients,
            activations=samples.activations,
            logits=samples.logits,
        )

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

    def _input_of(self, block: str) -> float:
        index = self.work.order.index(block)
        return self._input(self.work.order[index - 1] if index else "")

    def _block(self, block: str) -> float:
        """Return the bytes that a block keeps of a microbatch without recomputation."""
        work, itemsize = self.work, self.work.precision.compute.itemsize
        of_position = work.spec.kept_by_block(work.args, itemsize, block)
        kept = work.sequences * work.shapes.after(block)[0] * of_position
        return max(kept / (work.degrees.cp * work.degrees.tp), self._input_of(block))

    def _part(self, block: str) -> float:
        """Return the fraction of a block that is kept rather than recomputed."""
        config = self.work.recomputation
        if config.mode == "memory_budget":
            return config.memory_budget
        if config.by_operator:
            return 0.5  # every second matrix product
        return 0.0 if block in self.work.recomputed else 1.0

    def _kept(self, part: Part) -> float:
        """Return the bytes that a stage keeps of a microbatch from its forward to its backward."""
        work, itemsize = self.work, self.work.precision.compute.itemsize
        blocks = sum(
            self._part(block) * self._block(block) + (1 - self._part(block)) * self._input_of(block)
            for block in part.blocks
        )
        # Hidden states of later tokens, and activations around the blocks that take them.
        depths = len(work.spec.auxiliary_blocks(part.module))
        around = work.spec.kept_by_block(work.args, itemsize, work.spec.auxiliary or "")
        around *= work.sequences * work.shapes.hidden[0] / work.degrees.cp
        around /= work.degrees.tp if work.splits_stream else 1
        return blocks + work.shapes.extra_hidden * self._input("") + depths * around

    def _between_halves(self, part: Part) -> float:
        """Return the bytes a stage keeps of a microbatch between the halves of its backward.

        They are the gradients of the outputs of all modules with weights, for the weights' own. The
        first stage, whose input needs no gradients, has its backward in one.
        """
        work, degrees = self.work, self.work.degrees
        outputs = sum(len(weight) for weight in part.module.parameters()) if part.stage else 0
        tokens = work.tokens(work.stages.units[part.stage][-1])
        return tokens * outputs / degrees.tp * work.precision.compute.itemsize

    def _held(self, parts: Sequence[Part]) -> Memory:
        """Return the parameters, gradients and states of a rank with these stages."""
        work, each = self.work, self.work.precision.parameters.itemsize
        ranks = work.degrees.fsdp * work.degrees.tp
        share = sum(part.sizes.total() for part in parts) / ranks
        gradients = 0.0 if self.optimizer.early_step_in_backward else share * each
        named = name_parameters([part.module for part in parts], work.spec.role)
        return Memory(share * each, gradients, state_bytes(self.optimizer, named, each) / ranks)


def _fullest(moments: Iterable[Memory]) -> Memory:
    return max(moments, key=lambda memory: memory.total)

"""What a rank holds in memory, by formula, before anything is started.

Of N parameters a rank holds N / (pp x fsdp x tp), with as many gradients, and the states of its
optimizer (Rajbhandari et al., 2020, arXiv:1910.02054). A block keeps for its backward what
`ModelSpec.kept_by_block` counts for each position of a sample, or less where it is recomputed
(Korthikanti et al., 2022, arXiv:2205.05198). The logits come last, in float32 beside the computed.

`Plan.least` leaves out whatever some run could do without, so that nothing that fits is ever
refused; `Plan.estimate` is what an eager run comes to, without fragments and the libraries' own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from torchtitan.device import GIB
from torchtitan.models.spec import ModelSpec
from torchtitan.optim import OptimizerConfig, name_parameters, state_bytes
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.sharding import FSDP2
from torchtitan.parallel.world import Degrees


class Memory(NamedTuple):
    """Bytes that a rank holds, by what they are for."""

    parameters: float
    gradients: float
    states: float
    gathered: float = 0.0
    """Parameters and gradients of blocks that are whole for the time of their use."""
    activations: float = 0.0
    logits: float = 0.0
    on_host: float = 0.0
    """Of all these, what stays in host memory beside a device."""

    @property
    def total(self) -> float:
        """All, wherever it is."""
        return sum(self[:-1])

    def __str__(self) -> str:
        parts = {
            name.replace("states", "optimizer states"): size / GIB
            for name, size in self._asdict().items()
            if name != "on_host" and size >= GIB / 20
        }
        terms = [f"{name} {size:.1f}" for name, size in parts.items()]
        return f"{self.total / GIB:.1f} GiB" + (f" ({' + '.join(terms)})" if terms else "")


class Sizes(NamedTuple):
    """Numbers of parameters."""

    total: int
    blocks: Mapping[str, int]
    """Of each block, by its name."""
    states: float
    """Bytes of the states of all."""
    auxiliary: int = 0
    """Of what auxiliary losses take, which is in no block."""

    @property
    def in_blocks(self) -> int:
        """Of all blocks."""
        return sum(self.blocks.values())


def sizes(
    spec: ModelSpec[Any], network: nn.Module, optimizer: OptimizerConfig, itemsize: int
) -> Sizes:
    """Of a whole network, which may be on the meta device, with parameters of `itemsize` bytes."""

    def count(module: nn.Module) -> int:
        return sum(weight.numel() for weight in module.parameters())

    return Sizes(
        count(network),
        {name: count(block) for name, block in spec.blocks(network).items()},
        state_bytes(optimizer, name_parameters([network], spec.role), itemsize),
        count(getattr(network, spec.auxiliary or "", None) or nn.Module()),
    )


@dataclass(frozen=True)
class Plan:
    """What decides how much memory a rank of a run needs."""

    spec: ModelSpec[Any]
    args: Any
    sizes: Sizes
    layout: Layout
    degrees: Degrees
    optimizer: OptimizerConfig
    accumulates: bool
    """Whether gradients of earlier microbatches are there in a forward."""
    has_states: bool
    """Whether a forward follows an update, which makes the states."""

    def least(self) -> Memory:
        """What the average rank holds at the least."""
        of_samples = _Activations(self)
        share = self.sizes.total / (self.degrees.pp * self.degrees.fsdp * self.degrees.tp)
        is_by_block = self.layout.compile.granularity != "model"
        keeps_inputs = is_by_block and self.layout.activation_checkpoint.mode != "memory_budget"
        return self._fuller(
            self._held(share),
            activations=of_samples.inputs if keeps_inputs else 0.0,
            logits=of_samples.logits * self.layout.precision.compute.itemsize,
        )

    def estimate(self) -> Memory:
        """What the fullest rank comes to, about."""
        layout, ends = self.layout, min(self.degrees.pp, 2)
        of_samples = _Activations(self)
        beside = self.sizes.auxiliary  # with what stands after the blocks
        outside = (self.sizes.total - self.sizes.in_blocks - beside) / ends + beside
        stage = self.sizes.in_blocks / self.degrees.pp + outside
        block = max(self.sizes.blocks.values(), default=0)
        # Whole are a block and the next, or the embedding, which is no block.
        whole = max(2 * block, outside)
        if layout.reshard == "never":
            whole = stage
        if layout.sharding.never_whole:  # one part is computed with, and another arrives
            whole = 2 * max(block, outside) / self.degrees.fsdp
        bytes_each = layout.precision.compute.itemsize + layout.precision.reduce.itemsize
        is_gathered, casts = layout.shards(self.degrees), layout.precision.casts
        held = self._held(stage / (self.degrees.fsdp * self.degrees.tp))
        gathered = whole / self.degrees.tp * bytes_each if is_gathered else 0.0
        if isinstance(fsdp := layout.sharding, FSDP2):
            if fsdp.regather_size:
                gathered += stage / fsdp.regather_size * layout.precision.compute.itemsize
            if fsdp.accumulate_whole and self.accumulates:
                gathered += stage / self.degrees.tp * layout.precision.reduce.itemsize
        activations = of_samples.kept()
        if casts and not is_gathered:  # the backward reads what was cast
            is_kept = layout.activation_checkpoint.mode == "none"
            cast = stage if is_kept else max(block, outside)
            activations += cast / self.degrees.tp * layout.precision.compute.itemsize
        return self._fuller(
            held._replace(gathered=gathered),
            activations=activations,
            # As computed, in float32, its log-softmax, and the gradient of that.
            logits=of_samples.logits * (layout.precision.compute.itemsize + 12),
        )

    def _held(self, share: float) -> Memory:
        """Parameters, gradients and states of a rank that holds `share` parameters."""
        each, optimizer = self.layout.precision.parameters.itemsize, self.optimizer
        gradients = 0.0 if optimizer.early_step_in_backward else share * each
        states = share * self.sizes.states / max(self.sizes.total, 1)
        return Memory(share * each, gradients, states)

    def _fuller(self, at_step: Memory, activations: float, logits: float) -> Memory:
        """The fuller moment: the update, or the end of a forward, where gradients are to come."""
        at_loss = at_step._replace(
            gradients=at_step.gradients if self.accumulates else 0.0,
            states=at_step.states if self.has_states else 0.0,
            activations=activations,
            logits=logits,
        )
        fuller = max(at_step, at_loss, key=lambda memory: memory.total)
        of_weights = fuller.parameters + fuller.gradients + fuller.states
        on_host = of_weights if self.layout.cpu_offload else 0.0
        if self.optimizer.offload_states and not on_host:
            on_host = fuller.states
        return fuller._replace(on_host=on_host)


class _Activations:
    """What the samples of a rank leave in memory, in bytes."""

    def __init__(self, plan: Plan) -> None:
        self.layout, self.degrees = layout, degrees = plan.layout, plan.degrees
        chosen, shapes = layout.parallelism, layout.sample(plan.spec, plan.args)
        itemsize, blocks = layout.precision.compute.itemsize, list(plan.sizes.blocks)
        self.size = layout.local_batch_size
        if degrees.pp > 1:
            self.size = chosen.pipeline_parallel_microbatch_size
        self.layers: float = len(blocks) / degrees.pp
        whole = 1 if chosen.disable_sequence_parallel else degrees.tp
        hidden = fmean(math.prod(shapes.after(before)) for before in ("", *blocks[:-1]))
        self.input = self.size * hidden * itemsize / (degrees.cp * whole)
        """Of a block in the mean, as all its ranks but those of `tp` have a part of it."""
        kept = self.size * fmean(
            shapes.after(name)[0] * plan.spec.kept_by_block(plan.args, itemsize, name)
            for name in blocks
        )
        self.block = max(kept / (degrees.cp * degrees.tp), self.input)
        """All that it keeps."""
        self.beside = shapes.beside
        """Of each microbatch, hidden states of later tokens, and blocks that take them."""
        around = plan.spec.kept_by_block(plan.args, itemsize, plan.spec.auxiliary or "")
        self.around = self.beside * self.size * shapes.hidden[0] * around / (degrees.cp * whole)
        outputs = self.size * math.prod(shapes.outputs) / degrees.cp
        outputs /= 1 if chosen.disable_loss_parallel else degrees.tp
        self.logits = 0.0 if layout.loss.vocabulary_chunk else outputs
        """Elements."""

    @property
    def inputs(self) -> float:
        """Of all blocks, for one microbatch."""
        return self.layers * self.input

    def kept(self) -> float:
        """At the peak, with what one block recomputes."""
        config = self.layout.activation_checkpoint
        if config.mode == "memory_budget":
            part = config.memory_budget
        elif config.by_operator:
            part = 0.5  # every second matrix product
        else:
            part = 1 - 1 / config.every if config.every else 1.0
        each = part * self.block + (1 - part) * self.input
        inputs = self.in_flight * self.beside * self.input
        blocks = (self.in_flight * self.layers + self.beside) * each
        return blocks + inputs + self.around + (self.block if part < 1 else 0.0)

    @property
    def in_flight(self) -> int:
        """Microbatches whose backward is yet to come."""
        chosen, microbatches = self.layout.parallelism, self.layout.local_batch_size // self.size
        is_bounded = chosen.pipeline_parallel_schedule != "GPipe"
        return min(microbatches, self.degrees.pp) if is_bounded else microbatches

"""The work of a rank in a step, as the formulas of memory and traffic count with it.

It follows from a model and its layout alone, without memory or process groups. Of what a step
sends, this is what happens in eager execution: a compiler may recompute more, or less.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchtitan.comm import CommunicationConfig, Unit
from torchtitan.comm.unit import Operation
from torchtitan.models.spec import ModelSpec, SampleShapes, TensorRole, build_empty, tensor_roles
from torchtitan.parallel import stages
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.schedules import Action, Orders
from torchtitan.parallel.settings import ParallelismConfig, Precision, ReshardPolicy
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.world import Degrees

SPLIT_IN_ROWS = ("embedding", "colwise", "logits")
"""The roles whose weights tensor parallelism splits by rows."""


@dataclass(frozen=True)
class Traffic:
    """Collectives alike in one step, or messages alike that one rank sends.

    A collective is described by its axis, its kind and the bytes of its whole: what an all-gather
    ends with, what a reduce-scatter begins with, the tensor of an all-reduce or of a send. Of a
    whole of b bytes each of n ranks sends, around a ring (Patarasuk and Yuan, 2009,
    doi:10.1016/j.jpdc.2008.09.002),

        all-gather      b (n - 1) / n
        reduce-scatter  b (n - 1) / n
        all-to-all      b (n - 1) / n
        all-reduce      2 b (n - 1) / n
        send            b
    """

    axis: str
    """A key of `World.groups`; "sharing": those that share parameters, copies among them;
    "shards": those that share one copy; "all" ranks."""
    what: str
    operation: Operation
    bytes: int
    """Of the whole of each."""
    count: int
    ranks: int = 0
    """How many neighbors on the axis take part; 0: all."""

    def sent(self, ranks: int) -> float:
        """Bytes that each of the `ranks` of the axis sends, for all of them together."""
        whole, ranks = self.bytes * self.count, self.ranks or ranks
        if self.operation == "send":
            return whole
        return whole * (ranks - 1) / ranks * (2 if self.operation == "all_reduce" else 1)


@dataclass(frozen=True)
class Work:
    """A step of a run, of which each rank has a part."""

    spec: ModelSpec[Any]
    args: Any
    degrees: Degrees
    passes: int
    """Batches that are accumulated; with a pipeline, how often it is filled and drained."""
    local_batch_size: int
    seq_len: int
    parallelism: ParallelismConfig
    precision: Precision
    communication: CommunicationConfig
    recomputation: ActivationCheckpointConfig
    reshard: ReshardPolicy
    """The policy in effect."""
    shards: bool
    """Whether parameters are gathered and reduced."""
    logits_in_chunks: bool

    @cached_property
    def model(self) -> nn.Module:
        """The whole network, on the meta device."""
        return build_empty(self.spec.build, self.args, self.seq_len)

    @cached_property
    def stages(self) -> Stages:
        """The stages that a recipe without problems has the model cut into."""
        return stages.plan(self.parallelism, self.spec, self.args, self.model, self.seq_len)

    @cached_property
    def orders(self) -> Orders:
        """The actions of each rank of the pipeline in one pass."""
        if self.degrees.pp == 1:
            return {0: [Action(0, "F", 0), Action(0, "B", 0)]}
        return stages.orders(self.parallelism, self.layers, self.microbatches)

    def parts(self, stage_rank: int) -> list["Part"]:
        """The stages of a rank of the pipeline, in order."""
        owned = self.stages.of(stage_rank)
        return [Part(self, stage, stages.build(self.model, self.stages, stage)) for stage in owned]

    @cached_property
    def order(self) -> Sequence[str]:
        """The blocks of the whole model, with those of auxiliary losses."""
        return [*self.spec.all_blocks(self.model)]

    @property
    def layers(self) -> int:
        """Number of blocks without those of auxiliary losses."""
        return len(self.spec.blocks(self.model))

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """The blocks that are run again in the backward, as far as no compiler chooses."""
        every = self.recomputation.every
        return frozenset(self.order[::every] if every else ())

    @cached_property
    def shapes(self) -> SampleShapes:
        """Shapes of a whole sample."""
        return self.spec.shapes(self.args, self.seq_len)

    @property
    def sequences(self) -> int:
        """Sequences in a microbatch."""
        in_pipeline = self.parallelism.pipeline_parallel_microbatch_size
        return in_pipeline if self.degrees.pp > 1 else self.local_batch_size

    @property
    def microbatches(self) -> int:
        """Microbatches of one batch; 1 without a pipeline."""
        return self.local_batch_size // self.sequences

    @property
    def times(self) -> int:
        """How often a part of the model is run."""
        return self.passes * self.microbatches

    @property
    def heads(self) -> int:
        """How often a pass embeds tokens, and ends in a loss: for each depth once more."""
        return 1 + self.shapes.beside

    def tokens(self, module: str = "") -> int:
        """Positions of a microbatch after a module, as far as this rank has its sequences."""
        return self.sequences * self.shapes.after(module)[0] // self.degrees.cp

    @property
    def outputs(self) -> int:
        """Positions of a microbatch for which the model makes an output, in the same way."""
        return self.sequences * self.shapes.outputs[0] // self.degrees.cp

    def hidden(self, module: str = "") -> int:
        """Bytes of the hidden states of those positions."""
        return self.tokens(module) * self.shapes.after(module)[1] * self.precision.compute.itemsize

    @property
    def splits_stream(self) -> bool:
        """Whether each tensor rank has a part of the hidden states."""
        return self.degrees.tp > 1 and not self.parallelism.disable_sequence_parallel


@dataclass(frozen=True)
class Part:
    """A stage of the model, or all of it, as a rank runs it."""

    work: Work
    stage: int
    module: nn.Module

    @cached_property
    def blocks(self) -> Sequence[str]:
        """The blocks of this stage by name, with those of auxiliary losses."""
        return [*self.work.spec.all_blocks(self.module)]

    @cached_property
    def plan(self) -> Mapping[str, TensorRole]:
        """The roles of modules by name."""
        return tensor_roles(self.module, self.work.spec.tensor_plan)

    @property
    def roles(self) -> Mapping[str, TensorRole]:
        """The same as far as tensor parallelism splits them."""
        return self.plan if self.work.degrees.tp > 1 else {}

    @cached_property
    def sizes(self) -> Counter[str]:
        """Number of parameters of each block; "": outside of the main blocks."""
        blocks, found = self.work.spec.blocks(self.module), Counter[str]()
        for name, parameter in self.module.named_parameters():
            owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
            found[owner] += parameter.numel()
        return found

    @property
    def is_last(self) -> bool:
        """Whether the stage ends in the loss."""
        return self.stage == len(self.work.stages.ranks) - 1

    @property
    def again(self) -> Collection[str]:
        """The blocks that are recomputed."""
        return self.work.recomputed & {*self.blocks}

    @cached_property
    def halved(self) -> int:
        """Backwards of a pass in two halves; torch leaves those of the first stage whole."""
        actions = (a for actions in self.work.orders.values() for a in actions)
        return sum(a.kind == "I" and a.stage == self.stage for a in actions) if self.stage else 0

    def recomputations(self, name: str) -> int:
        """How often in a step the module or parameter `name` is run again in the backward.

        The second half of a backward runs a block again for each module with weights: torch
        computes the gradients of each by themselves.
        """
        block = next((block for block in self.again if f"{name}.".startswith(f"{block}.")), None)
        if block is None:
            return 0
        modules = self.module.get_submodule(block).modules()
        weighted = sum(any(True for _ in each.parameters(recurse=False)) for each in modules)
        return self.work.passes * (self.work.microbatches + self.halved * weighted)

    def shape(self, name: str, shape: Sequence[int]) -> torch.Size:
        """Shape of each rank's part of a parameter on the first tensor rank, padded to be equal."""
        sizes, dim, parts = list(shape), 0, self.work.degrees.fsdp
        role, tp = self.roles.get(name.rpartition(".")[0]), self.work.degrees.tp
        if role in SPLIT_IN_ROWS:
            dim = 1 if shape[0] % (tp * parts) else 0  # as `fsdp2` does
            sizes[0] = -(-shape[0] // tp)
        elif role == "rowwise":
            sizes[1] //= tp
        sizes[dim] = -(-sizes[dim] // parts)
        return torch.Size(sizes)

    def of_unit(
        self,
        shapes: Mapping[str, torch.Size],
        gathers: int,
        scatters: int,
        sums: int,
        regathers: int = 0,
        neighbors: int = 0,
    ) -> Iterator[Traffic]:
        """Traffic of parameters that are gathered and reduced together, each so often in a step.

        Args:
            shapes: of one rank's part of each.
            regathers: from `neighbors` alone.
            sums: over copies, where those are added up in the backward.
        """
        work, unit = self.work, Unit("", shapes, torch.device("meta"))
        ways, precision, parts = work.communication, work.precision, work.degrees.fsdp
        return of_parameters(
            parts=parts,
            copies=work.degrees.dp_replicate if ways.replicas.in_backward else 1,
            gathered=ways.weights.sent_bytes(unit, parts, precision.compute),
            scattered=ways.gradients.sent_bytes(unit, parts, precision.reduce),
            summed=unit.elements * precision.reduce.itemsize,
            scatter=ways.gradients.operation,
            gathers=gathers,
            regathers=regathers,
            neighbors=neighbors,
            scatters=scatters,
            sums=sums,
        )


def largest_block(parts: Sequence[Part]) -> int:
    """Parameters of the largest block."""
    return max((size for part in parts for name, size in part.sizes.items() if name), default=0)


def outside_blocks(parts: Sequence[Part]) -> int:
    """Parameters that are in no block."""
    return sum(part.sizes[""] for part in parts)


def of_parameters(
    *,
    parts: int,
    copies: int,
    gathered: int,
    scattered: int,
    summed: int,
    scatter: Operation = "reduce_scatter",
    gathers: int,
    regathers: int = 0,
    neighbors: int = 0,
    scatters: int,
    sums: int,
) -> Iterator[Traffic]:
    """DDP, FSDP and HSDP: one unit of parameters in parts and copies (arXiv:2304.11277).

    Args:
        gathered: bytes of all parts, filled up so that they are equal.
        scattered: bytes of the gradients of all parts.
        summed: bytes of the gradients of one part.
        scatter: the collective that adds up gradients over the parts.
        gathers, scatters, sums: how often in a step it is gathered, its gradients are scattered
            over the parts, and summed over the copies.
        regathers: how often it is gathered from `neighbors` alone, over which it has stayed split.
    """
    if parts > 1:
        yield Traffic("fsdp", "parameters", "all_gather", gathered, gathers)
        yield Traffic("fsdp", "parameters", "all_gather", gathered, regathers, neighbors)
        yield Traffic("fsdp", "gradients", scatter, scattered, scatters)
    if copies > 1:
        yield Traffic("dp_replicate", "gradients", "all_reduce", summed, sums)

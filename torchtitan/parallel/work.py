"""The work of a rank in a step, as input to the formulas of memory and traffic.

It follows from a model and its layout alone, without memory or process groups. Traffic is that of
eager execution: a compiler may recompute more, or less.
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
from torchtitan.models.experts import Experts
from torchtitan.models.spec import ModelSpec, SampleShapes, TensorRole, build_empty, tensor_roles
from torchtitan.parallel import stages
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.schedules import Action, Orders
from torchtitan.parallel.settings import ParallelismConfig, Precision, ReshardPolicy
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.world import Degrees

SPLIT_IN_ROWS = ("embedding", "colwise", "gathered_colwise", "sinks", "logits")
"""Roles whose weights tensor parallelism splits by rows."""


@dataclass(frozen=True)
class Traffic:
    """Identical collectives in one step, or identical messages that one rank sends.

    A collective is described by its axis, its kind and the bytes of its whole tensor: the output of
    an all-gather, the input of a reduce-scatter, the tensor of an all-reduce or a send. For b bytes
    each of n ranks sends, around a ring (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002),

        all-gather      b (n - 1) / n
        reduce-scatter  b (n - 1) / n
        all-to-all      b (n - 1) / n
        all-reduce      2 b (n - 1) / n
        send            b
    """

    axis: str
    """Key of `World.groups`; "sharing": ranks that share parameters, with all replicas;
    "shards": ranks that share one replica; "all": all ranks."""
    what: str
    operation: Operation
    bytes: int
    """Size of the whole tensor of each."""
    count: int
    ranks: int = 0
    """Number of neighboring ranks on the axis that take part; 0: all."""

    def sent(self, ranks: int) -> float:
        """Return the bytes that each of the `ranks` of the axis sends in all collectives."""
        whole, ranks = self.bytes * self.count, self.ranks or ranks
        if self.operation == "send":
            return whole
        return whole * (ranks - 1) / ranks * (2 if self.operation == "all_reduce" else 1)


@dataclass(frozen=True)
class Work:
    """Work of one step of a run, over all ranks."""

    spec: ModelSpec[Any]
    args: Any
    degrees: Degrees
    passes: int
    """Number of accumulated batches; a pipeline fills and drains once for each."""
    local_batch_size: int
    seq_len: int
    parallelism: ParallelismConfig
    precision: Precision
    communication: CommunicationConfig
    recomputation: ActivationCheckpointConfig
    reshard: ReshardPolicy
    """Policy in effect."""
    shards: bool
    """Whether parameters are gathered and reduced."""
    logits_in_chunks: bool

    @cached_property
    def model(self) -> nn.Module:
        """Whole model, on the meta device."""
        return build_empty(self.spec.build, self.args, self.seq_len)

    @cached_property
    def stages(self) -> Stages:
        """Pipeline stages of the model; the recipe must be valid."""
        return stages.plan(self.parallelism, self.spec, self.args, self.model, self.seq_len)

    @cached_property
    def orders(self) -> Orders:
        """Actions of each rank of the pipeline in one pass."""
        if self.degrees.pp == 1:
            return {0: [Action(0, "F", 0), Action(0, "B", 0)]}
        return stages.orders(self.parallelism, self.layers, self.microbatches)

    def parts(self, stage_rank: int) -> list["Part"]:
        """Return the stages of a rank of the pipeline, in order."""
        owned = self.stages.of(stage_rank)
        return [Part(self, stage, stages.build(self.model, self.stages, stage)) for stage in owned]

    @cached_property
    def order(self) -> Sequence[str]:
        """Blocks of the whole model, including those of auxiliary losses."""
        return [*self.spec.all_blocks(self.model)]

    @property
    def layers(self) -> int:
        """Number of blocks, excluding those of auxiliary losses."""
        return len(self.spec.blocks(self.model))

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Blocks recomputed in the backward, unless the compiler chooses."""
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
        """Number of forwards of each stage in a step."""
        return self.passes * self.microbatches

    @property
    def heads(self) -> int:
        """Number of embeddings and of losses in a forward: one, and one for each extra depth."""
        return 1 + self.shapes.extra_hidden

    def tokens(self, module: str = "") -> int:
        """Return this rank's number of positions of a microbatch after a module."""
        return self.sequences * self.shapes.after(module)[0] // self.degrees.cp

    @property
    def outputs(self) -> int:
        """This rank's number of positions of a microbatch with an output."""
        return self.sequences * self.shapes.outputs[0] // self.degrees.cp

    def hidden(self, module: str = "") -> int:
        """Return the bytes of this rank's hidden states of a microbatch after a module."""
        return self.tokens(module) * self.shapes.after(module)[1] * self.precision.compute.itemsize

    @property
    def splits_stream(self) -> bool:
        """Whether each tensor rank has a part of the hidden states."""
        return self.degrees.tp > 1 and not self.parallelism.disable_sequence_parallel


@dataclass(frozen=True)
class Part:
    """Stage of the model, or all of it, as a rank runs it."""

    work: Work
    stage: int
    module: nn.Module

    @cached_property
    def blocks(self) -> Sequence[str]:
        """Names of the blocks of this stage, including those of auxiliary losses."""
        return [*self.work.spec.all_blocks(self.module)]

    @cached_property
    def plan(self) -> Mapping[str, TensorRole]:
        """Tensor-parallel roles of modules, by name."""
        return tensor_roles(self.module, self.work.spec.tensor_plan)

    @property
    def roles(self) -> Mapping[str, TensorRole]:
        """Same as `plan` under tensor parallelism; empty without."""
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
    def recomputed_blocks(self) -> Collection[str]:
        """Names of the recomputed blocks."""
        return self.work.recomputed & {*self.blocks}

    @cached_property
    def split_backwards(self) -> int:
        """Number of a pass's backwards in two halves; torch keeps the first stage's whole."""
        actions = (a for actions in self.work.orders.values() for a in actions)
        return sum(a.kind == "I" and a.stage == self.stage for a in actions) if self.stage else 0

    def recomputations(self, name: str) -> int:
        """Return the number of recomputations in a step of the module or parameter `name`.

        The second half of a backward recomputes a block for each module with weights: torch
        computes the gradients of each separately.
        """
        block = next(
            (block for block in self.recomputed_blocks if f"{name}.".startswith(f"{block}.")), None
        )
        if block is None:
            return 0
        modules = self.module.get_submodule(block).modules()
        weighted = sum(any(True for _ in each.parameters(recurse=False)) for each in modules)
        return self.work.passes * (self.work.microbatches + self.split_backwards * weighted)

    def shape(self, name: str, shape: Sequence[int]) -> torch.Size:
        """Return the padded shape of each rank's part of a parameter, on the first tensor rank."""
        sizes, split = list(shape), self.tensor_dim(name)
        if self.is_placed(name):
            sizes[0] //= self.work.parallelism.expert_parallel_degree
        dim, parts = self.shard_dim(name, shape), self.sharing(name)
        if split is not None:
            sizes[split] = -(-shape[split] // self.work.degrees.tp)
        sizes[dim] = -(-sizes[dim] // parts)
        return torch.Size(sizes)

    def is_placed(self, name: str) -> bool:
        """Whether a parameter is of experts that other ranks do not have."""
        if self.work.parallelism.expert_parallel_degree == 1:
            return False
        return isinstance(self.module.get_submodule(name.rpartition(".")[0]), Experts)

    def sharing(self, name: str) -> int:
        """Return the number of ranks that share a parameter as FSDP does."""
        degree = self.work.parallelism.expert_parallel_degree if self.is_placed(name) else 1
        return self.work.degrees.fsdp // degree

    def shard_dim(self, name: str, shape: Sequence[int]) -> int:
        """Return the dim of a parameter that these ranks split, as FSDP2 does."""
        parts, split = self.sharing(name), self.tensor_dim(name)
        if self.is_placed(name):
            own = shape[0] // self.work.parallelism.expert_parallel_degree
            return Experts.MODEL_DIM.get(name.rpartition(".")[2], 0) if own % parts else 0
        is_uneven = shape[0] % (self.work.degrees.tp * parts) > 0
        return 1 if split == 0 and is_uneven and len(shape) > 1 else 0

    def tensor_dim(self, name: str) -> int | None:
        """Return the dim of a parameter that tensor ranks split; None: each has all of it."""
        module, _, last = name.rpartition(".")
        role = self.roles.get(module)
        if role in SPLIT_IN_ROWS:
            return 0
        if role == "rowwise":
            return None if last == "bias" else 1
        return Experts.SPLIT_DIM[last] if role == "experts" else None

    def of_unit(
        self,
        shapes: Mapping[str, torch.Size],
        gathers: int,
        scatters: int,
        sums: int,
        regathers: int = 0,
        neighbors: int = 0,
    ) -> Iterator[Traffic]:
        """Yield the traffic of parameters that are gathered and reduced together, in a step.

        Args:
            shapes: shapes of one rank's part of each parameter.
            regathers: number of gathers from `neighbors` alone.
            sums: number of sums over replicas, if these are summed in the backward.
        """
        work, unit = self.work, Unit("", shapes, torch.device("meta"))
        ways, precision = work.communication, work.precision
        is_placed, parts = any(map(self.is_placed, shapes)), min(map(self.sharing, shapes))
        return of_parameters(
            axis="efsdp" if is_placed else "fsdp",
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


def of_parameters(
    *,
    axis: str = "fsdp",
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
    """Yield the traffic of a unit of parameters under DDP, FSDP or HSDP (arXiv:2304.11277).

    Args:
        axis: axis of the ranks that share them.
        gathered: bytes of all parts, padded to equal sizes.
        scattered: bytes of the gradients of all parts.
        summed: bytes of the gradients of one part.
        scatter: the collective that sums gradients over the parts.
        gathers, scatters, sums: number of times in a step that the unit is gathered, its gradients
            are scattered over the parts, and summed over the copies.
        regathers: number of gathers from `neighbors` alone, over which it has stayed split.
    """
    if parts > 1:
        yield Traffic(axis, "parameters", "all_gather", gathered, gathers)
        yield Traffic(axis, "parameters", "all_gather", gathered, regathers, neighbors)
        yield Traffic(axis, "gradients", scatter, scattered, scatters)
    if copies > 1:
        yield Traffic("dp_replicate", "gradients", "all_reduce", summed, sums)

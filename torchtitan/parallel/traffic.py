"""What a step sends: formulas, from the shapes of a model and the layout of a run alone.

A collective is told by its axis, its kind and the bytes of its whole: what an all-gather ends with,
what a reduce-scatter begins with, the tensor of an all-reduce, the message of a send. Of a whole of
b bytes each of n ranks sends, around a ring (Patarasuk and Yuan, 2009,
doi:10.1016/j.jpdc.2008.09.002),

    all-gather      b (n - 1) / n
    reduce-scatter  b (n - 1) / n
    all-reduce      2 b (n - 1) / n
    send            b

The formulas are those of eager execution; a compiler may recompute more or less. Left out are a
dozen all-reduces of single numbers: targets, loss, gradient norm, the wish to stop.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import nn

from torchtitan.models.attention import SelfAttention
from torchtitan.models.spec import Args, ModelArgs, ModelSpec, TensorRole
from torchtitan.parallel import Layout, stages
from torchtitan.parallel.world import Degrees

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "send"]

ROLES_IN_ROWS = ("embedding", "columns", "logits")
"""Tensor parallelism splits the rows of their weights."""


class Traffic(NamedTuple):
    """Collectives alike in one step, or messages that one rank sends."""

    axis: str
    """A key of `World.groups`."""
    what: str
    operation: Operation
    bytes: int
    """Of the whole of each."""
    count: int

    def sent(self, ranks: int) -> float:
        """Bytes that each of the `ranks` of the axis sends in all of them."""
        whole = self.bytes * self.count
        if self.operation == "send":
            return whole
        return whole * (ranks - 1) / ranks * (2 if self.operation == "all_reduce" else 1)


@dataclass(frozen=True)
class Shares:
    """What one rank has of the work of a step."""

    degrees: Degrees
    passes: int
    """Microbatches that are accumulated; with a pipeline, how often it is filled and drained."""
    microbatches: int
    """Of one pass; 1 without a pipeline."""
    sequences: int
    """In a microbatch."""
    length: int
    """Tokens that this rank has of a sequence."""

    @property
    def repeats(self) -> int:
        """How often a part of the model is run in a step."""
        return self.passes * self.microbatches

    @property
    def tokens(self) -> int:
        """In this rank's part of a microbatch."""
        return self.sequences * self.length


def of_step(
    model: nn.Module,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    degrees: Degrees,
    accumulation: int,
    stage_rank: int = 0,
) -> list[Traffic]:
    """All that a rank takes part in during an optimizer step.

    Args:
        model: the whole, on the meta device.
        accumulation: batches of `layout.local_batch_size` in a step.
        stage_rank: its place in the pipeline. On the tensor axis it is the first, whose part of the
            vocabulary no other exceeds.
    """
    chosen = layout.parallelism
    in_pipeline = degrees.pp > 1
    size = chosen.pipeline_parallel_microbatch_size if in_pipeline else layout.local_batch_size
    shares = Shares(
        degrees,
        passes=accumulation,
        microbatches=layout.local_batch_size // size,
        sequences=size,
        length=layout.seq_len // degrees.cp,
    )
    plan = stages.plan(chosen, spec, args, model, layout.seq_len)
    order = list(spec.blocks(model))
    found: list[Traffic] = []
    for stage in plan.of(stage_rank):
        part = stages.build(model, plan, stage)
        blocks = spec.blocks(part)
        again = _recomputed(layout, order) & blocks.keys()
        roles = _roles(part, spec.tensor_plan if degrees.tp > 1 else {})
        gathers = _gathers(layout, shares, len(order), stage)
        found += of_parameters(part, list(blocks), roles, layout, shares, gathers)
        found += of_activations(part, roles, again, args, layout, shares)
        found += of_attention(part, again, args, layout, shares)
    found += of_stages(plan, stage_rank, args, layout, shares)
    return merge(found)


def of_parameters(
    part: nn.Module,
    blocks: Sequence[str],
    roles: Mapping[str, TensorRole],
    layout: Layout,
    shares: Shares,
    gathers: "Gathers",
) -> Iterator[Traffic]:
    """DDP, FSDP and HSDP: P parameters over F parts and R copies, a block at a time.

    All-gathers of P elements in the compute dtype, reduce-scatters of P in the reduce dtype, and
    all-reduces of P / F in that. Rows are filled up to a multiple of F.
    """
    parts, copies = shares.degrees.fsdp, shares.degrees.dp_replicate
    tp, precision = shares.degrees.tp, layout.precision
    units: Counter[str] = Counter()
    for name, parameter in part.named_parameters():
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        role = roles.get(name.rpartition(".")[0])
        units[block] += _elements(parameter.shape, role, tp, parts)
    # Copies are summed with the last microbatch; torch's pipelines sum them with each pass.
    sums = shares.passes if shares.degrees.pp > 1 else 1
    for unit, elements in units.items():
        again = gathers.of_rest if not unit else gathers.of_block
        count = gathers.of_last_block if blocks and unit == blocks[-1] else again
        compute, reduce = (
            elements * dtype.itemsize for dtype in (precision.compute, precision.reduce)
        )
        if parts > 1:
            yield Traffic("fsdp", "parameters", "all_gather", compute, count)
            yield Traffic("fsdp", "gradients", "reduce_scatter", reduce, shares.passes)
        if copies > 1:
            yield Traffic("dp_replicate", "gradients", "all_reduce", reduce // parts, sums)


def of_activations(
    part: nn.Module,
    roles: Mapping[str, TensorRole],
    again: Iterable[str],
    args: ModelArgs,
    layout: Layout,
    shares: Shares,
) -> Iterator[Traffic]:
    """Tensor parallelism: b sequences of s tokens of dim D, for each microbatch.

    A block gathers its input twice and sums its outputs twice, and the same once more, the other
    way round, in the backward: all-gathers and reduce-scatters of b s D elements, or all-reduces
    without sequence parallelism. The embedding and the logits together are half a block. The loss
    takes three all-reduces of b s fp32 numbers; without loss parallelism b s V logits are gathered.
    """
    if not roles:
        return
    chosen, precision = layout.parallelism, layout.precision
    counts = Counter(roles.values())
    into, out = (
        counts["gather"] + counts["logits"],
        counts["rows"] + counts["embedding"],
    )
    repeated = Counter(
        role for name, role in roles.items() if any(name.startswith(f"{b}.") for b in again)
    )
    # Recomputation ends with what the backward needs, which is never a block's own output.
    into_again, out_again = repeated["gather"], repeated["rows"] - len(set(again))
    stream = shares.tokens * args.dim * precision.compute.itemsize
    if chosen.disable_sequence_parallel:
        times = (into + out + out_again) * shares.repeats
        yield Traffic("tp", "activations", "all_reduce", stream, times)
    else:
        kept = layout.activation_checkpoint.selective_ac_option == "op"
        keeps_sums = layout.activation_checkpoint.mode == "selective" and kept
        times = (into + out + into_again) * shares.repeats
        yield Traffic("tp", "activations", "all_gather", stream, times)
        times = (into + out + (0 if keeps_sums else out_again)) * shares.repeats
        yield Traffic("tp", "activations", "reduce_scatter", stream, times)
        yield from _of_norms(part, roles, layout, shares)
    if counts["logits"] and chosen.disable_loss_parallel:
        vocabulary = -(-args.vocab_size // shares.degrees.tp) * shares.degrees.tp
        logits = shares.tokens * vocabulary * precision.compute.itemsize
        yield Traffic("tp", "logits", "all_gather", logits, shares.repeats)
    elif counts["logits"]:
        yield Traffic("tp", "loss", "all_reduce", shares.tokens * 4, 3 * shares.repeats)


def _of_norms(
    part: nn.Module, roles: Mapping[str, TensorRole], layout: Layout, shares: Shares
) -> Iterator[Traffic]:
    """Each rank has the gradient of its tokens: D elements a norm, summed before FSDP takes it."""
    sharded = has_data_parallel_work(layout, shares.degrees)
    dtype = layout.precision.compute if sharded else layout.precision.parameters
    for name, role in roles.items():
        if role == "norm":
            for parameter in part.get_submodule(name).parameters():
                size = parameter.numel() * dtype.itemsize
                yield Traffic("tp", "norms", "all_reduce", size, shares.passes if sharded else 1)


def of_attention(
    part: nn.Module, again: Iterable[str], args: ModelArgs, layout: Layout, shares: Shares
) -> Iterator[Traffic]:
    """Context parallelism: keys and values of b sequences of s tokens on each of C ranks.

    They are 2 b s elements for each of K key/value heads of dim E, which come in the forward, in
    its recomputation and in the backward; the gradients go back in fp32. At once that is an
    all-gather of C times as many and a reduce-scatter; around the ring, C - 1 sends each.
    """
    cp = shares.degrees.cp
    modules = [name for name, module in part.named_modules() if isinstance(module, SelfAttention)]
    if cp == 1 or not modules:
        return
    recompute = layout.activation_checkpoint
    keeps = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    repeated = [m for m in modules if not keeps and any(m.startswith(f"{b}.") for b in again)]
    fetches = (2 * len(modules) + len(repeated)) * shares.repeats
    returns = len(modules) * shares.repeats
    heads = args.n_kv_heads // shares.degrees.tp * (args.dim // args.n_heads)
    elements = 2 * shares.tokens * heads
    here, fp32 = elements * layout.precision.compute.itemsize, elements * torch.float32.itemsize
    if layout.parallelism.context_parallel_rotate_method == "ring":
        yield Traffic("cp", "keys and values", "send", here, (cp - 1) * fetches)
        yield Traffic("cp", "their gradients", "send", fp32, (cp - 1) * returns)
    else:
        yield Traffic("cp", "keys and values", "all_gather", cp * here, fetches)
        yield Traffic("cp", "their gradients", "reduce_scatter", cp * fp32, returns)


def of_stages(
    plan: stages.Stages, rank: int, args: ModelArgs, layout: Layout, shares: Shares
) -> Iterator[Traffic]:
    """Pipeline parallelism: hidden states onwards and their gradients back, b s D elements each.

    Of a sequence a rank sends its part. Neighbouring stages on one rank send nothing.
    """
    tp, where = shares.degrees.tp, plan.ranks
    split = 1 if layout.parallelism.disable_sequence_parallel else tp
    hidden = shares.tokens // split * args.dim * layout.precision.compute.itemsize
    borders = [pair for pair in itertools.pairwise(where) if pair[0] != pair[1]]
    for index, what in enumerate(("hidden states", "their gradients")):
        count = sum(pair[index] == rank for pair in borders)
        if count:
            yield Traffic("pp", what, "send", hidden, count * shares.repeats)


class Gathers(NamedTuple):
    """How often in a step a unit is gathered."""

    of_block: int
    of_last_block: int
    of_rest: int


def _gathers(layout: Layout, shares: Shares, layers: int, stage: int) -> Gathers:
    """Before each forward, and again before the backward of what was freed in between."""
    policy, passes = layout.parallelism.fsdp_reshard_after_forward, shares.passes
    if shares.degrees.pp == 1:
        of_block = passes * (1 if policy == "never" else 2)
        return Gathers(
            of_block,
            of_last_block=passes * 2 if policy == "always" else passes,
            of_rest=passes * 2 if policy == "always" else passes,
        )
    if policy != "always":
        return Gathers(passes, passes, passes)
    # A stage is freed after a forward, and not after a backward but the last.
    orders = stages.orders(layout.parallelism, layers, shares.microbatches)
    kinds = [a.kind for actions in orders.values() for a in actions if a.stage == stage]
    times = passes * (1 + kinds[:-1].count("F"))
    return Gathers(times, times, times)


def _elements(shape: Sequence[int], role: TensorRole | None, tp: int, parts: int) -> int:
    """Elements of a parameter's part on the first tensor rank, as `parts` ranks have it in all."""
    sizes, dim = list(shape), 0
    if role in ROLES_IN_ROWS:
        # As in `fsdp`: columns, where rows would not come out even.
        dim = 1 if shape[0] % (tp * parts) else 0
        sizes[0] = -(-shape[0] // tp)
    elif role == "rows":
        sizes[1] //= tp
    sizes[dim] = -(-sizes[dim] // parts) * parts
    return math.prod(sizes)


def _roles(part: nn.Module, plan: Mapping[str, TensorRole]) -> dict[str, TensorRole]:
    """The role of each module that has one."""
    return {
        name: role
        for name, _ in part.named_modules()
        for pattern, role in plan.items()
        if fnmatchcase(name, pattern)
    }


def _recomputed(layout: Layout, order: Sequence[str]) -> set[str]:
    """The blocks that are run a second time in the backward, as far as no compiler chooses."""
    config = layout.activation_checkpoint
    if config.mode in ("none", "memory_budget"):
        return set()
    every = config.selective_ac_option if config.mode == "selective" else 1
    return set(order if every == "op" else order[::every])


def has_data_parallel_work(layout: Layout, degrees: Degrees) -> bool:
    """Whether FSDP treats the model, if only to cast it."""
    casts = layout.precision.compute != layout.precision.parameters
    return degrees.fsdp * degrees.dp_replicate > 1 or casts or layout.cpu_offload


def merge(found: Iterable[Traffic]) -> list[Traffic]:
    """One line for collectives alike."""
    counts: Counter[tuple[str, str, Operation, int]] = Counter()
    for one in found:
        counts[one[:4]] += one.count
    return [Traffic(*key, count) for key, count in counts.items() if count]

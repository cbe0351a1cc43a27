"""Traffic of a step, from the shapes of a model and its layout alone, without running a rank.

This module adds up the messages of all techniques, and counts those of the fixed ones (tensor,
context and pipeline parallelism) for `traffic_formulas`. It omits a dozen all-reduces of scalars:
targets, loss, gradient norm, the request to stop.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from torchtitan.comm import Unit
from torchtitan.estimate import traffic_formulas as formulas
from torchtitan.models.attention import SelfAttention
from torchtitan.models.experts import MixtureOfExperts, Router
from torchtitan.models.spec import TensorRole
from torchtitan.optim import OptimizerConfig, name_parameters
from torchtitan.parallel import Layout
from torchtitan.parallel.sharding import ShardingConfig
from torchtitan.parallel.work import Part, Traffic, Work
from torchtitan.tasks import TASKS

GATHERED: tuple[TensorRole, ...] = ("input_gather", "gathered_colwise", "gathered", "experts")
"""Roles of modules in blocks whose input is gathered."""


def of_step(
    layout: Layout, work: Work, optimizer: OptimizerConfig, stage_rank: int = 0, rank: int = 0
) -> list[Traffic]:
    """Return the traffic of a rank in an optimizer step, with identical messages merged.

    Args:
        stage_rank: index in the pipeline. On the tensor axis the rank is the first, whose part of
            the vocabulary is the largest.
        rank: index among the ranks that share parameters, which send each other parts for an
            update, each in proportion to its own.

    Raises:
        NotImplementedError: if there are no formulas of the traffic, as with converters.
    """
    if layout.convert:
        raise NotImplementedError("there are no formulas for the traffic of converters")
    sharding, parts = layout.sharding, work.parts(stage_rank)
    found = list(_of_borders(work, stage_rank))
    for part in parts:
        found += sharding.messages(part)
        found += _of_copies(part)
        found += _of_activations(part)
        found += _of_experts(part)
        found += _of_norms(part, sharding)
        for loss in layout.auxiliary_losses:
            found += loss.messages(part.module, work)
        if work.degrees.cp > 1:
            found += _of_attention(part)
    found += _of_update(optimizer, sharding, parts, rank)
    found += optimizer.messages(parts)
    counts: Counter[Traffic] = Counter()
    for one in found:
        counts[replace(one, count=0)] += one.count
    return [replace(one, count=count) for one, count in counts.items() if count]


def _of_copies(part: Part) -> Iterator[Traffic]:
    """Yield the traffic of replicas that synchronize after the backward."""
    work, way = part.work, part.work.communication.replicas
    ranks, dtype = work.degrees.dp_replicate, work.precision.parameters
    if ranks == 1 or way.in_backward or not way.steps_apart:
        return
    named = part.module.named_parameters()
    shapes = {name: part.shape(name, parameter.shape) for name, parameter in named}
    for operation, size in way.messages(Unit("", shapes, torch.device("meta")), ranks, dtype):
        yield Traffic("dp_replicate", "gradients", operation, size, 1)


def _of_activations(part: Part) -> Iterator[Traffic]:
    """Yield the traffic of tensor parallelism, except for norms."""
    work, roles = part.work, part.roles
    by_size: dict[int, list[str]] = {}
    for name in roles:
        by_size.setdefault(_hidden(part, name), []).append(name)
    for size, names in by_size.items():
        counts = Counter(roles[name] for name in names)
        again = Counter[str]()
        for name in names:
            again[roles[name]] += part.recomputations(name)
        # Recomputation stops when the backward's inputs are ready: before a block's own output.
        summed = [name for name in names if roles[name] in ("rowwise", "experts")]
        ended = [
            b for b in part.recomputed_blocks if any(name.startswith(f"{b}.") for name in summed)
        ]
        ends = sum(map(part.recomputations, ended))
        # Selective recomputation keeps the results of reduce-scatters.
        keeps_sums = work.recomputation.by_operator and work.splits_stream
        yield from formulas.of_stream(
            size,
            gathers=(sum(counts[role] for role in GATHERED) + counts["logits"] * work.heads)
            * work.times,
            sums=(counts["rowwise"] + counts["experts"] + counts["embedding"] * work.heads)
            * work.times,
            more_gathers=sum(again[role] for role in GATHERED),
            more_sums=0 if keeps_sums else again["rowwise"] + again["experts"] - ends,
            split=work.splits_stream,
        )
    for name in (name for name, role in roles.items() if role == "router"):
        router = part.module.get_submodule(name)
        assert isinstance(router, Router)
        block = next(b for b in work.order if name.startswith(f"{b}."))
        yield from formulas.of_router(
            work.tokens(block) * router.routing.top_k,
            times=work.times,
            more=part.recomputations(name),
            split=work.splits_stream,
        )
    if "logits" in roles.values():
        yield from formulas.of_loss(
            work.outputs,
            work.shapes.outputs[-1],
            summed=TASKS[work.spec.task].split_sums(work.outputs),
            ranks=work.degrees.tp,
            compute=work.precision.compute.itemsize,
            times=work.heads * work.times,
            # Chunks of logits are not gathered, with or without loss parallelism.
            shared=work.logits_in_chunks or not work.parallelism.disable_loss_parallel,
        )


def _of_experts(part: Part) -> Iterator[Traffic]:
    """Yield the traffic of expert parallelism, except for parameters."""
    work = part.work
    if work.parallelism.expert_parallel_degree == 1:
        return
    for name, module in part.module.named_modules():
        if isinstance(module, MixtureOfExperts):
            block = next(b for b in work.order if name.startswith(f"{b}."))
            top_k = module.router.routing.top_k
            yield from formulas.of_exchange(
                work.tokens(block) * top_k,
                work.hidden(block) // work.tokens(block),
                len(module.experts.w1),
                times=work.times,
                again=part.recomputations(f"{name}.experts"),
            )


def _hidden(part: Part, name: str) -> int:
    """Return the bytes of the hidden states that are the input or output of a module."""
    work = part.work
    if part.roles[name].startswith("gathered"):  # its input may be narrower
        features: int = part.module.get_submodule(name).in_features  # type: ignore[assignment]
        return work.tokens(name) * features * work.precision.compute.itemsize
    if part.roles[name] == "logits":
        return work.outputs * work.hidden(work.order[-1]) // work.tokens(work.order[-1])
    return work.hidden(next((b for b in work.order if name.startswith(f"{b}.")), ""))


def _of_norms(part: Part, sharding: ShardingConfig) -> Iterator[Traffic]:
    """Yield the traffic of norms: each tensor rank has the gradient of its tokens or heads."""
    work, precision = part.work, part.work.precision
    dtype = precision.compute if work.shards else precision.parameters
    sums = sharding.reductions(work.passes, work.microbatches) if work.shards else 1
    summed = ("norm", "whole", "head_norm", "router") if work.splits_stream else ("head_norm",)
    for name in (name for name, role in part.roles.items() if role in summed):
        for weight in part.module.get_submodule(name).parameters():
            yield from formulas.of_norms(weight.numel() * dtype.itemsize, sums=sums)


def _of_attention(part: Part) -> Iterator[Traffic]:
    """Yield the traffic of context parallelism."""
    work, degrees, compute = part.work, part.work.degrees, part.work.precision.compute.itemsize
    modules = [name for name, m in part.module.named_modules() if isinstance(m, SelfAttention)]
    # Selective recomputation keeps attention.
    again = 0 if work.recomputation.by_operator else sum(map(part.recomputations, modules))
    shape = work.spec.attention(work.args)
    assert shape is not None, "the recipe was checked"
    method, times = work.parallelism.context_parallel_rotate_method, len(modules) * work.times
    if method == "ulysses":
        yield from formulas.of_heads(
            work.tokens() * shape.head_dim * compute,
            ranks=degrees.cp,
            heads=shape.heads // degrees.tp,
            kv_heads=shape.kv_heads // degrees.tp,
            forwards=times + again,
            backwards=times,
        )
        return
    keys = work.tokens() * shape.kv_heads // degrees.tp * shape.head_dim
    yield from formulas.of_keys_and_values(
        2 * keys,
        ranks=degrees.cp,
        compute=compute,
        fetches=2 * times + again,
        returns=times,
        ring=method == "ring",
    )


def _of_update(
    optimizer: OptimizerConfig, sharding: ShardingConfig, parts: Sequence[Part], rank: int
) -> Iterator[Traffic]:
    """Yield the traffic of an update, between ranks that share parameters."""
    work = parts[0].work
    copies = work.degrees.dp_replicate if work.communication.replicas.in_backward else 1
    if copies * work.degrees.fsdp * work.degrees.tp == 1 or not optimizer.sends:
        return
    heads = partial(work.spec.heads, work.args)
    owner = {
        parameter: part
        for part in parts
        for parameter in name_parameters([part.module], work.spec.role, heads)
    }
    axis = "sharing" if copies == work.degrees.dp_replicate else "shards"
    sizes = optimizer.sent_bytes([*owner], lambda p: sharding.sharding_of(owner[p], p), rank)
    for size in sizes:
        yield Traffic(axis, "momentum and updates", "all_to_all", size, 1)


def _of_borders(work: Work, mine: int) -> Iterator[Traffic]:
    """Yield the traffic of a pipeline; neighbouring stages on one rank send nothing."""
    for stage, (one, other) in enumerate(itertools.pairwise(work.stages.ranks)):
        if one != other:
            yield from formulas.of_stages(
                work.hidden(work.stages.units[stage][-1])
                * work.heads
                // (work.degrees.tp if work.splits_stream else 1),
                onwards=(one == mine) * work.times,
                back=(other == mine) * work.times,
            )

"""The layouts of a recipe on a number of ranks, as changes of its settings, and about their costs.

What is computed does not change: neither the batch of a step, nor precision, nor the optimizer.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchtitan.checks.limits import model_states
from torchtitan.config import Config
from torchtitan.device import GIB
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.parallel.schedules import SCHEDULES
from torchtitan.plan.hardware import Hardware, dtype_name
from torchtitan.plan.kernel_time import product_rate

Changes = Mapping[str, Any]
"""Settings of a layout by dotted key."""

LEAST_POSITIONS = 1024
"""Positions of a sequence that each rank of context parallelism has at least."""
KEPT, KEPT_COMPILED = 1.5, 1.15
"""Elements that a block keeps for its backward, and those that compiled code keeps, relative to the
inputs and outputs of its matrices, about."""
CONTEXT = 0.15
"""Additional time of the computation for each doubling of context parallelism, about: plans of 405B
on 512 H100 with a degree of 4 compute for 30 % longer."""
DISPATCHES = 150
"""Operators on DTensors in the forward and backward of a tensor-parallel block, about."""
TP, PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CP, COPIES = ("parallelism.context_parallel_degree", "parallelism.data_parallel_replicate_degree")
SHARDS = "parallelism.data_parallel_shard_degree"
EP = "parallelism.expert_parallel_degree"
"""Set only for a model with experts."""
SCHEDULE = "parallelism.pipeline_parallel_schedule"
SIZE = "parallelism.pipeline_parallel_microbatch_size"
RESHARD = "parallelism.fsdp_reshard_after_forward"
LOCAL, BATCH = "training.local_batch_size", "training.global_batch_size"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
BUDGET = "activation_checkpoint.memory_budget"
STAGES_BY_HAND = (
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_layers_per_stage",
    "module_fqns_per_model_part",
)


class Recomputation(NamedTuple):
    """Choice of the activations that are recomputed."""

    changes: Changes
    again: float
    """Share of the forwards that is repeated."""
    kept: float
    """Share of the activations of blocks that is kept."""


RECOMPUTATION: Mapping[str, Recomputation] = {
    "none": Recomputation({MODE: "none"}, 0.0, 1.0),
    "op": Recomputation({MODE: "selective", OPTION: "op"}, 0.55, 0.35),
    "every second block": Recomputation({MODE: "selective", OPTION: 2}, 0.5, 0.5),
    "full": Recomputation({MODE: "full"}, 1.0, 0.0),
    "memory budget": Recomputation({MODE: "memory_budget", BUDGET: 0.5}, 0.1, 0.5),
}


def with_changes(job: JobConfig, changes: Changes) -> JobConfig:
    """Return a recipe with other settings."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    new = {}
    for section, settings in sections.items():
        config: Config = getattr(job, section)
        new[section] = config.model_copy(update=settings)
    return job.model_copy(update=new)


def own_layout(job: JobConfig, ranks: int) -> Changes:
    """Return the layout that a recipe has, with all settings of layouts."""
    given, degrees = job.parallelism, job.degrees(ranks)
    copies, batch = degrees.dp_replicate, job.global_batch(degrees)
    layout: dict[str, Any] = {TP: degrees.tp, PP: degrees.pp, CP: degrees.cp, COPIES: copies}
    layout |= {SHARDS: -1, BATCH: batch, LOCAL: job.local_batch(degrees)}
    if expert_count(job):
        layout[EP] = given.expert_parallel_degree
    if degrees.pp > 1:
        layout |= {SCHEDULE: given.pipeline_parallel_schedule}
        layout |= {SIZE: given.pipeline_parallel_microbatch_size}
    recomputed = job.activation_checkpoint
    layout |= {RESHARD: given.fsdp_reshard_after_forward, MODE: recomputed.mode}
    if recomputed.mode == "selective":
        layout |= {OPTION: recomputed.selective_ac_option}
    if recomputed.mode == "memory_budget":
        layout |= {BUDGET: recomputed.memory_budget}
    return layout


def layouts(job: JobConfig, ranks: int, ranks_per_node: int) -> Iterator[Changes]:
    """Yield layouts of a recipe on a number of ranks; most, but not all, are valid."""
    spec, args, given = MODELS[job.model.name], job.model_args(), job.parallelism
    length, batch = job.training.seq_len, job.global_batch(job.degrees(ranks))
    layers = len(spec.blocks(build_empty(spec.build, args, length)))
    heads = spec.tensor_splits(args).heads.values()
    by_hand = any(getattr(given, key) for key in STAGES_BY_HAND)
    for tp in _divisors(ranks):
        if tp > ranks_per_node or (tp > 1 and any(count % tp for count in heads)):
            continue
        for pp in _divisors(ranks // tp):
            if pp > layers + 2 or (by_hand and pp != given.pipeline_parallel_degree):
                continue
            for cp in _divisors(ranks // tp // pp):
                if cp > 1 and (length % (2 * cp * tp) or length // cp < LEAST_POSITIONS):
                    continue
                data = ranks // tp // pp // cp
                if batch % data:
                    continue
                for copies in _copies(data, cp * tp, ranks_per_node):
                    degrees = {TP: tp, PP: pp, CP: cp, COPIES: copies, SHARDS: -1, BATCH: batch}
                    shards = data // copies * cp
                    has_shards = shards > 1
                    works = itertools.product(
                        _batches(job, batch // data, pp, layers, by_hand), _experts(job, shards)
                    )
                    for work in (one | other for one, other in works):
                        for reshard in _policies(pp) if has_shards else ["default"]:
                            for each in RECOMPUTATION.values():
                                compiled = job.compile.compiles("model")
                                if each.changes[MODE] != "memory_budget" or compiled:
                                    yield degrees | work | {RESHARD: reshard, **each.changes}


def expert_count(job: JobConfig) -> int:
    """Return the number of experts of a block; 0: there are none."""
    experts = MODELS[job.model.name].experts(job.model_args())
    return experts.number if experts else 0


def _experts(job: JobConfig, shards: int) -> list[dict[str, int]]:
    """Return the placements of experts on the ranks that share parameters."""
    if not (count := expert_count(job)):
        return [{}]
    degrees = _divisors(math.gcd(shards, count)) if job.sharding.places_experts else [1]
    return [{EP: degree} for degree in degrees]


def _copies(data: int, inner: int, ranks_per_node: int) -> Iterator[int]:
    """Yield numbers of replicas such that whole nodes hold a replica, and one or all."""
    for copies in _divisors(data):
        spanned = data // copies * inner
        if copies in (1, data) or (spanned >= ranks_per_node and spanned % ranks_per_node == 0):
            yield copies


def _batches(
    job: JobConfig, share: int, pp: int, layers: int, by_hand: bool
) -> Iterator[dict[str, Any]]:
    """Yield ways to divide a rank's `share` of the sequences of a step."""
    if pp == 1:
        yield from ({LOCAL: size} for size in _divisors(share) if size <= 16)
        return
    # The backward of a compiled block can run only once, as a whole.
    whole = job.compile.compiles("model")
    names = [name for name, each in SCHEDULES.items() if not (whole and each.splits_backward)]
    names.remove("LoopedBFS")
    for name in [job.parallelism.pipeline_parallel_schedule] if by_hand else names:
        schedule = SCHEDULES[name]
        stages = pp if schedule.stages == "one" else 2 * pp
        if stages > layers + 2 and not by_hand:
            continue
        for size in (1, 2, 4):
            counts = [n for n in _divisors(share // size) if share % size == 0 and n >= pp]
            counts = [n for n in counts if schedule.runs(n, stages, pp)]
            # More microbatches fill a pipeline better; fewer need less memory.
            for count in counts[:1] + counts[1:][-2:]:
                yield {SCHEDULE: name, SIZE: size, LOCAL: size * count}


def _policies(pp: int) -> list[str]:
    # Without a pipeline, the default keeps only the last block gathered.
    return ["default", "always"] if pp > 1 else ["default", "never"]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Cost(NamedTuple):
    """Approximate time and memory of a layout."""

    seconds: float
    room: float
    """Share of the memory that a device has for the allocator."""
    layout: Changes


class LayoutCosts:
    """About the time and the memory of the layouts of a recipe.

    A plan takes seconds, and a recipe has up to tens of thousands of layouts: these numbers say in
    which order to plan them, and which do not fit by far. A search reports plans alone.
    """

    def __init__(self, job: JobConfig, ranks: int, hardware: Hardware) -> None:
        spec, args, length = MODELS[job.model.name], job.model_args(), job.training.seq_len
        network, shapes = build_empty(spec.build, args, length), spec.shapes(args, length)
        blocks, experts, attention = spec.blocks(network), spec.experts(args), spec.attention(args)
        name, block = next(iter(blocks.items()))
        degrees, dtype = job.degrees(ranks), getattr(torch, job.training.mixed_precision_param)
        self.job, self.ranks, self.hardware, self.length = job, ranks, hardware, length
        self.layers, self.width, self.dtype = len(blocks), shapes.after(name)[1], dtype_name(dtype)
        self.parameters = count_parameters(network).total
        self.of_experts = sum(each.numel() for each in network.parameters() if each.ndim == 3)
        self.states = model_states(job, ranks).device * degrees.pp * degrees.fsdp * degrees.tp
        self.flops: float = spec.flops_per_unit(args, length) / len(blocks)
        self.chosen = experts.chosen if experts else 0
        self.keys = 2 * attention.kv_heads * attention.head_dim if attention else 0
        self.outputs = 0 if job.loss.vocabulary_chunk else math.prod(shapes.outputs[1:])
        matrices = [each.shape for each in block.parameters() if each.ndim > 1]
        # Of experts, which are stacked, a position uses a few.
        sides = sum(sum(s[-2:]) * (self.chosen if len(s) == 3 else 1) for s in matrices)
        is_compiled = job.compile.compiles("model")
        self.kept: float = sides * dtype.itemsize * (KEPT_COMPILED if is_compiled else KEPT)

    def cost(self, layout: Changes) -> Cost:
        """Return the time and the memory of a layout."""
        room = self.room(layout)
        share = self.gib(layout) / room if room > 0 else math.inf
        return Cost(self.seconds(layout), share, layout)

    def seconds(self, layout: Changes) -> float:
        """Return about the time of a step."""
        tp, pp, cp, ep = layout[TP], layout[PP], layout[CP], layout.get(EP, 1)
        batch, copies, local = layout[BATCH], layout[COPIES], layout[LOCAL]
        size, again, width = sequences(layout), recomputation(layout).again, self.width
        wide, rows = max(4 * width // tp, 1), size * self.length // cp
        rate = product_rate(self.dtype, rows, wide, width, 1, self.hardware)
        # Of a position in a block: its products, then the messages of each axis.
        each = self.flops / tp * (1 + again / 3) / rate * self._imbalance(layout)
        each *= 1 + CONTEXT * math.log2(cp)
        if tp > 1 and not self.job.compile.compiles("model"):  # the host finds its operators
            each += (1 + again / 3) * DISPATCHES * self.hardware.dispatch_us * 1e-6 / rows
        each += (8 + 2 * again) * width * 2 * (tp - 1) / tp / self._bandwidth(tp)
        each += (3 + again) * self.keys / tp * 2 * (cp - 1) / self._bandwidth(tp * cp)
        each += (8 + 4 * again) * self.chosen * width * (ep - 1) / ep / self._bandwidth(tp * ep)
        computed = each * batch * self.length * tp * self.layers / self.ranks
        passes = batch * tp * pp * cp // self.ranks // local
        gathers = passes * (1 if keeps_gathered(layout) else 2 * local // size)
        reductions = 1 if pp > 1 else passes
        whole, own = self._whole(layout), self.parameters * copies / self.ranks
        sent = (2 * gathers + 4 * reductions) * (whole - own)
        sent /= self._bandwidth(self.ranks // pp // copies)
        sent += 8 * own * (copies - 1) / copies / self._bandwidth(self.ranks // pp)
        used = 1 - bubble(layout)
        if pp > 1 and keeps_gathered(layout):  # before the first and after the last microbatch
            return float(computed / used + sent)
        return float(max(computed, sent) / used)

    def gib(self, layout: Changes) -> float:
        """Return about the memory that the allocator of a rank reserves, in GiB."""
        tp, pp, cp, copies = layout[TP], layout[PP], layout[CP], layout[COPIES]
        layers, whole = self.layers / pp, self._whole(layout)
        of_gradient = getattr(torch, self.job.training.mixed_precision_reduce).itemsize
        held = self.states * GIB * copies / self.ranks
        has_shards = self.ranks > tp * pp * copies
        if has_shards and keeps_gathered(layout):
            held += (2 + of_gradient if pp > 1 else 2) * whole
        elif has_shards:  # two blocks; a pipeline reduces gradients at the end
            held += 4 * whole / layers + of_gradient * whole / (1 if pp > 1 else layers)
        streams = 2 * self.width / (1 if self.job.parallelism.disable_sequence_parallel else tp)
        each = recomputation(layout).kept * self.kept / tp + streams
        kept = each * layers * _in_flight(layout) + self.outputs / tp * (2 + 4 + 2)
        if layout[MODE] == "full":  # the block that is recomputed
            kept += self.kept / tp
        if pp > 1:  # torch keeps two buffers for each stage and microbatch
            kept += 2 * laps_of(layout) * layout[LOCAL] // layout[SIZE] * streams
        return float(held + kept * sequences(layout) * self.length / cp) / GIB

    def room(self, layout: Changes) -> float:
        """Return about the GiB of a device that the allocator can have."""
        axes = 1 + sum(layout[axis] > 1 for axis in (TP, PP, CP, COPIES))
        room = self.hardware.memory_gib - self.hardware.outside_allocator_gib
        if self.hardware.device_type == "cuda":
            room -= self.hardware.communicator_gib * axes
        return room

    def _whole(self, layout: Changes) -> float:
        """Return the number of parameters that a rank computes with."""
        elsewhere = self.of_experts * (1 - 1 / layout.get(EP, 1))
        return float((self.parameters - elsewhere) / layout[TP] / layout[PP])

    def _imbalance(self, layout: Changes) -> float:
        """Return the work of the fullest stage, relative to the mean."""
        if layout[PP] == 1:
            return 1.0
        # The output layer is about as much as a block, or more; the embedding is hardly any.
        parts, stages = self.layers + 1, layout[PP] * laps_of(layout)
        return float(math.ceil(parts / stages) * stages / parts)

    def _bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of the slowest link among neighboring ranks."""
        inside = ranks <= self.hardware.ranks_per_node
        return (self.hardware.node if inside else self.hardware.network).bandwidth * 1e9


def sequences(layout: Changes) -> int:
    """Return the sequences that a rank computes at a time."""
    return int(layout[SIZE] if layout[PP] > 1 else layout[LOCAL])


def laps_of(layout: Changes) -> int:
    """Return the number of stages of a rank."""
    return 1 if layout[PP] == 1 or SCHEDULES[layout[SCHEDULE]].stages == "one" else 2


def recomputation(layout: Changes) -> Recomputation:
    """Return the recomputation of a layout; of one that a search does not try, that of its kind."""
    tried = [each for each in RECOMPUTATION.values() if each.changes[MODE] == layout[MODE]]
    same = (each for each in tried if each.changes.items() <= {*layout.items()})
    return next(same, tried[-1])


def keeps_gathered(layout: Changes) -> bool:
    """Whether parameters stay whole from a forward to its backward."""
    policies = ("never",) if layout[PP] == 1 else ("never", "default")
    return layout[RESHARD] in policies


def _in_flight(layout: Changes) -> float:
    """Return for how many microbatches a rank keeps activations, about."""
    if (pp := layout[PP]) == 1:
        return 1.0
    count, schedule = layout[LOCAL] // layout[SIZE], SCHEDULES[layout[SCHEDULE]]
    if layout[SCHEDULE] == "GPipe":
        return float(count)
    # A lap later, the forwards are 2 (pp - 1) + pp + 1 stages ahead (arXiv:2104.04473).
    ahead: float = pp if schedule.stages == "one" or schedule.is_v else (3 * pp - 1) / 2
    return float(min(count, ahead))


def bubble(layout: Changes) -> float:
    """Return about the idle share of a pipeline of equal stages."""
    if (pp := layout[PP]) == 1:
        return 0.0
    count, schedule = layout[LOCAL] // layout[SIZE], SCHEDULES[layout[SCHEDULE]]
    laps = laps_of(layout)
    if schedule.splits_backward:
        laps *= 3
    return float((pp - 1) / (laps * count + pp - 1))

"""The layouts of a recipe on a number of ranks, as changes of its settings.

What is computed does not change: neither the batch of a step, nor precision, nor the optimizer.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchtitan.config import Config
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.sparse_decoder import SparseArgs
from torchtitan.models.spec import build_empty
from torchtitan.parallel.schedules import SCHEDULES

Changes = Mapping[str, Any]
"""Settings of a layout by dotted key."""

LEAST_POSITIONS = 1024
"""Positions of a sequence that each rank of context parallelism has at least."""
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
    layout: dict[str, Any] = {
        TP: degrees.tp,
        PP: degrees.pp,
        CP: degrees.cp,
        COPIES: copies,
        SHARDS: -1,
    }
    layout |= {BATCH: batch, LOCAL: job.local_batch(degrees)}
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
    args = job.model_args()
    return args.n_experts if isinstance(args, SparseArgs) else 0


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

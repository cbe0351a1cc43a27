"""Cuts a model into the stages of a pipeline, by the names of its modules.

The indivisible *units* are the modules before the blocks (together), each block, and the modules
after the blocks (together). Everything else in a model, such as its rotary table, is on every
stage. A stage is the model itself without the other stages' units, so its parameters keep the names
they have on one rank.
"""

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from torchtitan.models.spec import Args, ModelSpec, count_parameters
from torchtitan.parallel import schedules
from torchtitan.parallel.schedules import SCHEDULES, Orders, bubble, order, timeline
from torchtitan.parallel.settings import ParallelismConfig

Unit = tuple[str, ...]
"""Names of modules that must be on one stage."""


@dataclass(frozen=True)
class Stages:
    """Stages of a model and their ranks."""

    units: tuple[Unit, ...]
    """Modules of each stage."""
    ranks: tuple[int, ...]
    """Rank of each stage."""

    def of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def units(spec: ModelSpec[Args], model: nn.Module) -> list[Unit]:
    """Return the indivisible units of a model, in order."""
    blocks: list[Unit] = [(name,) for name in spec.blocks(model)]
    extra = spec.auxiliary
    has_extra = extra is not None and getattr(model, extra, None) is not None
    after = (*spec.after_blocks, extra) if extra and has_extra else spec.after_blocks
    return [unit for unit in (spec.before_blocks, *blocks, after) if unit]


def costs(
    config: ParallelismConfig, spec: ModelSpec[Args], args: Args, model: nn.Module, seq_len: int
) -> list[float]:
    """Return the cost of each unit, as balanced by `config`: its parameters or its operations.

    Without costs of modules in the spec, a parameter used in a product costs 6 operations, and the
    rest of the model's operations is attention, divided equally among the blocks.
    """
    parts = [[model.get_submodule(name) for name in unit] for unit in units(spec, model)]
    counts = [[count_parameters(module) for module in part] for part in parts]
    first = 1 if spec.before_blocks else 0
    blocks = range(first, first + len(spec.blocks(model)))
    by_name = spec.flops_of
    if config.pipeline_parallel_balance == "parameters":
        found = [float(sum(count.total for count in part)) for part in counts]
    elif by_name is not None:
        found = [sum(by_name(args, seq_len, name) for name in unit) for unit in units(spec, model)]
    else:
        found = [6.0 * sum(count.total - count.embedding for count in part) for part in counts]
        attention = spec.flops_per_unit(args, seq_len) - sum(found)
        for block in blocks:
            found[block] += attention / len(blocks)
    mean = sum(found[block] for block in blocks) / len(blocks)
    if config.pipeline_parallel_embedding_weight is not None and spec.before_blocks:
        found[0] = config.pipeline_parallel_embedding_weight * mean
    if config.pipeline_parallel_head_weight is not None and spec.after_blocks:
        found[-1] = config.pipeline_parallel_head_weight * mean
    return found


def balance(costs: Sequence[float], stages: int) -> list[slice]:
    """Return non-empty contiguous slices of `costs`, one per stage, minimising the largest sum.

    Ties are broken by the most even cut, then by smaller earlier stages, which keep the activations
    of more microbatches.
    """
    return [
        slice(start, end) for start, end in itertools.pairwise((0, *_ends(tuple(costs), stages)))
    ]


@cache  # a plan cuts the same model for each of its ranks
def _ends(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    worst, _ = _cheapest(costs, stages, max, lambda cost: cost)

    def square(cost: float) -> float:
        return cost**2 if cost <= worst else float("inf")

    return _cheapest(costs, stages, lambda one, other: one + other, square)[1]


def _cheapest(
    costs: Sequence[float],
    stages: int,
    join: Callable[[float, float], float],
    weigh: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the minimal `join` of the weights of all stages, and the ends of the stages: exactly,
    by dynamic programming over the number of units in the first stages."""
    assert 1 <= stages <= len(costs), f"{stages} stages from {len(costs)} units"
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(1, stages + 1):
        left = stages - stage
        best = {
            end: min(
                (join(score, weigh(sums[end] - sums[start])), (*ends, end))
                for start, (score, ends) in best.items()
                if start < end
            )
            for end in range(stage, len(costs) - left + 1)
        }
    return best[len(costs)]


def number_of_stages(config: ParallelismConfig, blocks: int) -> int:
    """Return the number of stages of a recipe without a schedule file, for a number of blocks.

    The schedule may not support that number.
    """
    pp = config.pipeline_parallel_degree
    if pp == 1:
        return 1
    if config.module_fqns_per_model_part:
        return len(config.module_fqns_per_model_part)
    if config.pipeline_parallel_layers_per_stage is not None:
        return -(-blocks // config.pipeline_parallel_layers_per_stage)
    return pp if SCHEDULES[config.pipeline_parallel_schedule].stages == "one" else 2 * pp


def ranks(config: ParallelismConfig, blocks: int) -> tuple[int, ...]:
    """Return the rank of each stage; this and the functions below assume a valid recipe."""
    pp, file = config.pipeline_parallel_degree, config.pipeline_parallel_schedule_csv
    if pp == 1:
        return (0,)
    if file:
        return schedules.ranks(schedules.read(file))
    schedule = SCHEDULES[config.pipeline_parallel_schedule]
    return schedule.ranks(number_of_stages(config, blocks), pp)


def orders(config: ParallelismConfig, blocks: int, microbatches: int) -> Orders:
    """Return each rank's actions; without a file, importing torch's schedules takes seconds."""
    if config.pipeline_parallel_schedule_csv:
        return schedules.read(config.pipeline_parallel_schedule_csv)
    stages = number_of_stages(config, blocks)
    name, pp = config.pipeline_parallel_schedule, config.pipeline_parallel_degree
    return order(name, stages, pp, microbatches)


def describe(config: ParallelismConfig, blocks: int, microbatches: int) -> str:
    """Describe a pipeline in words, with the predicted fraction of idle time."""
    pp, many = config.pipeline_parallel_degree, len(ranks(config, blocks))
    name = config.pipeline_parallel_schedule_csv or config.pipeline_parallel_schedule
    idle = predicted_bubble(config, blocks, microbatches)
    return (
        f"pipeline {name}: {many} stages on {pp} ranks, {microbatches} microbatches per "
        f"step; predicted bubble {idle:.1%}, if all stages take the same time"
    )


def predicted_bubble(config: ParallelismConfig, blocks: int, microbatches: int) -> float:
    """Predict the fraction of time that a pipeline's ranks are idle, if its stages are equal."""
    return bubble(timeline(orders(config, blocks, microbatches)))


def plan(
    config: ParallelismConfig, spec: ModelSpec[Args], args: Args, model: nn.Module, seq_len: int
) -> Stages:
    """Cut `model` as a valid recipe specifies: by hand, or into stages of similar cost."""
    if config.pipeline_parallel_degree == 1:
        return Stages((sum(units(spec, model), ()),), (0,))
    where = ranks(config, len(spec.blocks(model)))
    if config.module_fqns_per_model_part:
        return Stages(config.module_fqns_per_model_part, where)
    names = units(spec, model)
    parts = balance(costs(config, spec, args, model, seq_len), len(where))
    return Stages(tuple(sum(names[part], ()) for part in parts), where)


def build(model: nn.Module, stages: Stages, stage: int) -> nn.Module:
    """Return one stage of `model`, which is unchanged; they share their common modules."""
    others = {name for unit in stages.units for name in unit} - set(stages.units[stage])
    return prune(model, others)


def prune(module: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a copy of `module` without the named submodules, which shares all others.

    An attribute becomes None; an entry of a `ModuleDict` or `ModuleList` is removed, and the others
    keep their names.
    """
    if not names:
        return module
    pruned = copy.copy(module)
    # The copy gets its own tables of submodules, parameters and hooks.
    tables = {
        key: copy.copy(value) for key, value in vars(module).items() if isinstance(value, dict)
    }
    vars(pruned).update(tables)
    for child, inner in _by_child(names):
        if inner:
            setattr(pruned, child, prune(module.get_submodule(child), inner))
        elif isinstance(module, nn.ModuleDict | nn.ModuleList):
            delattr(pruned, child)
        else:
            setattr(pruned, child, None)
    return pruned


def _by_child(names: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each first part of dotted names with the rests that follow it; none for a full name."""
    parts = sorted(name.partition(".") for name in names)
    for child, group in itertools.groupby(parts, key=lambda part: part[0]):
        yield child, [rest for _, _, rest in group if rest]

"""A plan as one JSON object, from which its text and its page are written too: see docs/plan.md."""

from collections.abc import Sequence
from typing import Any

from torchtitan.device import GIB
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.parallel import stages
from torchtitan.plan.changes import FittingChange
from torchtitan.plan.plan import TIME_LIMITS, Plan, Range
from torchtitan.tasks import TASKS

UNKNOWN = {"value": None, "low": None, "high": None}
DAY = 24 * 60 * 60
Json = dict[str, Any]


def plan_json(
    plan: Plan, *, tokens: float | None = None, changes: Sequence[FittingChange] = ()
) -> Json:
    """Return the whole plan.

    Args:
        tokens: budget of the run; None: all steps of the recipe.
        changes: changes after which the recipe fits.
    """
    job, hardware = plan.job, plan.hardware
    degrees, spec, args = job.degrees(plan.ranks), MODELS[job.model.name], job.model_args()
    task, samples = TASKS[spec.task], job.global_batch(degrees)
    units = samples * task.units(job.training.seq_len)
    per_unit = spec.flops_per_unit(args, job.training.seq_len)
    budget = tokens or units * job.training.steps
    network = build_empty(spec.build, args, job.training.seq_len)
    return {
        "world_size": plan.ranks,
        "device_type": plan.device_type,
        "hardware": hardware and hardware.model_dump(include={"name", "description", "source"}),
        "model": {
            "name": job.model.name,
            "flavor": job.model.flavor,
            "parameters": count_parameters(network).total,
        },
        "layout": degrees._asdict(),
        "batch": {
            "samples": samples,
            "local": job.local_batch(degrees),
            "accumulated": job.accumulation(degrees),
            "data_ranks": job.data_ranks(degrees),
            "unit": task.unit,
            "tokens": units,
        },
        "memory": _memory(plan),
        "flops": {
            "per_token": per_unit,
            "per_step": per_unit * units,
            "per_step_per_device": per_unit * units / plan.ranks,
            "executed_per_step_per_device": max(kind.executed.total() for kind in plan.kinds),
        },
        "traffic": [
            {
                "axis": each.axis,
                "operation": each.operation,
                "link": each.link,
                "count": each.count,
                "bytes": each.sent,
            }
            for each in plan.traffic
        ],
        "pipeline": _pipeline(plan, len(spec.blocks(network))),
        "speed": _speed(plan, units),
        "budget": _budget(plan, budget, units),
        "changes": [_change(change, plan, budget) for change in changes],
        "notes": [*plan.notes],
    }


def _memory(plan: Plan) -> Json:
    reserved, fullest, free = plan.reserved_gib, plan.fullest, None
    if plan.capacity_gib is not None:
        free = plan.capacity_gib - plan.outside_gib
    return {
        "peak_allocated_gib": plan.allocated_gib._asdict(),
        "peak_reserved_gib": reserved._asdict(),
        "fits": {
            name: None if free is None else size <= free
            for name, size in reserved._asdict().items()
        },
        "capacity_gib": plan.capacity_gib,
        "outside_allocator_gib": plan.outside_gib,
        "room_gib": plan.room_gib,
        "least_devices": plan.least_devices,
        "moment": fullest.memory.moment,
        "rank": fullest.stage_ranks[0] * plan.ranks // plan.job.degrees(plan.ranks).pp,
        "largest_request_gib": max(kind.memory.largest_request for kind in plan.kinds) / GIB,
        "ranks": _kinds(plan),
    }


def _kinds(plan: Plan) -> list[Json]:
    """Describe each kind of rank."""
    each = plan.ranks // plan.job.degrees(plan.ranks).pp
    return [
        {
            "pipeline_ranks": [*kind.stage_ranks],
            "count": kind.ranks,
            "first_rank": kind.stage_ranks[0] * each,
            "by_kind_gib": {
                name: size / GIB for name, size in sorted(kind.by_kind.items()) if size
            },
            "activations_gib": {
                name: size / GIB for name, size in sorted(kind.step.activations().items())
            },
            "allocator_gib": (kind.memory.peak_reserved - kind.allocated) / GIB,
            "outside_gib": dict(kind.outside),
            "outside_allocator_gib": sum(kind.outside.values()),
            "host_gib": kind.step.host_bytes() / GIB,
            "peak_allocated_gib": kind.allocated / GIB,
            "peak_reserved_gib": kind.memory.peak_reserved / GIB,
            "largest_request_gib": kind.memory.largest_request / GIB,
            "moment": kind.memory.moment,
        }
        for kind in plan.kinds
    ]


def _pipeline(plan: Plan, blocks: int) -> Json | None:
    job, degrees = plan.job, plan.job.degrees(plan.ranks)
    if degrees.pp == 1:
        return None
    config = job.parallelism
    microbatches = config.microbatches(job.local_batch(degrees))
    return {
        "schedule": config.pipeline_parallel_schedule_csv or config.pipeline_parallel_schedule,
        "stages": len(stages.ranks(config, blocks)),
        "microbatches": microbatches,
        "bubble": plan.time.bubble / plan.time.seconds if plan.time else None,
        "bubble_if_stages_are_equal": stages.predicted_bubble(config, blocks, microbatches),
    }


def _speed(plan: Plan, units: int) -> Json:
    time = plan.time
    if time is None:
        names = ("seconds_per_step", "tokens_per_second_per_device", "mfu", "tokens_per_day")
        return dict.fromkeys(names, UNKNOWN) | {"seconds": None}
    rate = time.tokens_per_second_per_device
    return {
        "seconds_per_step": Range.within(time.seconds, TIME_LIMITS)._asdict(),
        "tokens_per_second_per_device": _rate(rate),
        "mfu": UNKNOWN if time.mfu is None else _rate(time.mfu),
        "tokens_per_day": _rate(units / time.seconds * DAY),
        "seconds": {
            "compute": time.compute,
            "update": time.update,
            "exposed": dict(time.exposed),
            "bubble": time.bubble,
            "host_bound": time.host_bound,
        },
    }


def _rate(value: float) -> dict[str, float]:
    """Return a rate with the limits that follow from those of the time of a step."""
    fast, slow = TIME_LIMITS
    return Range(value, value / slow, value / fast)._asdict()


def _budget(plan: Plan, tokens: float, units: int) -> Json:
    steps = tokens / units
    seconds = None if plan.time is None else steps * plan.time.seconds
    return {
        "tokens": tokens,
        "steps": steps,
        "days": None if seconds is None else seconds / DAY,
        "device_hours": None if seconds is None else seconds * plan.ranks / 3600,
    }


def _change(change: FittingChange, before: Plan, tokens: float) -> Json:
    after, task = change.plan, TASKS[MODELS[change.plan.job.model.name].task]
    samples = after.job.global_batch(after.job.degrees(after.ranks))
    units = samples * task.units(after.job.training.seq_len)
    return {
        "flags": [*change.flags],
        "peak_reserved_gib": change.plan.reserved_gib._asdict(),
        "room_gib": change.plan.room_gib,
        "device_time": change.slowdown(before),
        "world_size": after.ranks,
        "speed": _speed(after, units),
        "budget": _budget(after, tokens, units),
    }

"""Recordings that several tests look at: each is made once in a process, and never changed."""

import gc
from unittest import mock

from tests import layouts
from torchtitan.parallel.schedules import SCHEDULES
from torchtitan.plan import fake_rank
from torchtitan.plan.expansion import expand
from torchtitan.plan.plan import plan as make_plan

RECORDINGS = {}


def small(layout):
    """A layout with one block in each stage of its pipeline, unless it says what is in them."""
    settings = layout.sections.get("parallelism", {})
    own = {"module_fqns_per_model_part", "pipeline_parallel_schedule_csv"} & {*settings}
    if layout.pp == 1 or own:
        return layout
    kind = SCHEDULES[settings.get("pipeline_parallel_schedule", "1F1B")]
    return layout.of(n_layers=layout.pp * (1 if kind.stages == "one" else 2))


def job(layout):
    """The recipe of a layout, or of the small one of a name, that all these tests record."""
    return layouts.job(
        small(layouts.layout(layout)) if isinstance(layout, str) else layout, "AdamW"
    )


def record(job, ranks, rank=0, *, device_type="cpu", graphs=None):
    """The recording of a rank whose blocks are not compiled."""
    key = (repr(job), ranks, rank, device_type)
    if key not in RECORDINGS:
        RECORDINGS[key] = fake_rank.record(job, ranks, rank, device_type=device_type)
        gc.freeze()
    return RECORDINGS[key]


def step(job, ranks, rank=0, device_type="cpu"):
    """The whole step of a rank."""
    recorded = record(job, ranks, rank, device_type=device_type)
    return expand(recorded, job.accumulation(job.degrees(ranks)))


def plan(job, ranks, **settings):
    """A plan from these recordings."""
    with mock.patch("torchtitan.plan.plan.record", record):
        return make_plan(job, ranks, **settings)

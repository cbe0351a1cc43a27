"""A step recorded from few blocks, microbatches and batches equals the step recorded in full."""

from pathlib import Path

import pytest
import torch

from tests import layouts
from tests.layouts import FULL, INTERLEAVED, RESHARD, case, schedule
from tests.tables import table
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.models import MODELS
from torchtitan.parallel.schedules import order
from torchtitan.plan.expansion import expand
from torchtitan.plan.fake_rank import record
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.messages import messages_of
from torchtitan.plan.plan import alike_ranks
from torchtitan.plan.shortening import Abridged
from torchtitan.plan.speed import step_time

CASES = {
    "FSDP 2, accumulating 6": case(shard=2, batch=1, training={"global_batch_size": 12}),
    "TP 2, full recomputation": case(tp=2, batch=8, recompute=FULL).of(n_layers=6),
    "PP 2, 1F1B": case(2, batch=8),
    "FSDP 2 x PP 2, Interleaved1F1B": schedule("Interleaved1F1B", shard=2),
    "FSDP 2 x PP 2 in bfloat16, accumulating 2": case(
        *(2, 1, 2),
        batch=4,
        training={"mixed_precision_param": "bfloat16", "global_batch_size": 16},
        **INTERLEAVED,
    ).of(n_layers=28),
    "PP 2, ZBVZeroBubble": schedule("ZBVZeroBubble").of(n_layers=28),
    "PP 2, DualPipeV": schedule("DualPipeV"),
}


def step(layout, shorten, rank=None):
    layers = layout.model.get("n_layers", 14 if layout.pp > 1 else 7)
    job = layouts.job(layout, "AdamW", model={"n_layers": layers})
    rank = layout.ranks - 1 if rank is None else rank
    recording = record(job, layout.ranks, rank, shorten=shorten)
    return expand(recording, job.accumulation(job.degrees(layout.ranks)))


@pytest.mark.parametrize(
    "name",
    tiers(
        CASES,
        ["TP 2, full recomputation"],
        [
            *("FSDP 2, accumulating 6", "FSDP 2 x PP 2 in bfloat16, accumulating 2"),
            *("PP 2, 1F1B", "PP 2, ZBVZeroBubble", "PP 2, DualPipeV"),
        ],
    ),
)
def test_a_short_recording_stands_for_the_whole_step(name):
    short, whole = (step(CASES[name], shorten) for shorten in (True, False))
    assert len(short.source.recording.events) < len(whole.source.recording.events)
    (moment, found), (expected_moment, expected) = short.peak(), whole.peak()
    assert moment.rstrip("0123456789") == expected_moment.rstrip("0123456789")
    assert found.total() == pytest.approx(expected.total(), rel=1e-3)
    for kind in expected:
        assert found[kind] == pytest.approx(expected[kind], abs=1e-3 * expected.total())
    (*_, (_, left)), (*_, (_, expected_left)) = short.levels(), whole.levels()
    assert left.total() == pytest.approx(expected_left.total(), abs=16)
    flops, expected_flops = (
        sum(kernel.flops for segment in each.segments for kernel in segment.kernels)
        for each in (short, whole)
    )
    assert flops == expected_flops
    assert messages_of(short) == messages_of(whole)
    assert [part.action for part in short.parts] == [part.action for part in whole.parts]


@pytest.mark.gate
def test_a_short_recording_gathers_as_often_as_the_whole_step():
    """Whether an action gathers follows from the one before it, of all kinds in the first stage."""
    layout = case(
        *(4, 1, 2),
        batch=12,
        training={"global_batch_size": 24},
        pipeline_parallel_microbatch_size=1,
        **{RESHARD: "always"},
    )
    short, whole = (step(layout.of(n_layers=12), shorten, rank=0) for shorten in (True, False))
    assert short.source.pipeline.microbatches < whole.source.pipeline.microbatches
    assert messages_of(short) == messages_of(whole)
    assert short.peak()[1].total() == pytest.approx(whole.peak()[1].total(), rel=1e-3)


def test_first_and_last_microbatches_stand_for_themselves():
    orders = order("1F1B", 4, 4, 32)
    chosen = Abridged.of(orders, 1, shorten=True)
    assert chosen.microbatches <= 6
    first, last = chosen.actions[0], chosen.actions[-1]
    assert chosen.recorded[first].microbatch == 0
    assert chosen.recorded[last].microbatch == chosen.microbatches - 1
    times = sum(chosen.times(number, first.stage) for number in range(chosen.microbatches))
    assert times == 32


RECIPES = {name: f"{name}_debug" for name in MODELS if not name.startswith("tiny")}
RECIPES["llama3"] = "debug_model"
"""A recipe of each family; those of the tests are no others."""
SMALL = dict(table(__file__, "small_families.txt"))

OF_A_RELEASE = ["qwen2", "mistral", "mixtral", "olmo2"]
"""Families whose blocks differ from those of others in nothing that a recording sees."""


def of_family(family, *flags):
    path = Path("train_configs") / f"{RECIPES[family]}.toml"
    few = ("--training.local_batch_size=1", "--training.global_batch_size=2", *flags)
    return load_job(path, few, 2, "cuda", exempt=("model.tokenizer_path",)).config


def assert_alike(job):
    """A shortened recording has the memory, time and FLOPs of the whole one, to a percent.

    Returns:
        the numbers of events of both.
    """
    found = []
    for shorten in (True, False):
        torch._dynamo.reset()
        recorded = record(job, 2, shorten=shorten, device_type="cuda")
        whole = expand(recorded, job.accumulation(job.degrees(2)))
        seconds = step_time(job, 2, {0: whole}, find_hardware("h100")).seconds
        flops = sum(kernel.flops for each in whole.segments for kernel in each.kernels)
        found.append([whole.peak()[1].total(), seconds, flops, len(recorded.recording.events)])
    (*short, events), (*expected, all_events) = found
    assert short == pytest.approx(expected, rel=0.01)
    return events, all_events


@pytest.mark.parametrize("family", tiers(RECIPES, ["deepseek_v3", "gpt_oss"], OF_A_RELEASE))
def test_a_short_recording_of_a_family_stands_for_the_whole_step(family):
    events, all_events = assert_alike(of_family(family, *SMALL[family].split()))
    assert events < all_events


def test_ranks_of_a_pipeline_are_alike_if_their_blocks_are(tmp_path):
    flags = ("--model.n_layers=12", "--parallelism.pipeline_parallel_degree=4")
    flags += ("--model.top_k=1", "--model.n_experts=2")
    path = "train_configs/gpt_oss_debug.toml"
    job = load_job(path, flags, 4, "cuda", exempt=("model.tokenizer_path",)).config
    # Of three blocks on a rank, two have windows on one and one on the next.
    assert alike_ranks(job) == [[0], [1], [2], [3]]
    rows = order("1F1B", 4, 4, 8).values()
    (file := tmp_path / "own.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    flags = ("--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8")
    flags += ("--validation.enable=false",)
    for own, alike in ("", [[0], [1, 2], [3]]), (str(file), [[0], [1], [2], [3]]):
        also = f"--parallelism.pipeline_parallel_schedule_csv={own}"
        job = load_job("train_configs/debug_model.toml", [*flags, also], 4, "cuda").config
        assert alike_ranks(job) == alike


SIZES = [
    (family, flavor)
    for family in RECIPES
    for flavor in MODELS[family].flavors
    if flavor != "debugmodel"
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "flavor"), SIZES)
def test_a_short_recording_of_a_published_size_stands_for_the_whole_step(family, flavor):
    flags = [f"--model.flavor={flavor}", "--training.mixed_precision_param=bfloat16"]
    flags += ["--compile.enable=true"]
    if family != "vit_mae":
        flags += ["--model.tokenizer_path=none", "--training.seq_len=8192"]
    assert_alike(of_family(family, *flags))

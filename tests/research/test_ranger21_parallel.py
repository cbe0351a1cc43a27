"""Ranger21 on every layout is that of one rank, to 1e-6, with two reductions a step."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import formulas
from tests import tiny
from tests.layouts import ONE, Case, case
from tests.ranks import run_ranks
from tests.research.layouts import ROTATED, SIMPLE, installed
from tests.runs import Trace, compare, losses, trace, train
from tests.tiers import tiers
from tests.training.test_optimizers import a_rate_trains_the_debug_model
from torchtitan.job import JobConfig
from torchtitan.parallel import ParallelismConfig
from torchtitan.research.common.unit_sums import Reduction
from torchtitan.research.ranger21.ranger21 import Ranger21Optimizer

RANGER: dict[str, Any] = {"name": "Ranger21", "lr": 1e-3, "lookahead_steps": 2}
"""All on, with two averages in 5 steps."""
GROUPS = [
    {"roles": ["embedding"], "lr_factor": 0.5, "weight_decay": 0.0},
    {"roles": ["norm", "head"], "lr_factor": 0.3, "beta1": 0.8, "beta2": 0.9},
]
TO_NORM_1 = {"norm_loss": 0.0, "decay_to_norm_1": True}
UNEVEN = (
    RANGER
    | TO_NORM_1
    | {"normalize_gradients": False, "weight_decay": 0.1, "softplus": 0.0, "eps": 1e-6}
)
"""Normalization hides the size of gradients, which decay depends on."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "all": RANGER,
    "as they come": UNEVEN,
    "groups": RANGER | {"groups": GROUPS, "centralize_gradients": False, "amsgrad": False},
}
LAYOUTS = installed(
    {
        "DDP 2": case(replicate=2),
        "FSDP 2": case(shard=2),
        "FSDP 4": case(shard=4),
        "HSDP 2 x 2": case(replicate=2, shard=2),
        "TP 2": case(tp=2),
        "TP 2, no sequence parallelism": case(tp=2, disable_sequence_parallel=True),
        "PP 2": case(2, batch=4),
        "FSDP 2 x TP 2": case(shard=2, tp=2),
        "CP 2 x TP 2": case(cp=2, tp=2),
        "FSDP 2 x PP 2": case(2, shard=2, pipeline_parallel_schedule="Interleaved1F1B"),
        "HSDP 2 x 2 x TP 2": case(replicate=2, shard=2, tp=2),
        "FSDP 2 x TP 2 x PP 2": case(2, shard=2, tp=2),
        "SimpleFSDP 2 x TP 2": case(shard=2, tp=2, sharding=SIMPLE),
        "rotated 2": case(shard=2, sharding=ROTATED),
        "FSDP 2, CPU offload": case(shard=2, training={"enable_cpu_offload": True}),
    }
)


def job(
    layout: Case, optimizer: dict[str, Any], folder: Path | str = "unused", **sections: Any
) -> JobConfig:
    # The vocabulary of 301 is divided by none of them.
    recipe = layout.recipe(model={"flavor": "deep"}, optimizer=optimizer, **sections)
    return tiny.job(folder, **recipe)


def traces(jobs: list[JobConfig]) -> list[tuple[Trace, list[str]]]:
    return [counted(job) for job in jobs]


def counted(job: JobConfig) -> tuple[Trace, list[str]]:
    """A run, and which reductions its last update made."""
    made: list[str] = []
    step, all_reduce = Ranger21Optimizer.step, dist.all_reduce

    def counting(self: Ranger21Optimizer) -> None:
        made.clear()
        dist.all_reduce = lambda *a, **k: (made.append("all_reduce"), all_reduce(*a, **k))[1]
        try:
            step(self)
        finally:
            dist.all_reduce = all_reduce

    Ranger21Optimizer.step = counting  # type: ignore[method-assign,assignment]
    try:
        return trace(job, True), made
    finally:
        Ranger21Optimizer.step = step  # type: ignore[method-assign]


@cache
def reference() -> list[Trace]:
    (found,) = run_ranks(traces, 1, [job(ONE, optimizer) for optimizer in OPTIMIZERS.values()])
    assert not any(made for _, made in found)
    return [own for own, _ in found]


@pytest.mark.parametrize(
    "name",
    tiers(LAYOUTS, ["FSDP 2"], gate=["HSDP 2 x 2", "TP 2", "PP 2"]),
)
def test_layout_trains_the_same_run_as_one_rank(name: str) -> None:
    layout = LAYOUTS[name]
    results = run_ranks(traces, layout.ranks, [job(layout, o) for o in OPTIMIZERS.values()])
    reductions = (layout.shard * layout.cp * layout.tp > 1) + (layout.pp > 1)
    for rank, found in enumerate(results):
        for optimizer, (own, made), expected in zip(OPTIMIZERS, found, reference(), strict=True):
            compare(own, expected, f"{optimizer}, rank {rank}", 1e-6)
            assert len(made) == reductions


def traces_by_themselves(jobs: list[JobConfig]) -> list[tuple[Trace, list[str]]]:
    """Runs whose ranks do not tell each other their sums."""
    Reduction.sums = lambda self: iter(self.parts)  # type: ignore[method-assign]
    return traces(jobs)


@pytest.mark.slow
def test_comparison_would_see_that_a_rank_knows_its_own_sums_alone() -> None:
    """On whatever splits rows, tensors or stages."""
    for name in ("FSDP 2", "TP 2", "PP 2"):
        ((found, made),) = run_ranks(traces_by_themselves, 2, [job(LAYOUTS[name], UNEVEN)])[0]
        assert not made
        expected = reference()[list(OPTIMIZERS).index("as they come")]
        with pytest.raises(AssertionError):
            compare(found, expected, name, 1e-6)


def resumable(folder: Path, layout: Case, steps: int) -> JobConfig:
    """Saved after 3 steps: in the middle of a period, and after an odd one."""
    return job(
        layout,
        RANGER,
        folder,
        training={"steps": steps},
        lr_scheduler={"name": "ranger21", "total_steps": 5},
        checkpoint={"enable": True, "interval": 3},
    )


@pytest.mark.gate
def test_resumes_on_another_layout_in_the_middle_of_a_period(tmp_path: Path) -> None:
    expected = run_ranks(train, 2, resumable(tmp_path / "whole", LAYOUTS["FSDP 2"], 5))
    run_ranks(train, 2, resumable(tmp_path / "FSDP 2", LAYOUTS["FSDP 2"], 3))
    for name in ("TP 2", "PP 2"):
        shutil.copytree(tmp_path / "FSDP 2", tmp_path / name)
        for rank in run_ranks(train, 2, resumable(tmp_path / name, LAYOUTS[name], 5)):
            for parameter, weight in rank.items():
                assert (weight - expected[0][parameter]).abs().max() <= 1e-6, parameter
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    weights = run_ranks(train, 2, resumable(tmp_path / "FSDP 2", LAYOUTS["FSDP 2"], 5))
    assert all(torch.equal(weights[0][n], w) for n, w in expected[0].items())


def test_what_it_sends_is_in_no_formula() -> None:
    job = tiny.job(parallelism={"data_parallel_shard_degree": 2}, optimizer={"name": "Ranger21"})
    with pytest.raises(NotImplementedError, match="no formulas for the traffic of Ranger21"):
        formulas(job, 2)
    assert formulas(job.model_copy(update={"parallelism": ParallelismConfig()}), 1) == []


@pytest.mark.gate
def test_a_rate_and_nothing_else_trains_the_debug_model() -> None:
    a_rate_trains_the_debug_model("Ranger21")

"""The spine: every layout trains the same run as one rank.

Loss, gradient norm and every weight are compared after each of 5 steps, with targets that differ
in number from rank to rank, so that a gradient that is averaged where it should be summed, or
summed twice, cannot hide. SGD is there because Adam's update does not change with the scale of
the gradient.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import Trace, trace
from torchtitan.job import JobConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout: its number of ranks and how its recipe differs from the one-rank one."""

    ranks: int
    replicate: int = 1
    local_batch_size: int = 2
    training: tuple[tuple[str, Any], ...] = ()
    sections: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def job(self, optimizer: str) -> JobConfig:
        sections = {name: dict(values) for name, values in self.sections}
        parallelism = {"data_parallel_replicate_degree": self.replicate}
        sections["parallelism"] = parallelism | sections.get("parallelism", {})
        sections["training"] = {"local_batch_size": self.local_batch_size, **dict(self.training)}
        return recipe(optimizer, **sections)


def recipe(optimizer: str, **sections: dict[str, Any]) -> JobConfig:
    settings = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 0.5, "momentum": 0.9}}[optimizer]
    # Clipping acts in every step, so that its scale is compared too.
    sections["training"] = {"max_norm": 0.3} | sections.get("training", {})
    return tiny.job(optimizer={"name": optimizer, **settings}, **sections)


RESHARD = "fsdp_reshard_after_forward"
LAYOUTS = {
    "DDP 2": Case(2, replicate=2),
    "DDP 4": Case(4, replicate=4),
    "DDP 2, accumulating 4": Case(2, replicate=2, local_batch_size=1),
    "FSDP 2": Case(2),
    "FSDP 4": Case(4),
    "FSDP 2, accumulating 4": Case(2, local_batch_size=1),
    "FSDP 2, always reshard": Case(2, sections=(("parallelism", ((RESHARD, "always"),)),)),
    "FSDP 2, never reshard": Case(2, sections=(("parallelism", ((RESHARD, "never"),)),)),
    "FSDP 2, CPU offload": Case(2, training=(("enable_cpu_offload", True),)),
    "HSDP 2 x 2": Case(4, replicate=2),
    "HSDP 2 x 2, accumulating 2": Case(4, replicate=2, local_batch_size=1),
    "FSDP 2, full recomputation": Case(
        2, sections=(("activation_checkpoint", (("mode", "full"),)),)
    ),
    "FSDP 2, selective recomputation": Case(
        2,
        sections=(
            ("activation_checkpoint", (("mode", "selective"), ("selective_ac_option", "op"))),
        ),
    ),
    "one rank, accumulating 8": Case(1, local_batch_size=1),
    "one rank, CPU offload": Case(1, training=(("enable_cpu_offload", True),)),
}


@cache
def reference(optimizer: str, device: str) -> Trace:
    """One rank, the whole batch at once, nothing wrapped."""
    job = recipe(optimizer, training={"local_batch_size": 8})
    (result,) = run_ranks(trace, 1, job, True, device, device=device)
    return result


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_the_same_run_as_one_rank(name: str, optimizer: str, device: str) -> None:
    case = LAYOUTS[name]
    if device == "cuda" and torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} GPUs")
    expected = reference(optimizer, device)
    results = run_ranks(trace, case.ranks, case.job(optimizer), True, device, device=device)
    for rank, found in enumerate(results):
        compare(found, expected, f"rank {rank}")


def compare(found: Trace, expected: Trace, where: str) -> None:
    assert len(found.losses) == len(expected.losses) == 5
    for step in range(5):
        assert found.losses[step] == pytest.approx(expected.losses[step], rel=1e-5), where
        assert found.grad_norms[step] == pytest.approx(expected.grad_norms[step], rel=1e-4), where
        assert found.weights[step].keys() == expected.weights[step].keys()
        for name, weight in expected.weights[step].items():
            difference = (found.weights[step][name] - weight).abs().max().item()
            assert difference <= 1e-5, f"{where}, step {step + 1}: {name} is off by {difference}"


def test_reference_learns_and_is_uneven() -> None:
    """The comparison means something: weights move, norms are clipped, counts differ by rank."""
    expected = reference("SGD", "cpu")
    first, last = expected.weights[0], expected.weights[-1]
    assert all((first[name] - last[name]).abs().max() > 1e-4 for name in first)
    assert min(expected.grad_norms) > 0.3


def test_start_is_bit_identical() -> None:
    job = tiny.job(training={"steps": 1}, optimizer={"name": "SGD", "lr": 1e-30})
    (one,) = run_ranks(trace, 1, job)
    for found in run_ranks(trace, 4, job):
        assert all(torch.equal(found.weights[0][n], w) for n, w in one.weights[0].items())

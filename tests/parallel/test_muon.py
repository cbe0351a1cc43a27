"""Muon on every layout is the run of one rank; resumed on another layout, the run never stopped."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.layouts import AFTERWARDS, ONE, ROTATED, SIMPLE, Case, case
from tests.ranks import run_ranks
from tests.runs import Trace, assert_complete, compare, trace
from tests.tiers import tiers
from torchtitan.job import JobConfig

MUON: dict[str, Any] = {
    "name": "Muon",
    "lr": 1e-3,
    # In bfloat16, layouts differ by its rounding.
    "ns_dtype": "float32",
    # With a smaller eps the rounding of the smallest gradients is seen in the weights.
    "adamw": {"lr": 2e-3, "eps": 1e-6},
    "groups": [{"names": ["layers.*.wq.weight"], "lr_factor": 2.0, "momentum": 0.5}],
}
LAYOUTS = {
    "DDP 2": case(replicate=2),
    "FSDP 2": case(shard=2),
    "FSDP 4": case(shard=4),
    "HSDP 2 x 2": case(replicate=2, shard=2),
    "HSDP 2 x 2, copies added up afterwards": case(replicate=2, shard=2, communication=AFTERWARDS),
    "TP 2": case(tp=2),
    "CP 2": case(cp=2),
    "PP 2": case(2, batch=4),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x PP 2": case(2, shard=2),
    "FSDP 2 x TP 2 x PP 2": case(2, shard=2, tp=2),
    "FSDP 2 x CP 2 x TP 2": case(shard=2, cp=2, tp=2),
    "HSDP 2 x 2 x TP 2": case(replicate=2, shard=2, tp=2),
    "SimpleFSDP 2": case(shard=2, sharding=SIMPLE),
    "rotated 2": case(shard=2, sharding=ROTATED),
}


def job(layout: Case, folder: Path | str = "unused", **sections: Any) -> JobConfig:
    optimizer = MUON | sections.pop("optimizer", {})
    sections["training"] = {"max_norm": 0.3} | sections.get("training", {})
    # The first dim of some matrices is one that four ranks do not divide, and tensor ranks do.
    flavor = {"flavor": "deep" if layout.pp > 1 else "flat"}
    return tiny.job(folder, **layout.recipe(model=flavor, optimizer=optimizer, **sections))


@cache
def reference(flavor: str) -> Trace:
    made = job(case(2, batch=4) if flavor == "deep" else ONE)
    one = job(ONE).model_copy(update={"model": made.model})
    (found,) = run_ranks(trace, 1, one, True)
    return found


@pytest.mark.parametrize(
    "name",
    tiers(LAYOUTS, ["HSDP 2 x 2", "FSDP 2 x TP 2"], [name for name in LAYOUTS if "x 2 x" in name]),
)
def test_muon_trains_the_same_run_as_one_rank(name: str) -> None:
    layout = LAYOUTS[name]
    made = job(layout)
    expected = reference(made.model.flavor)
    found = run_ranks(trace, layout.ranks, made, True)
    assert_complete(found, expected)
    for rank, own in enumerate(found):
        compare(own, expected, f"rank {rank}")

"""Ranger21 on every layout is that of one rank, to 1e-6, with two reductions a step."""

from functools import cache
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests import tiny
from tests.layouts import ONE, case, named, resumed
from tests.ranks import run_ranks
from tests.research.layouts import ROTATED, SIMPLE, installed
from tests.runs import compare, each, resumes, trace
from tests.tiers import tiers
from torchtitan.research import ranger21
from torchtitan.research.ranger21 import Ranger21Optimizer

RANGER = {"name": "Ranger21", "lr": 1e-3, "lookahead_steps": 2}
"""All on, with an average in 3 steps."""
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
OPTIMIZERS = {
    "all": RANGER,
    "as they come": UNEVEN,
    "groups": RANGER | {"groups": GROUPS, "centralize_gradients": False, "amsgrad": False},
}
LAYOUTS = named(
    *("DDP 2", "FSDP 2", "FSDP 4", "HSDP 2 x 2", "TP 2", "TP 2, no sequence parallelism"),
    *("FSDP 2 x TP 2", "HSDP 2 x 2 x TP 2", "FSDP 2 x TP 2 x PP 2", "FSDP 2, CPU offload"),
    "FSDP 2 x PP 2, Interleaved1F1B",
) | installed(
    {
        "PP 2": case(2, batch=4),
        "CP 2 x TP 2": case(cp=2, tp=2),
        "SimpleFSDP 2 x TP 2": case(shard=2, tp=2, sharding=SIMPLE),
        "rotated 2": case(shard=2, sharding=ROTATED),
    }
)


def blocks_of(layout):
    """As few as its stages need."""
    return 4 if layout.pp > 1 else 1


def job(layout, optimizer, folder="unused", blocks=0, **sections):
    # The vocabulary of 301 is divided by none of them.
    model = {"flavor": "deep", "n_layers": blocks or blocks_of(layout)}
    recipe = layout.recipe(model=model, optimizer=optimizer, **sections)
    return tiny.job(folder, **recipe)


def counted(job):
    """A run, and which reductions its last update made."""
    made, step = [], Ranger21Optimizer.step

    def counting(self):
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            step(self)
        made[:] = ["all_reduce"] * reduce.call_count

    with patch.object(Ranger21Optimizer, "step", counting):
        return trace(job, True), made


@cache
def reference(blocks):
    one = [job(ONE, optimizer, blocks=blocks) for optimizer in OPTIMIZERS.values()]
    (found,) = run_ranks(each, 1, counted, one)
    assert not any(made for _, made in found)
    return [own for own, _ in found]


@pytest.mark.parametrize("name", tiers(LAYOUTS, ["FSDP 2"], gate=["HSDP 2 x 2", "TP 2", "PP 2"]))
def test_layout_trains_the_same_run_as_one_rank(name):
    layout = LAYOUTS[name]
    results = run_ranks(each, layout.ranks, counted, [job(layout, o) for o in OPTIMIZERS.values()])
    one = reference(blocks_of(layout))
    reductions = (layout.shard * layout.cp * layout.tp > 1) + (layout.pp > 1)
    for rank, found in enumerate(results):
        for optimizer, (own, made), expected in zip(OPTIMIZERS, found, one, strict=True):
            compare(own, expected, f"{optimizer}, rank {rank}", 1e-6)
            assert len(made) == reductions


def counted_by_itself(job):
    """A run whose ranks do not tell each other their sums."""
    ranger21.sum_over = lambda group, parts: parts
    return counted(job)


@pytest.mark.slow
def test_comparison_would_see_that_a_rank_knows_its_own_sums_alone():
    """On whatever splits rows, tensors or stages."""
    for name in ("FSDP 2", "TP 2", "PP 2"):
        found, made = run_ranks(counted_by_itself, 2, job(LAYOUTS[name], UNEVEN))[0]
        assert not made
        expected = reference(blocks_of(LAYOUTS[name]))[list(OPTIMIZERS).index("as they come")]
        with pytest.raises(AssertionError):
            compare(found, expected, name, 1e-6)


def resumable(folder, layout, steps):
    """Saved after 3 steps: in the middle of a period, and after an odd one."""
    sections = resumed(steps, 5, 3)
    sections["lr_scheduler"]["name"] = "ranger21"
    return job(layout, RANGER, folder, blocks=2, **sections)


@pytest.mark.gate
def test_resumes_on_another_layout_in_the_middle_of_a_period(tmp_path):
    others = {name: LAYOUTS[name] for name in ("TP 2", "PP 2")}
    resumes(resumable, tmp_path, LAYOUTS["FSDP 2"], others, 3, 5, 1e-6)

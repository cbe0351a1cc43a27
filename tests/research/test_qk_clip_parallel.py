"""Muon with a limit of attention logits on every layout is the run of one rank."""

from collections import Counter
from functools import cache

import pytest

from tests.collectives import Message
from tests.layouts import OPERATORS, RING, case, layout, named, resumed
from tests.parallel import test_collectives, test_compile, test_muon
from tests.ranks import run_ranks
from tests.research import layouts
from tests.research.layouts import installed
from tests.runs import Trace, assert_complete, compare, parts, resumes
from tests.tiers import tiers
from torchtitan.device import Device
from torchtitan.tools.verify.measure import training

LIMIT = 0.04
"""Some heads are above it in every step, and others are not."""
LAYOUTS = named(
    *("DDP 2", "FSDP 2, full recomputation", "FSDP 4", "HSDP 2 x 2", "TP 2", "CP 2, documents"),
    *("CP 2, balanced by documents", "CP 2, Ulysses, documents", "PP 2, ZBVZeroBubble"),
    *("FSDP 2 x TP 2", "TP 2 x PP 2", "FSDP 2 x CP 2 x TP 2", "FSDP 2 x TP 2 x PP 2"),
)
LAYOUTS["CP 2, ring, operators recomputed"] = case(cp=2, recompute=OPERATORS, **RING)
LAYOUTS["PP 2"] = case(2, batch=4)
GATE = (
    *("DDP 2", "FSDP 2, full recomputation", "HSDP 2 x 2", "CP 2, documents", "PP 2"),
    *("CP 2, balanced by documents", "CP 2, Ulysses, documents", "FSDP 2 x TP 2"),
)


def job(layout, folder="unused", **sections):
    optimizer = {"qk_clip": LIMIT} | sections.pop("optimizer", {})
    return test_muon.job(layout, folder, optimizer=optimizer, **sections)


def limited(job):
    """A run, and the largest attention logit of each of its steps."""
    result, largest = Trace([], [], []), []
    for run, row in training(job, Device("cpu"), uneven=True):
        result.losses.append(row["loss"])
        result.grad_norms.append(row["grad_norm"])
        result.weights.append(parts(run))
        largest.append(row["max_attention_logit"])
    return result, largest


@cache
def reference(flavor, documents):
    one = job(case(batch=8, documents=documents), model={"flavor": flavor})
    (found,) = run_ranks(limited, 1, one)
    return found


@pytest.mark.parametrize(
    "name", tiers(LAYOUTS, ["TP 2", "CP 2, ring, operators recomputed"], gate=GATE)
)
def test_a_limit_of_logits_gives_the_same_run_as_on_one_rank(name):
    is_the_run_of_one_rank(LAYOUTS[name])


def is_the_run_of_one_rank(layout):
    mine = job(layout)
    expected, largest = reference(mine.model.flavor, mine.model.attn_mask_type == "block_causal")
    assert min(largest) > LIMIT  # in every step some head is scaled down
    found = run_ranks(limited, layout.ranks, mine)
    assert_complete([trace for trace, _ in found], expected)
    for rank, (trace, logits) in enumerate(found):
        assert logits == pytest.approx(largest, rel=1e-5)
        compare(trace, expected, f"rank {rank}")


SIMPLE = installed({"SimpleFSDP 2": case(shard=2, sharding=layouts.SIMPLE)})


@pytest.mark.parametrize("name", tiers(SIMPLE, []))
def test_parameters_that_are_gathered_in_a_graph(name):
    is_the_run_of_one_rank(SIMPLE[name])


SENDING = {
    "PP": layout("FSDP 2 x PP 2"),
    "CP": layout("CP 2, ring, full recomputation"),
    "CP, all at once": layout("CP 2"),
    "CP, operators recomputed": layout("CP 2, operators recomputed"),
}


# Plans have no features of a step: not the keys that context ranks fetch to see all logits, nor the
# largest logit of each head of all stages.
UNPLANNED = {
    "PP": [((0, 1, 2, 3), "all_reduce", 192, 1)],
    "CP": [((0, 1), "send", 4096, 8), ((0, 1), "all_reduce", 64, 1)],
    "CP, all at once": [((0, 1), "all_gather", 8192, 4), ((0, 1), "all_reduce", 64, 1)],
    "CP, operators recomputed": [((0, 1), "all_gather", 8192, 4), ((0, 1), "all_reduce", 64, 1)],
}


@pytest.mark.parametrize("name", tiers(SENDING, ["CP, operators recomputed"]))
def test_it_sends_what_is_planned(name, monkeypatch):
    unplanned = Counter(Message(*each[:3]) for each in UNPLANNED[name] for _ in range(each[3]))
    test_collectives.muon_sends_what_is_planned(SENDING[name], monkeypatch, unplanned, qk_clip=1.0)


@pytest.mark.slow
def test_logits_are_watched_in_compiled_blocks():
    test_compile.muon_is_compiled_with_the_rest(OPERATORS, qk_clip=0.02)


def scaled_rows(before, after):
    """Of each weight of queries, which heads differ."""
    return {
        name: [
            bool((one != other).any())
            for one, other in zip(part.local.chunk(8), after[name].local.chunk(8), strict=True)
        ]
        for name, part in before.items()
        if ".wq." in name
    }


def test_what_the_comparison_would_find():
    """It acts after the first step, and on some heads alone."""
    ((without, largest),) = run_ranks(limited_or_not, 1)
    expected, logits = reference("flat", False)
    assert logits[0] == largest
    heads = scaled_rows(without, expected.weights[0])
    assert any(any(of) for of in heads.values())
    assert not all(all(of) for of in heads.values())


def limited_or_not():
    """The weights after a first step in which no head is above the limit."""
    one = job(case(batch=8), model={"flavor": "flat"}, optimizer={"qk_clip": 1e9})
    run, row = next(training(one, Device("cpu"), uneven=True))
    return parts(run), row["max_attention_logit"]


def resumable(folder, layout, steps):
    return job(layout, folder, model={"flavor": "flat"}, **resumed(steps))


@pytest.mark.gate
def test_it_resumes_on_the_same_layout_to_the_bit_and_on_another(tmp_path):
    resumes(resumable, tmp_path, case(shard=2), {"TP 2": case(tp=2)}, 2, 4, 1e-5)

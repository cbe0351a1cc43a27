"""Every collective of a step is one of its plan, as large and as often."""

from collections import Counter

import pytest
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor  # noqa: F401  (a fork has what its parent imported)

from tests import layouts, tiny
from tests.collectives import count, planned
from tests.layouts import layout as named
from tests.ranks import run_ranks
from tests.tables import data
from tests.tiers import tiers

TABLE = data(__file__)
CASES = {name: named(name) for name in TABLE["cases"]}
NOTHING = Counter()


@pytest.mark.parametrize("name", tiers(CASES, TABLE["daily"], gate=[*layouts.GATE, *TABLE["gate"]]))
def test_step_sends_what_is_planned(name, monkeypatch):
    sends_what_is_planned(CASES[name], monkeypatch)


def sends_what_is_planned(layout, monkeypatch):
    job = layouts.job(layout, "SGD", training={"steps": 2})
    counted = compare(job, layout, monkeypatch)
    has_experts = layout.model.get("name") in ("tiny_sparse", "tiny_latent", "tiny_oss")
    is_plain = not (has_experts or layout.auxiliary or layout.sections.get("sharding"))
    if layout.pp == layout.tp == 1 and is_plain:
        # The count of targets; then losses, norm and votes. Copies share the norm of their shards;
        # those that never agree count their own targets too, and look for the highest norm.
        is_hybrid = layout.replicate > 1 and layout.ranks > layout.replicate
        sums = 2 + is_hybrid + 2 * (job.communication.replicas.name == "none")
        assert [found.single_numbers for found in counted] == [sums] * layout.ranks
    # The norms of other layouts are added up axis by axis. The loss of latents is added up over
    # tensor ranks for each microbatch; the norms of experts, which are split on another dim than
    # matrices, once more in each step; and their loads over all ranks.
    most = 10 + 4 * bool(layout.auxiliary) + 5 * has_experts
    assert max(found.single_numbers for found in counted) <= most


def compare(job, layout, monkeypatch, unplanned=NOTHING):
    """Compare the first rank of each stage of a pipeline with its plan; return what all sent.

    Args:
        unplanned: messages of a rank that no plan has.
    """
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    counted, ranks = run_ranks(count, layout.ranks, job), layout.ranks
    alike = ranks // layout.pp
    for first in range(0, ranks, alike):
        expected, of_stage = planned(job, ranks, first), counted[first : first + alike]
        exchanges = [of_experts(found.messages, found) for found in of_stage]
        of_plan = of_experts(expected, of_stage[0])
        # What a rank gets, and later sends back, depends on the choices of tokens.
        assert all(each.total() == of_plan.total() for each in exchanges)
        # Muon's exchange of whole matrices differs by rank.
        plans = [planned(job, ranks, first + n) for n in range(alike)] if of_plan else []
        plans = [of_experts(each, found) for each, found in zip(plans, of_stage, strict=False)]
        assert sum(map(size, exchanges)) == sum(map(size, plans))
        sent, asked = of_stage[0].messages - exchanges[0], expected - of_plan
        asked += unplanned
        assert not sent - asked, f"rank {first} sends more than is planned"
        assert not asked - sent, f"rank {first} sends less than is planned"
        if layout.tp == layout.replicate == layout.cp == 1 and not (of_plan or unplanned):
            # FSDP2 fills up shards, so that ranks can send different amounts.
            for n, found in enumerate(of_stage[1:], 1):
                assert found.messages == planned(job, ranks, first + n), f"rank {first + n}"
    return counted


def of_experts(messages, found):
    """The all-to-alls between ranks with different experts, among some messages."""
    is_one = {m: m.ranks == found.experts and m.operation == "all_to_all" for m in messages}
    return Counter({m: count for m, count in messages.items() if is_one[m]})


def size(messages):
    return sum(each.bytes * count for each, count in messages.items())


MUON = (
    *("FSDP 2", "FSDP 3, which divides nothing", "HSDP 2 x 2", "TP 2", "FSDP 2 x TP 2"),
    *("FSDP 2 x PP 2", "CP 2, ring, full recomputation"),
    "HSDP 2 x 2, copies added up afterwards",
)


@pytest.mark.parametrize("name", tiers(MUON, ["FSDP 2"], ["FSDP 2 x TP 2"]))
def test_muon_sends_what_is_planned(name, monkeypatch):
    muon_sends_what_is_planned(named(name), monkeypatch)


def muon_sends_what_is_planned(layout, monkeypatch, unplanned=NOTHING, **settings):
    flavor = {"flavor": "deep" if layout.pp > 1 else "flat"}
    optimizer = {"name": "Muon", "lr": 1e-3, "whole_mib": 0, "by_head": layout.tp > 1, **settings}
    job = tiny.job(**layout.recipe(model=flavor, optimizer=optimizer, training={"steps": 2}))
    for found in compare(job, layout, monkeypatch, unplanned):
        apart = "expert_parallel_degree" in layout.sections.get("parallelism", {})
        sent = sum(n for m, n in found.messages.items() if m.operation == "all_to_all")
        assert apart or sent > 4

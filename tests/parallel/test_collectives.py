"""Every collective of a step is one that a formula asks for, as large and as often."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor  # noqa: F401  (a fork has what its parent imported)

from tests import layouts, tiny
from tests.collectives import Counted, count
from tests.layouts import (
    AFTERWARDS,
    ALL_BESIDE,
    FULL,
    GATE,
    LAYOUTS,
    NO_LOSS,
    NO_SEQUENCE,
    OPERATORS,
    REGATHER,
    RESHARD,
    RING,
    SECOND,
    ULYSSES,
    ZBV,
    Case,
    case,
)
from tests.ranks import run_ranks
from tests.tiers import tiers
from torchtitan.estimate.traffic_formulas import of_keys_and_values, of_stream
from torchtitan.parallel.work import Traffic, of_parameters

BFLOAT16 = {"mixed_precision_param": "bfloat16"}
ALL_BFLOAT16 = {**BFLOAT16, "mixed_precision_reduce": "bfloat16"}
SECOND_STEPS = {"replicas": {"every": 2}}
NEVER = {"replicas": {"name": "none"}}

FROM_PARITY = (
    *("DDP 2, accumulating 4", "DDP 4", "FSDP 2", "FSDP 4", "FSDP 2, never reshard"),
    *("HSDP 2 x 2, accumulating 2", "TP 2", "TP 4", "TP 2, neither", "CP 2, ring", "CP 4"),
    *("PP 2, 1F1B, accumulating 4", "PP 2, ZBVZeroBubble", "PP 4, Interleaved1F1B"),
    *("DDP 2 x PP 2", "FSDP 2 x TP 2", "FSDP 2 x CP 2", "CP 2 x TP 2", "FSDP 2 x PP 2"),
    "HSDP 2 x 2, accumulating 2, copies added up afterwards",
    *("FSDP 4, regathered by 2", "HSDP 2 x 2, always reshard, accumulating 2 whole"),
    "FSDP 2 x TP 2, accumulating 4 whole",
    *("TP 2 x PP 2", "CP 2 x PP 2", "FSDP 2 x TP 2 x PP 2", "TP 2, neither, loss in chunks"),
)
CASES: dict[str, Case] = {
    **{name: LAYOUTS[name] for name in FROM_PARITY},
    "one rank, bfloat16": case(batch=4, training=BFLOAT16),
    "FSDP 2, bfloat16": case(shard=2, training=BFLOAT16),
    "FSDP 3, which divides nothing": case(shard=3, training={"global_batch_size": 12}),
    "FSDP 2, always reshard, full recomputation": case(
        shard=2, recompute=FULL, **{RESHARD: "always"}
    ),
    "TP 2, bfloat16, full recomputation": case(tp=2, training=BFLOAT16, recompute=FULL),
    "TP 2, operators recomputed": case(tp=2, recompute=OPERATORS),
    "TP 2, no sequence parallelism, operators recomputed": case(
        tp=2, recompute=OPERATORS, **NO_SEQUENCE
    ),
    "FSDP 2 x TP 2, all in bfloat16, no loss parallelism": case(
        shard=2, tp=2, training=ALL_BFLOAT16, **NO_LOSS
    ),
    "CP 2, ring, bfloat16, every second block recomputed": case(
        cp=2, training=BFLOAT16, recompute=SECOND, **RING
    ),
    "CP 2, operators recomputed": case(cp=2, recompute=OPERATORS),
    "CP 2, Ulysses, bfloat16, every second block recomputed": case(
        cp=2, training=BFLOAT16, recompute=SECOND, **ULYSSES
    ),
    "CP 4, ring, balanced by documents": LAYOUTS["CP 4, ring, balanced by documents"],
    "CP 2, Ulysses, operators recomputed": case(cp=2, recompute=OPERATORS, **ULYSSES),
    "CP 4, Ulysses, repeated keys": LAYOUTS["CP 4, Ulysses, repeated keys"],
    "CP 2 x TP 2, Ulysses, documents": LAYOUTS["CP 2 x TP 2, Ulysses, documents"],
    "HSDP 2 x 2, which agree in every second step": case(
        replicate=2, shard=2, batch=1, communication=SECOND_STEPS
    ),
    "HSDP 2 x 2, which never agree": case(replicate=2, shard=2, batch=1, communication=NEVER),
    "FSDP 4, always reshard, regathered by 2, full recomputation": case(
        shard=4, recompute=FULL, sharding=REGATHER, **{RESHARD: "always"}
    ),
    "PP 2, 1F1B, all auxiliary losses": LAYOUTS["PP 2, 1F1B, all auxiliary losses"],
    "FSDP 2, all auxiliary losses, full recomputation": case(
        shard=2, recompute=FULL, **ALL_BESIDE, **{RESHARD: "always"}
    ),
    "TP 2, all auxiliary losses, full recomputation": case(tp=2, recompute=FULL, **ALL_BESIDE),
    "CP 2 x TP 2, all auxiliary losses": case(cp=2, tp=2, **ALL_BESIDE),
    "FSDP 2 x PP 2, always reshard": case(2, shard=2, batch=4, **{RESHARD: "always"}),
    # Each second half of a backward recomputes a block once for each of its weights.
    "TP 2 x PP 2, ZBVZeroBubble, full recomputation": case(2, tp=2, batch=4, recompute=FULL, **ZBV),
    "CP 2 x PP 2, ZBVZeroBubble, full recomputation": case(2, cp=2, batch=4, recompute=FULL, **ZBV),
}

DAILY = (
    *("DDP 2, accumulating 4", "FSDP 2", "TP 2", "CP 2, ring", "one rank, bfloat16"),
    *("CP 2, Ulysses, bfloat16, every second block recomputed", "PP 2, ZBVZeroBubble"),
    *("FSDP 2, bfloat16", "FSDP 3, which divides nothing", "TP 2, operators recomputed"),
)
IN_GATE = (
    *GATE,
    *("HSDP 2 x 2, accumulating 2", "TP 2, neither", "FSDP 2 x TP 2"),
    "FSDP 2 x PP 2, always reshard",
)


@pytest.mark.parametrize("name", tiers(CASES, DAILY, gate=IN_GATE))
def test_step_sends_what_the_formulas_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sends_what_the_formulas_say(CASES[name], monkeypatch)


def sends_what_the_formulas_say(layout: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    job = layouts.job(layout, "SGD", training={"steps": 2})
    ranks = run_ranks(count, layout.ranks, job)
    compare_exchanges_of_experts(ranks)
    for rank, found in enumerate(ranks):
        # The formulas are those of the first tensor rank; the last has a row of the tables less.
        # So has the last rank of parts that are added up over copies, unless FSDP2 fills them up.
        is_filled_up = job.sharding.name == "fsdp2" and "communication" not in layout.sections
        is_first = found.axes["fsdp"].index(rank) == 0 or is_filled_up
        if found.axes["tp"].index(rank) == 0 and is_first:
            assert not differences(found), f"rank {rank}"
        # That of latents is added up over tensor ranks for each microbatch; the norms of experts,
        # which are split on another dim than matrices, once more in each step; and their loads over
        # ranks with other sequences and over those with other parts of them.
        has_experts = layout.model.get("name") in ("tiny_sparse", "tiny_latent", "tiny_oss")
        assert found.single_numbers <= 12 + 4 * bool(layout.auxiliary) + 6 * has_experts


def compare_exchanges_of_experts(ranks: list[Counted]) -> None:
    """Take them away, after their number on each rank, and their bytes on all, are as expected.

    What a rank gets, and later sends back, depends on the choices of tokens.
    """
    sizes = []
    for found in ranks:
        both = [found.exchanges_of_experts(each) for each in (found.messages, found.expected)]
        assert both[0].total() == both[1].total()
        sizes.append([sum(m.bytes * count for m, count in each.items()) for each in both])
        for messages, exchanges in zip((found.messages, found.expected), both, strict=True):
            messages -= exchanges
    counted, expected = map(sum, zip(*sizes, strict=True))
    assert counted == expected


MUON: dict[str, Case] = {
    "FSDP 2": case(shard=2),
    "FSDP 3, which divides nothing": CASES["FSDP 3, which divides nothing"],
    "HSDP 2 x 2": case(replicate=2, shard=2),
    "TP 2": case(tp=2),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x PP 2": case(2, shard=2),
    "CP 2, ring, full recomputation": case(cp=2, recompute=FULL, **RING),
    "HSDP 2 x 2, copies added up afterwards": case(replicate=2, shard=2, communication=AFTERWARDS),
}


@pytest.mark.parametrize("name", tiers(MUON, ["FSDP 2"]))
def test_muon_sends_what_the_formulas_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an update."""
    muon_sends_what_the_formulas_say(MUON[name], monkeypatch)


def muon_sends_what_the_formulas_say(
    layout: Case, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    flavor = {"flavor": "deep" if layout.pp > 1 else "flat"}
    optimizer = {"name": "Muon", "lr": 1e-3, "whole_mib": 0, "by_head": layout.tp > 1, **settings}
    job = tiny.job(**layout.recipe(model=flavor, optimizer=optimizer, training={"steps": 2}))
    ranks = run_ranks(count, layout.ranks, job)
    compare_exchanges_of_experts(ranks)
    for rank, found in enumerate(ranks):
        apart = "expert_parallel_degree" in layout.sections.get("parallelism", {})
        sent = sum(n for m, n in found.expected.items() if m.operation == "all_to_all")
        assert apart or sent > 4
        if rank == 0 or layout.tp == layout.replicate == 1:  # as above
            assert not differences(found), f"rank {rank}"


def differences(found: Counted) -> dict[str, Counter[object]]:
    """What was sent and is in no formula, and the other way round."""
    both = {
        "sent, but in no formula": found.messages - found.expected,
        "in a formula, but not sent": found.expected - found.messages,
    }
    return {what: messages for what, messages in both.items() if messages}


def sent(found: Iterable[Traffic], ranks: int) -> float:
    return sum(one.sent(ranks) for one in found)


def test_fsdp_sends_half_as_much_again_as_ddp() -> None:
    """As ZeRO says of its third stage (arXiv:1910.02054, section 7)."""
    once = {"gathered": 4000, "scattered": 4000, "scatters": 1, "sums": 1}
    ddp = sent(of_parameters(parts=1, copies=8, summed=4000, gathers=0, **once), 8)
    fsdp = sent(of_parameters(parts=8, copies=1, summed=500, gathers=2, **once), 8)
    assert ddp == 2 * 4000 * 7 / 8
    assert fsdp == 1.5 * ddp


def test_sequence_parallelism_sends_as_much_as_it_replaces() -> None:
    """As its paper says (arXiv:2205.05198, section 4.2.2): a ring all-reduce is both halves."""
    block = {"gathers": 2, "sums": 2, "more_gathers": 0, "more_sums": 0}
    split, whole = (sent(of_stream(1000, split=split, **block), 4) for split in (True, False))
    assert split == whole == 4 * 2 * 1000 * 3 / 4


def test_ring_sends_as_much_as_fetching_at_once() -> None:
    layer = {"ranks": 4, "compute": 2, "fetches": 2, "returns": 1}
    ring, at_once = (sent(of_keys_and_values(1000, ring=r, **layer), 4) for r in (True, False))
    assert ring == at_once == 3 * (2 * 2000 + 4000)

"""Messages in few bits: what they promise, on real ranks."""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.layouts import FULL, Case, case
from tests.ranks import run_ranks
from tests.runs import Trace, parts, trace, train
from tests.tiers import tiers
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.comm import Unit
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.research.common.codec import Codec
from torchtitan.research.loco.loco import LoCo, LoCoReplicas
from torchtitan.research.qsdp.qsdp import QSDPGradients, QSDPWeights
from torchtitan.tools.verify.measure import training

SHAPES = {
    "a.weight": torch.Size([6, 64]),
    "norm.weight": torch.Size([40]),
    "b": torch.Size([64, 4]),
}
UNIT = Unit("layers.0", SHAPES, torch.device("cpu"))
ROW = UNIT.elements
EXACT = slice(6 * 64, 6 * 64 + 40)
"""The weights of a norm, which are sent as they are."""
LOCO = {"gradients": {"name": "loco", "bucket": 64}}
QSDP = {way: {"name": "qsdp", "bucket": 64} for way in ("weights", "gradients")}
LEARNED = {way: {**QSDP[way], "bits": 4, "levels": "learned", "learn_steps": 3} for way in QSDP}


def drawn(*shape: int, seed: int) -> Tensor:
    """Of very different sizes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 0, shape[-1])


def matrices(row: Tensor) -> Tensor:
    """What is sent in few bits of (..., p)."""
    return torch.cat([row[..., : EXACT.start], row[..., EXACT.stop :]], -1)


class Reduced(NamedTuple):
    sent: Tensor
    """What should have arrived here, in all calls together: (p)."""
    arrived: Tensor
    last: Tensor
    """What arrived in the last call."""
    errors: Tensor | None
    """What all ranks keep of what they send here."""


def reduced(config: Any, calls: int) -> Reduced:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    ranks, way = group.size(), config.open(UNIT, group)
    expected, arrived = torch.zeros(ROW), torch.zeros(ROW)
    for call in range(calls):
        rows = [drawn(ranks, ROW, seed=ranks * call + other) for other in range(ranks)]
        part = torch.empty(ROW)
        way(part, rows[rank].flatten())
        expected += sum(row[rank] for row in rows)
        arrived += part
        way.end_step()
    errors = None
    if isinstance(config, LoCo) and config.error_bits == 32:
        errors = torch.empty_like(way.sending.error)
        dist.all_to_all_single(errors, way.sending.error)
    return Reduced(expected, arrived, part, errors)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_errors_of_loco_are_sent_later(ranks: int, beta: float) -> None:
    """The identity sum(g - Q) = (e_T - e_0) / (1 - beta)."""
    config = LoCo(beta=beta, bucket=64, reset_steps=0, error_bits=32)
    for found in run_ranks(reduced, ranks, config, 30):
        assert found.errors is not None
        lost, expected = found.sent - found.arrived, found.errors.sum(0) / (1 - beta)
        assert torch.allclose(matrices(lost), expected, atol=1e-4)
        assert lost[EXACT].abs().max() < 1e-5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_loco_loses_far_less_than_rounding_alone(bits: int) -> None:
    small = slice(0, 128)  # gradients that rounding would drop
    lost = {}
    for compensate in (False, True):
        config = LoCo(compensate=compensate, bits=bits, bucket=128)
        for found in run_ranks(reduced, 2, config, 50):
            missed = found.sent - found.arrived
            lost[compensate] = float(missed[small].norm() / found.sent[small].norm())
    assert lost[True] < 0.5 * lost[False]


@pytest.mark.parametrize("resets", [False, True])
def test_loco_is_its_model_in_one_process(resets: bool) -> None:
    """The recurrence of the paper, for each pair of ranks, with errors in 8 bits."""
    calls, beta = 7, 0.8
    config = LoCo(beta=beta, bucket=64, reset_steps=4 if resets else 0)
    codec, stored = Codec(4, 64), Codec(8, 64)
    length = matrices(torch.zeros(ROW)).numel()
    for rank, found in enumerate(run_ranks(reduced, 2, config, calls)):
        errors, sums = [torch.zeros(1, length)] * 2, torch.zeros(length)
        for call in range(calls):
            sums = torch.zeros(length)
            for other in range(2):
                wanted = matrices(drawn(2, ROW, seed=2 * call + other)[rank])[None] + errors[other]
                sent = codec.decode(codec.encode(wanted), length)
                error = beta * errors[other] + (1 - beta) * (wanted - sent)
                errors[other] = stored.decode(stored.encode(error), length)
                sums += sent[0]
            if resets and call + 1 == 4:
                errors = [torch.zeros(1, length)] * 2
        assert torch.allclose(matrices(found.last), sums, atol=1e-5)


class Summed(NamedTuple):
    sent: dict[str, Tensor]
    """What should have been agreed on, in all calls together."""
    agreed: dict[str, Tensor]
    parts: Tensor
    """The errors of what this replica sent to each."""
    sums: Tensor
    """The errors of the sums that it sent to all."""


def summed(config: LoCoReplicas, calls: int) -> Summed:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    way = config.open(UNIT, group)
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    agreed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for call in range(calls):
        for other in range(group.size()):
            cut = torch.split(drawn(ROW, seed=group.size() * call + other), [384, 40, 256])
            whole = {n: p.view(s) for (n, s), p in zip(SHAPES.items(), cut, strict=True)}
            given = {name: given[name] + whole[name] for name in given}
            if other == rank:
                mine = {name: each.clone() for name, each in whole.items()}
        way(mine)
        agreed = {name: agreed[name] + mine[name] for name in agreed}
    return Summed(given, agreed, way.parts.error, way.sums.error)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_errors_of_both_halves_between_replicas_are_sent_later(ranks: int, beta: float) -> None:
    """sum(g - Q) = (sum of e_T of what each sent, and of the sum) / (1 - beta)."""
    config = LoCoReplicas(beta=beta, bucket=64, reset_steps=0, error_bits=32)
    results = run_ranks(summed, ranks, config, 30)
    parts = sum(found.parts for found in results).flatten()
    sums = torch.cat([found.sums[0] for found in results])
    expected = (parts + sums)[: 6 * 64 + 256] / (1 - beta)
    for found in results:
        lost = {name: found.sent[name] - found.agreed[name] for name in SHAPES}
        both = torch.cat([lost["a.weight"].flatten(), lost["b"].flatten()])
        assert torch.allclose(both, expected, atol=2e-4)
        assert lost["norm.weight"].abs().max() < 1e-5
        assert all(torch.equal(found.agreed[n], results[0].agreed[n]) for n in SHAPES)


@pytest.mark.parametrize("levels", ["uniform", "learned"])
def test_gradients_of_qsdp_are_right_in_the_mean(levels: Literal["uniform", "learned"]) -> None:
    """Rounded at random: the error of a sum of calls grows as their root, not as their number."""
    calls, bits = 400, 3
    config = QSDPGradients(bits=bits, bucket=64, levels=levels, learn_steps=100)
    for found in run_ranks(reduced, 2, config, calls):
        # Of each bucket, one unit at most is 2 x 4 standard deviations / 7 (learned: three times
        # that); a rounding is off by half of that at most. Two ranks send; five deviations of it.
        largest = matrices(torch.logspace(-3, 0, ROW)) * (1 if levels == "uniform" else 3)
        limit = 5 * (8 * largest / (2**bits - 1) / 2).max() * (2 * calls) ** 0.5
        assert matrices(found.sent - found.arrived).abs().max() < limit
        assert matrices(found.sent - found.arrived).abs().max() > 0.01


class Gathered(NamedTuple):
    first: Tensor
    again: Tensor
    later: Tensor


def gathered(config: QSDPWeights) -> Gathered:
    """Gather twice in a step, and once in the next; into the buffer that the part is a view of."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    way = config.open(UNIT, group)
    found = []
    for gather in range(3):
        whole = torch.full((group.size() * ROW,), torch.nan)
        part = whole[rank * ROW : (rank + 1) * ROW]
        part.copy_(drawn(ROW, seed=rank))
        if gather == 2:
            way.end_step()
        way(whole, part)
        found.append(whole.clone())
    return Gathered(*found)


@pytest.mark.parametrize("levels", ["uniform", "learned"])
def test_all_ranks_compute_with_the_same_weights_of_qsdp(
    levels: Literal["uniform", "learned"],
) -> None:
    config = QSDPWeights(bits=4, bucket=64, levels=levels, learn_steps=1)
    results = run_ranks(gathered, 2, config)
    kept = torch.stack([drawn(ROW, seed=rank) for rank in range(2)])
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
        assert torch.equal(found.first, found.again), "the backward has the forward's weights"
        assert not torch.equal(found.first, found.later), "each step has its own shift"
        rows = found.first.view(2, ROW)
        assert torch.equal(rows[:, EXACT], kept[:, EXACT])
        off = matrices(rows - kept).abs().max()
        assert 0 < off < (0.5 if levels == "uniform" else 3.0) * (2 * 5 / 15)


def means(config: QSDPWeights, steps: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    way, total = config.open(UNIT, group), torch.zeros(2 * ROW)
    for _ in range(steps):
        whole = torch.empty(2 * ROW)
        way(whole, drawn(ROW, seed=dist.get_rank()))
        total += whole
        way.end_step()
    return total / steps


@pytest.mark.parametrize("levels", ["uniform", "learned"])
def test_weights_of_qsdp_are_right_in_the_mean(levels: Literal["uniform", "learned"]) -> None:
    """Over the shifts that ranks share, one a step."""
    steps, kept = 400, torch.stack([drawn(ROW, seed=rank) for rank in range(2)])
    config = QSDPWeights(bits=3, bucket=64, levels=levels)
    (found, same) = run_ranks(means, 2, config, steps)
    assert torch.equal(found, same)
    off = matrices(found.view(2, ROW) - kept)
    # A unit is a seventh of a bucket's range (learned levels: up to three); off by half at most.
    ranges = matrices(torch.logspace(-3, 0, ROW)).expand(2, -1) * (1 if levels == "uniform" else 3)
    assert (off.abs() / ranges).max() < 5 * (8 / 7 / 2) / steps**0.5
    assert off.abs().max() > 0


TWO_HOPS = LOCO | {"replicas": {"name": "loco", "bucket": 64, "verify_steps": 1}}
LAYOUTS: dict[str, Case] = {
    "FSDP 2, accumulating 4, full recomputation": case(shard=2, batch=1, recompute=FULL),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x PP 2": case(2, shard=2, batch=4),
    "FSDP 2 x CP 2": case(shard=2, cp=2),
    "HSDP 2 x 2": case(replicate=2, shard=2, batch=1),
}


def traced(layout: Case, communication: dict[str, Any], **sections: Any) -> list[Trace]:
    recipe = layouts.job(
        layout, "SGD", communication=communication, training={"steps": 4}, **sections
    )
    return run_ranks(trace, layout.ranks, recipe)


@pytest.mark.parametrize("name", tiers(LAYOUTS, list(LAYOUTS)[:1]))
def test_a_run_in_few_bits_is_nearly_the_run(name: str) -> None:
    plain = traced(LAYOUTS[name], {})
    for communication in (LOCO, QSDP, LEARNED):
        for found, expected in zip(traced(LAYOUTS[name], communication), plain, strict=True):
            assert found.losses != expected.losses
            wider = 5 if communication is LEARNED else 1
            assert found.losses == pytest.approx(expected.losses, rel=wider * 2e-3)
            assert found.grad_norms == pytest.approx(expected.grad_norms, rel=wider * 3e-2)


def test_both_hops_of_loco_are_nearly_the_run() -> None:
    """Replicas compare their weights after each step."""
    layout = LAYOUTS["HSDP 2 x 2"]
    plain, one = traced(layout, {}), traced(layout, LOCO)
    for found, expected, once in zip(traced(layout, TWO_HOPS), plain, one, strict=True):
        assert found.losses not in (expected.losses, once.losses)
        assert found.losses == pytest.approx(expected.losses, rel=4e-3)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=6e-2)


def spoilt(recipe: JobConfig) -> tuple[list[float], list[dict[str, Tensor]], list[Tensor]]:
    """Train; on one rank the gradient of step 2 has a NaN. Losses, weights, and what is kept."""
    losses, weights, kept = [], [], list[Tensor]()
    for run, row in training(recipe, Device("cpu"), uneven=False):
        losses.append(row["loss"])
        weights.append({name: part.local for name, part in parts(run).items()})
        model = run.model.model  # type: ignore[attr-defined]
        kept = list(model.state().values())
        if len(losses) == 1 and dist.get_rank() == 1:
            linear = model.parts[0].get_submodule("layers.0.attention.wq")
            spoiler = linear.register_full_backward_pre_hook(
                lambda _, given: (given[0] * torch.nan,)
            )
        elif len(losses) == 2 and dist.get_rank() == 1:
            spoiler.remove()
    return losses, weights, kept


NEVER = {"replicas": {"name": "none"}, **LOCO}
SLICES = {"replicas": {"name": "slicing", "sign": False}}


@pytest.mark.parametrize("way", [LOCO, LEARNED, TWO_HOPS, SLICES, NEVER], ids=str)
def test_a_step_with_a_nan_is_skipped_and_leaves_nothing_behind(way: dict[str, Any]) -> None:
    layout = case(shard=2, replicate=2) if "replicas" in way else case(shard=2)
    recipe = layouts.job(layout, "SGD", communication=way, training={"steps": 4})
    for losses, weights, kept in run_ranks(spoilt, layout.ranks, recipe):
        assert all(torch.equal(weights[0][name], each) for name, each in weights[1].items())
        assert not all(torch.equal(weights[1][name], each) for name, each in weights[2].items())
        assert all(math.isfinite(loss) for loss in losses)
        assert kept
        assert all(each.isfinite().all() for each in kept if each.is_floating_point())
        assert all(each.isfinite().all() for last in weights for each in last.values())


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_blocks_are_compiled_around_it() -> None:
    compiled = {"compile": {"enable": True, "backend": "aot_eager"}}
    for communication in (LOCO, QSDP):
        eager = traced(case(shard=2), communication)
        found = traced(case(shard=2), communication, **compiled)
        assert found[0].losses == pytest.approx(eager[0].losses, rel=1e-4)


def test_few_bits_that_nobody_gets_are_noted() -> None:
    flags = ["--communication.gradients.name=loco", "--training.steps=1"]
    alone, shared = (load_job(None, flags, ranks, "cpu").notices for ranks in (1, 2))
    said = "no two ranks share gradients, so none are sent, and this does nothing"
    assert [said in line for line in alone].count(True) == 1
    assert not any(said in line for line in shared)


def stopped(folder: str, layout: Case, communication: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Train four steps at once; then two and two."""
    found = []
    for name, steps in (("a", 4), ("b", 2), ("b", 4)):
        recipe = layouts.job(
            layout,
            "AdamW",
            communication=communication,
            training={"steps": steps},
            job={"dump_folder": f"{folder}/{name}"},
            checkpoint={"enable": True, "interval": 2},
        )
        found.append(train(recipe))
    return found


@pytest.mark.parametrize(
    "communication",
    [LOCO, TWO_HOPS, QSDP, LEARNED],
    ids=["LoCo", "LoCo in two hops", "QSDP", "QSDP with learned levels"],
)
def test_a_run_that_resumes_is_the_same_to_the_bit(
    communication: dict[str, Any], tmp_path: Path
) -> None:
    layout = case(shard=2, replicate=2) if communication is TWO_HOPS else case(shard=2)
    found = run_ranks(stopped, layout.ranks, str(tmp_path), layout, communication)
    for at_once, _, resumed in found:
        assert all(torch.equal(at_once[name], weight) for name, weight in resumed.items())
    saved = SavedTensors(tmp_path / "a" / "checkpoint" / "step-4").shapes()
    assert {name.split(".")[2] for name in saved if name.startswith("communication.")} == set(
        communication
    )


def resumed_by_others(
    folder: str, layout: Case, communication: dict[str, Any], steps: int
) -> tuple[list[float], list[str]]:
    """The norms of gradients in steps after the second, and the warnings on the way."""
    recipe = layouts.job(
        layout,
        "AdamW",
        communication=communication,
        training={"steps": steps},
        job={"dump_folder": folder},
        checkpoint={"enable": True, "interval": 2, "async_mode": "disabled"},
    )
    with patch.object(logger, "warning") as warned:
        found = train(recipe, lambda run: run.state.history["grad_norm"])
    return found, [str(call.args[0]) for call in warned.call_args_list]


@pytest.mark.gate
@pytest.mark.parametrize(
    "communication", [LOCO, TWO_HOPS, LEARNED], ids=["LoCo", "two hops", "QSDP"]
)
def test_a_run_that_resumes_on_another_layout_says_so(
    communication: dict[str, Any], tmp_path: Path
) -> None:
    """What is kept begins anew, and the run stays near the one that never stopped."""
    one, other = case(shard=2, replicate=2, batch=1), case(shard=4, batch=1)
    folders = [str(tmp_path / name) for name in "ab"]
    whole, said = run_ranks(resumed_by_others, 4, folders[0], one, communication, 6)[0]
    assert not said
    assert not run_ranks(resumed_by_others, 4, folders[1], one, communication, 2)[0][1]
    alone = {way: each for way, each in communication.items() if way != "replicas"}
    for norms, said in run_ranks(resumed_by_others, 4, folders[1], other, alone, 6):
        assert ["begins anew" in line for line in said] == [True]
        assert norms == pytest.approx(whole, rel=6e-2)
        assert norms != whole

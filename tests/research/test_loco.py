"""LoCo: what is lost in few bits is sent later."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tests.research.few_bits import (
    EXACT,
    LAYOUTS,
    ROW,
    SHAPES,
    UNIT,
    drawn,
    is_compiled_around,
    is_nearly_the_run,
    is_skipped_and_leaves_nothing,
    matrices,
    reduced,
    resumes_on_another_layout,
    resumes_to_the_bit,
    traced,
)
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.research.common.codec import Codec
from torchtitan.research.loco.loco import LoCo, LoCoReplicas

LOCO = {"gradients": {"name": "loco", "bucket": 64}}


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


TWO_HOPS = LOCO | {"replicas": {"name": "loco", "bucket": 64, "verify_steps": 1}}


@pytest.mark.gate
def test_both_hops_of_loco_are_nearly_the_run() -> None:
    """Replicas compare their weights after each step."""
    layout = LAYOUTS["HSDP 2 x 2"]
    plain, one = traced(layout, {}), traced(layout, LOCO)
    for found, expected, once in zip(traced(layout, TWO_HOPS), plain, one, strict=True):
        assert found.losses not in (expected.losses, once.losses)
        assert found.losses == pytest.approx(expected.losses, rel=4e-3)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=6e-2)


NEVER = {"replicas": {"name": "none"}, **LOCO}


def test_few_bits_that_nobody_gets_are_noted() -> None:
    flags = ["--communication.gradients.name=loco", "--training.steps=1"]
    alone, shared = (load_job(None, flags, ranks, "cpu").notices for ranks in (1, 2))
    said = "no two ranks share gradients, so this has no effect"
    assert [said in line for line in alone].count(True) == 1
    assert not any(said in line for line in shared)


@pytest.mark.parametrize("name", tiers(LAYOUTS, list(LAYOUTS)[:1]))
def test_a_run_in_few_bits_is_nearly_the_run(name: str) -> None:
    is_nearly_the_run(name, [(LOCO, 1)])


@pytest.mark.parametrize("way", [LOCO, TWO_HOPS, NEVER], ids=str)
def test_a_step_with_a_nan_is_skipped_and_leaves_nothing_behind(way: dict[str, Any]) -> None:
    is_skipped_and_leaves_nothing(way)


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_blocks_are_compiled_around_it() -> None:
    is_compiled_around(LOCO)


@pytest.mark.parametrize("communication", [LOCO, TWO_HOPS], ids=["one hop", "two hops"])
def test_a_run_that_resumes_is_the_same_to_the_bit(
    communication: dict[str, Any], tmp_path: Path
) -> None:
    resumes_to_the_bit(communication, tmp_path)


@pytest.mark.gate
@pytest.mark.parametrize("communication", [LOCO, TWO_HOPS], ids=["one hop", "two hops"])
def test_a_run_that_resumes_on_another_layout_says_so(
    communication: dict[str, Any], tmp_path: Path
) -> None:
    resumes_on_another_layout(communication, tmp_path)


def test_a_flag_whose_names_are_numbers() -> None:
    words = ["--communication.gradients.name", "loco", "--communication.gradients.error_bits"]
    gradients = load_job(None, [*words, "32"], 2, "cpu").config.communication.gradients
    assert gradients.error_bits == 32  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="got 16; allowed: 8, 32"):
        load_job(None, [*words, "16"], 2, "cpu")

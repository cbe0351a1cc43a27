"""LoCo: what is lost in few bits is sent later."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tests.research.few_bits import EXACT, ROW, SHAPES, UNIT, drawn, matrices, reduced
from tests.runs import each
from tests.tables import data
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.research.common import codec as codecs
from torchtitan.research.common.codec import Codec
from torchtitan.research.loco import Compensation, LoCo, LoCoReplicas

BETAS = (0.0, 0.8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_errors_of_loco_are_sent_later(ranks):
    """The identity sum(g - Q) = (e_T - e_0) / (1 - beta)."""
    configs = [LoCo(beta=beta, bucket=64, reset_steps=0, error_bits=32) for beta in BETAS]
    for rank in run_ranks(each, ranks, reduced, configs, 10):
        for beta, found in zip(BETAS, rank, strict=True):
            lost, expected = found.sent - found.arrived, found.errors.sum(0) / (1 - beta)
            assert torch.allclose(matrices(lost), expected, atol=1e-4), beta
            assert lost[EXACT].abs().max() < 1e-5, beta


def test_loco_loses_far_less_than_rounding_alone():
    small = slice(0, 128)  # gradients that rounding would drop
    settings = list(itertools.product([2, 4, 8], [False, True]))
    configs = [LoCo(compensate=compensate, bits=bits, bucket=128) for bits, compensate in settings]
    for rank in run_ranks(each, 2, reduced, configs, 50):
        missed = [(found.sent - found.arrived)[small].norm() for found in rank]
        shares = [float(m / each.sent[small].norm()) for m, each in zip(missed, rank, strict=True)]
        for (bits, _), without, compensated in zip(
            settings[::2], shares[::2], shares[1::2], strict=True
        ):
            assert compensated < 0.5 * without, bits


def test_loco_is_its_model_in_one_process():
    """The recurrence of the paper, for each pair of ranks, with errors in 8 bits."""
    calls, beta, resets = 7, 0.8, (0, 4)
    configs = [LoCo(beta=beta, bucket=64, reset_steps=steps) for steps in resets]
    codec, stored = Codec(4, 64), Codec(8, 64)
    length = matrices(torch.zeros(ROW)).numel()
    found = run_ranks(each, 2, reduced, configs, calls)
    for rank, (number, steps) in itertools.product(range(2), enumerate(resets)):
        errors, sums = [torch.zeros(1, length)] * 2, torch.zeros(length)
        for call in range(calls):
            sums = torch.zeros(length)
            for other in range(2):
                wanted = matrices(drawn(2, ROW, seed=2 * call + other)[rank])[None] + errors[other]
                sent = codec.decode(codec.encode(wanted), length)
                error = beta * errors[other] + (1 - beta) * (wanted - sent)
                errors[other] = stored.decode(stored.encode(error), length)
                sums += sent[0]
            if call + 1 == steps:
                errors = [torch.zeros(1, length)] * 2
        assert torch.allclose(matrices(found[rank][number].last), sums, atol=1e-5), steps


class Summed(NamedTuple):
    sent: dict[str, Tensor]
    """What should have been agreed on, in all calls together."""
    agreed: dict[str, Tensor]
    parts: Tensor
    """The errors of what this replica sent to each."""
    sums: Tensor
    """The errors of the sums that it sent to all."""


def summed(config, calls):
    rank, group = dist.get_rank(), dist.group.WORLD
    way = config.open(UNIT, group)
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    agreed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for call in range(calls):
        for other in range(group.size()):
            cut = torch.split(drawn(ROW, seed=group.size() * call + other), [384, 40, 256])
            whole = {n: p.view(s) for (n, s), p in zip(SHAPES.items(), cut, strict=True)}
            given = {name: given[name] + whole[name] for name in given}
            if other == rank:
                mine = {name: part.clone() for name, part in whole.items()}
        way(mine)
        agreed = {name: agreed[name] + mine[name] for name in agreed}
    return Summed(given, agreed, way.parts.error, way.sums.error)


@pytest.mark.parametrize("ranks", [2, 3])
def test_errors_of_both_halves_between_replicas_are_sent_later(ranks):
    """sum(g - Q) = (sum of e_T of what each sent, and of the sum) / (1 - beta)."""
    configs = [LoCoReplicas(beta=beta, bucket=64, reset_steps=0, error_bits=32) for beta in BETAS]
    for beta, *results in zip(BETAS, *run_ranks(each, ranks, summed, configs, 10), strict=True):
        parts = sum(found.parts for found in results).flatten()
        sums = torch.cat([found.sums[0] for found in results])
        expected = (parts + sums)[: 6 * 64 + 256] / (1 - beta)
        for found in results:
            lost = {name: found.sent[name] - found.agreed[name] for name in SHAPES}
            both = torch.cat([lost["a.weight"].flatten(), lost["b"].flatten()])
            assert torch.allclose(both, expected, atol=2e-4), beta
            assert lost["norm.weight"].abs().max() < 1e-5, beta
            assert all(torch.equal(found.agreed[n], results[0].agreed[n]) for n in SHAPES), beta


def test_few_bits_that_nobody_gets_are_noted():
    flags = ["--communication.gradients.name=loco", "--training.steps=1"]
    alone, shared = (load_job(None, flags, ranks, "cpu").notices for ranks in (1, 2))
    said = "no two ranks share gradients, so this has no effect"
    assert [said in line for line in alone].count(True) == 1
    assert not any(said in line for line in shared)


def test_a_flag_whose_names_are_numbers():
    words = ["--communication.gradients.name", "loco", "--communication.gradients.error_bits"]
    gradients = load_job(None, [*words, "32"], 2, "cpu").config.communication.gradients
    assert gradients.error_bits == 32
    with pytest.raises(ConfigError, match="got 16; allowed: 8, 32"):
        load_job(None, [*words, "16"], 2, "cpu")


COMPILED = [tuple(row) for row in data(__file__)["compiled"]]


@pytest.mark.parametrize(("bits", "form", "scales", "way"), tiers(COMPILED, (), COMPILED[5:]))
def test_compiled_code_makes_the_bits_of_eager_code(bits, form, scales, way, monkeypatch):
    """By the compiler of CPUs, with the options for that of CUDA: encoded, and decoded again."""
    codec = Codec(bits, 32, form, getattr(torch, scales))
    rows = torch.logspace(-44, 20, 32 * 9).repeat(2, 1)
    rows *= torch.randn(2, 32 * 9, generator=torch.Generator().manual_seed(0))
    rows[0, 40], rows[0, 70], rows[1, 130], rows[:, 160:192] = math.nan, math.inf, -math.inf, 0.0
    shift = torch.full((), 0.3137) if way == "shift" else 0.0
    levels = torch.linspace(0, 1, 2**bits).square().repeat(9, 1) if way == "levels" else None

    def coded():
        if way.startswith("errors"):
            config = LoCo(error_bits=int(way.split()[2]), bucket=32)
            kept = Compensation(config, codec, *rows.shape, rows.device)
            kept.encode(rows.flip(1))
            message, error = kept.encode(rows), kept.error.float()
        else:
            noise = None if way == "shift" else torch.Generator().manual_seed(1)
            message, error = codec.encode(rows, shift, noise, levels), rows[:, :0]
        found = (codec.decode(message, 32 * 9, shift, levels, is_sum=n) for n in (False, True))
        return torch.cat([each.flatten() for each in (error, *found)])

    expected = coded()
    with monkeypatch.context() as patched:
        patched.setitem(codecs.BACKENDS, "cpu", "inductor")
        found = coded()
        assert "cpu" in codecs.BACKENDS, "it was not compiled"
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.costs("compiles")
def test_slices_of_units_of_all_sizes_share_graphs(monkeypatch):
    graphs = []

    def count(graph, *_, **__):
        def run(*inputs):
            assert not any(each.data_ptr() % 16 for each in inputs if torch.is_tensor(each))
            return graph(*inputs)

        graphs.append(graph)
        return run

    monkeypatch.setattr(codecs, "SLICE", 700)
    monkeypatch.setitem(codecs.BACKENDS, "cpu", count)
    for length in (1001, 64, 32 * 9, 32 * 50, 90):
        codec, rows = Codec(4, 32), torch.randn(2, length)
        kept = Compensation(LoCo(bits=4, bucket=32), codec, 2, length, rows.device)
        found = codec.decode(kept.encode(rows), length)
        codec.decode(codec.encode(rows), length, is_sum=True)
        assert torch.equal(found, codec.decode(codec.encode(rows), length))
    assert 0 < len(graphs) <= 8  # two for each of four functions
    graphs.clear()
    with torch.compiler.set_stance("force_eager"):
        Codec(2, 32).encode(rows)
    assert not graphs

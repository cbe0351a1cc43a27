"""QSDP: weights and gradients in few bits, right in the mean."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tests.research.few_bits import EXACT, ROW, UNIT, drawn, matrices, reduced
from tests.runs import each
from torchtitan.research.common.codec import Codec
from torchtitan.research.qsdp import QSDPGradients, QSDPWeights, learn

LEVELS = ("uniform", "learned")


def test_gradients_of_qsdp_are_right_in_the_mean():
    """Rounded at random: the error of a sum of calls grows as their root, not as their number."""
    calls, bits = 200, 3
    configs = [QSDPGradients(bits=bits, bucket=64, levels=each, learn_steps=50) for each in LEVELS]
    for rank in run_ranks(each, 2, reduced, configs, calls):
        for levels, found in zip(LEVELS, rank, strict=True):
            # Of each bucket, one unit at most is 2 x 4 standard deviations / 7 (learned: three
            # times that); a rounding is off by half of that at most. Two ranks send; five
            # deviations of it.
            largest = matrices(torch.logspace(-3, 0, ROW)) * (1 if levels == "uniform" else 3)
            limit = 5 * (8 * largest / (2**bits - 1) / 2).max() * (2 * calls) ** 0.5
            assert matrices(found.sent - found.arrived).abs().max() < limit, levels
            assert matrices(found.sent - found.arrived).abs().max() > 0.01, levels


class Gathered(NamedTuple):
    first: Tensor
    again: Tensor
    later: Tensor


def gathered(config):
    """Gather twice in a step, and once in the next; into the buffer that the part is a view of."""
    rank, group = dist.get_rank(), dist.group.WORLD
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


def test_all_ranks_compute_with_the_same_weights_of_qsdp():
    kept = torch.stack([drawn(ROW, seed=rank) for rank in range(2)])
    results = run_ranks(gathered, 2, QSDPWeights(bits=4, bucket=64))
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
        assert torch.equal(found.first, found.again), "the backward has the forward's weights"
        assert not torch.equal(found.first, found.later), "each step has its own shift"
        rows = found.first.view(2, ROW)
        assert torch.equal(rows[:, EXACT], kept[:, EXACT])
        assert 0 < matrices(rows - kept).abs().max() < 0.5 * (2 * 5 / 15)


def mean(config, steps):
    """What arrives of weights in the mean of the steps."""
    group = dist.group.WORLD
    way, total = config.open(UNIT, group), torch.zeros(2 * ROW)
    for _ in range(steps):
        whole = torch.empty(2 * ROW)
        way(whole, drawn(ROW, seed=dist.get_rank()))
        total += whole
        way.end_step()
    return total / steps


def test_weights_of_qsdp_are_right_in_the_mean():
    """Over the shifts that ranks share, one a step."""
    steps, kept = 200, torch.stack([drawn(ROW, seed=rank) for rank in range(2)])
    found, same = run_ranks(mean, 2, QSDPWeights(bits=3, bucket=64), steps)
    assert torch.equal(found, same)
    off = matrices(found.view(2, ROW) - kept)
    # A unit is a seventh of a bucket's range; off by half at most.
    ranges = matrices(torch.logspace(-3, 0, ROW))
    assert (off.abs() / ranges).max() < 5 * (8 / 7 / 2) / steps**0.5
    assert off.abs().max() > 0


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["normal", "uniform", "product of two normals"])
def test_learned_levels_lose_less_of_gradients_and_more_of_weights(kind, bits):
    """Of a normal distribution; of a uniform one there is nothing to be learned. What a shift adds
    to a weight is subtracted again if levels are at equal distances alone."""
    noise = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 1024, generator=noise)
    if kind == "uniform":
        rows = torch.rand(64, 1024, generator=noise)
    elif kind != "normal":
        rows *= torch.randn(64, 1024, generator=noise)
    codec = Codec(bits, 1024, "minmax")
    even = torch.linspace(0, 1, 2**bits)
    learned = learn(even, codec.normalized(rows).flatten(), 0.01)
    assert torch.equal(learned, learned.sort().values)
    assert learned[0] == 0
    assert learned[-1] == 1

    def lost(levels, shift=0.0):
        noise = None if shift else torch.Generator().manual_seed(1)
        code = codec.encode(rows, shift, noise, levels)
        return float((codec.decode(code, 1024, shift, levels) - rows).square().mean())

    less = lost(learned[None]) / lost(None)
    assert less < {"normal": 0.92, "uniform": 1.02}.get(kind, 0.75 if bits < 5 else 0.9)
    shifts = [number / 20 - 0.499 for number in range(1, 20)]
    losses = [sum(lost(levels, shift) for shift in shifts) for levels in (learned[None], None)]
    more = losses[0] / losses[1]
    assert more > {"normal": 1.25, "uniform": 1.8}.get(kind, 0.9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_levels_learned_of_what_is_not_finite_are_finite(bad):
    codec, rows = Codec(3, 32, "minmax"), torch.ones(1, 96)
    rows[0, 40] = bad
    even = torch.linspace(0, 1, 8)
    assert learn(even, codec.normalized(rows).flatten(), 0.01).isfinite().all()

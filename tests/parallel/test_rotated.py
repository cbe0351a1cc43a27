"""Weights that travel around a ring: what a rank has of them, and where they cannot travel."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests import layouts
from tests.layouts import FULL, ROTATED, case
from tests.ranks import run_ranks
from tests.runs import train
from torchtitan.parallel.sharding import Precision
from torchtitan.parallel.sharding.rotated import Neighbours, RingEmbedding, RingLinear

PRECISION = Precision()


class Seen:
    """The largest number of parts of a matrix that were alive at the same time, but for the own."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def note(self, tensors: list[Tensor]) -> None:
        self.alive += [weakref.ref(tensor) for tensor in tensors]
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))


def computed(rows: int) -> tuple[dict[str, Tensor], int]:
    """On each rank its own inputs, the results and gradients, and what was alive in the forward."""
    init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.group.WORLD
    assert group is not None
    ring, rank, seen = Neighbours(group), group.rank(), Seen()

    class Watched(Neighbours):
        def pass_on(self, *sent: Tensor) -> Any:
            arriving, works = super().pass_on(*sent)
            seen.note(arriving)
            return arriving, works

    whole = torch.randn(ring.size * rows, 8, generator=torch.Generator().manual_seed(0))
    own = whole[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    x, tokens = inputs(rank, ring.size * rows)
    out = RingLinear.apply(x, own, Watched(group), PRECISION)
    most = seen.most
    looked_up = RingEmbedding.apply(own, tokens, ring, PRECISION)
    (out.square().sum() + looked_up.square().sum()).backward()
    return {"out": out, "rows": looked_up, "x": x.grad, "own": own.grad}, most


def inputs(rank: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(2, 5, 8, generator=generator).requires_grad_()
    return x, torch.randint(rows, (2, 5), generator=generator)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_computes_its_inputs_with_all_rows(ranks: int) -> None:
    rows = 3
    whole = torch.randn(ranks * rows, 8, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(whole)
    for rank, (found, _) in enumerate(run_ranks(computed, ranks, rows)):
        x, tokens = inputs(rank, ranks * rows)
        out, looked_up = nn.functional.linear(x, weight), nn.functional.embedding(tokens, weight)
        (out.square().sum() + looked_up.square().sum()).backward()
        assert torch.allclose(found["out"], out, atol=1e-6)
        assert torch.equal(found["rows"], looked_up)
        assert torch.allclose(found["x"], x.grad, atol=1e-5)
    assert weight.grad is not None
    home = torch.cat([found["own"] for found, _ in run_ranks(computed, ranks, rows)])
    assert torch.allclose(home, weight.grad, atol=1e-4)


def test_a_rank_has_three_parts_of_a_matrix_at_most() -> None:
    """Its own, one that it computes with, and one that arrives."""
    assert {most for _, most in run_ranks(computed, 4, 3)} == {2}


def checkpoints(folder: str) -> list[dict[str, Tensor]]:
    """Save two steps of rotated weights; load them rotated and as FSDP2 has them."""
    found = []
    for steps, sharding in ((2, ROTATED), (4, ROTATED), (4, {})):
        recipe = layouts.job(
            case(shard=2, recompute=FULL, sharding=sharding),
            "AdamW",
            training={"steps": steps},
            job={"dump_folder": folder},
            checkpoint={"enable": True, "interval": 2},
            validation={"enable": True, "freq": 1, "steps": 1},
        )
        found.append(train(recipe))
    return found


def test_checkpoints_are_those_of_fsdp2(tmp_path: Path) -> None:
    for _, resumed, loaded in run_ranks(checkpoints, 2, str(tmp_path)):
        assert all(torch.equal(loaded[name], weight) for name, weight in resumed.items())

"""Matrices in parts: dealt out evenly, each whole on one rank only, and right where uneven."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import run_ranks
from torchtitan.optim.matrices import Area, Exchange, Matrix, assign_to_ranks
from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.torch_private.dtensor import extents


def area(rows, columns):
    return Area(range(rows), range(columns))


def cost(rows, columns):
    return float(rows * columns * min(rows, columns))


def test_matrices_are_dealt_out_evenly():
    shapes = [(40, 10)] * 5 + [(10, 40)] * 3 + [(20, 20)] * 7 + [(3, 4)]
    matrices = [Matrix(number, area(*shape)) for number, shape in enumerate(shapes)]
    for ranks in (1, 2, 3, 5, 32):
        rounds = assign_to_ranks(matrices, ranks, cost, limit=900)
        assert all(len(current) == ranks for current in rounds)
        dealt = [m for current in rounds for of_rank in current for m in of_rank]
        assert sorted(dealt) == sorted(matrices)
        for of_rank in (of_rank for current in rounds for of_rank in current):
            assert len({m.area.shape for m in of_rank}) <= 1
            assert len(of_rank) == 1 or sum(m.area.size for m in of_rank) <= 900
        costs = [cost(*shape) for shape in shapes]
        loads = [
            sum(cost(*m.area.shape) for current in rounds for m in current[rank])
            for rank in range(ranks)
        ]
        assert max(loads) <= 4 / 3 * max(sum(costs) / ranks, max(costs))
        assert rounds == assign_to_ranks(matrices, ranks, cost, limit=900)


def test_a_matrix_above_the_limit_is_by_itself():
    matrices = [Matrix(number, area(10, 10)) for number in range(3)]
    assert [len(of_rank) for (of_rank,) in assign_to_ranks(matrices, 1, cost, limit=0)] == [1, 1, 1]
    assert [len(of_rank) for (of_rank,) in assign_to_ranks(matrices, 1, cost, limit=299)] == [2, 1]
    assert [len(of_rank) for (of_rank,) in assign_to_ranks(matrices, 1, cost, limit=300)] == [3]


SHAPES = [(7, 5), (5, 9), (3, 4), (8, 8), (8, 8), (1, 6), (7, 5)]
LAYOUTS = {
    "rows, uneven": ((3,), [[Shard(0)]]),
    "columns, uneven": ((2,), [[Shard(1)]]),
    "copies": ((3,), [[Replicate()]]),
    "copies of parts": ((2, 2), [[Replicate(), Shard(0)], [Replicate(), Shard(1)]]),
    "rows and columns": ((2, 2), [[Shard(0), Shard(1)], [Shard(1), Shard(0)]]),
    "parts of parts": ((2, 2), [[_StridedShard(0, split_factor=2), Shard(0)], [Shard(0)] * 2]),
    "each otherwise": ((2, 2), [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(1)] * 2]),
}


def laid_out(whole, mesh, placements):
    """As FSDP2 does it: what is split later is a part of a part."""
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(whole, mesh, placements)
    inner = distribute_tensor(whole, mesh["1"], placements[1:]).to_local()
    part = distribute_tensor(inner, mesh["0"], [Shard(0)]).to_local()
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def exchanged(layout, limit):
    """How far results are off; updates on this rank; the most that was whole; extents that err."""
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("01"[: len(sizes)]))
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in SHAPES]
    ways = (placements[number % len(placements)] for number in range(len(wholes)))
    tensors = [laid_out(w.clone(), mesh, how) for w, how in zip(wholes, ways, strict=True)]
    parameters = [NamedParameter(t, str(n), "matrix") for n, t in enumerate(tensors)]
    areas = {"1": [Area(range(2), range(9)), Area(range(2, 5), range(9))]}
    exchange = Exchange(parameters, lambda p: areas.get(p.name, [area(*p.shape)]), cost, limit)
    seen = [0, 0]

    def update(matrices):
        seen[0] += len(matrices)
        seen[1] = max(seen[1], matrices.numel())
        # The mean is of all of a matrix; transposed memory is what a product may give.
        return (matrices - matrices.mean((1, 2), keepdim=True)).mT.contiguous().mT

    exchange.apply([local(tensor) for tensor in tensors], update)
    exchange.apply([local(tensor) for tensor in tensors], lambda matrices: 2 * matrices)
    worst, coordinate = 0.0, mesh.get_coordinate() or []
    wrong = 0
    for whole, parameter in zip(wholes, parameters, strict=True):
        found = areas.get(parameter.name, [area(*whole.shape)])
        expected = torch.empty_like(whole)
        for one in found:
            matrix = one.of(whole, area(*whole.shape))
            one.of(expected, area(*whole.shape)).copy_(2 * (matrix - matrix.mean()))
        held = Area.from_dims(extents(parameter.tensor, coordinate))
        wrong += held.shape != tuple(local(parameter.tensor).shape)
        off = held.of(expected, area(*whole.shape)) - local(parameter.tensor)
        worst = max([worst, *off.abs().flatten().tolist()])
    return worst, seen[0], seen[1], wrong


LIMITS = (0, 130)


def all_exchanged(layouts):
    return {(name, limit): exchanged(name, limit) for name in layouts for limit in LIMITS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_matrix_is_whole_once_and_its_parts_come_back(ranks):
    layouts = [name for name, (sizes, _) in LAYOUTS.items() if math.prod(sizes) == ranks]
    by_rank = run_ranks(all_exchanged, ranks, layouts)
    for name, limit in by_rank[0]:
        found = [each[name, limit] for each in by_rank]
        assert max(worst for worst, *_ in found) < 1e-6, name
        assert sum(count for _, count, _, _ in found) == len(SHAPES) + 1, name
        assert all(most <= max(limit, 64) for _, _, most, _ in found), name
        assert not any(wrong for *_, wrong in found), name

"""Initial weights: a function of seed, name and position, and of nothing else."""

import math
from hashlib import blake2b, shake_256

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing import start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.models import spec as module
from torchtitan.models.spec import initialize
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.torch_private.runtime import generator_of

STD = 0.02
KNOWN = [-0.0207245, -0.0160441, -0.0069583]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 3 rows of 16, so that a small parameter has many, the last of them ragged."""
    monkeypatch.setattr(module, "BLOCK", 48)


@pytest.fixture
def ranks():
    """Lets one process be each rank of a world in turn; no rank may talk to another."""

    def each(world):
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            try:
                yield rank
            finally:
                dist.destroy_process_group()

    return each


def draw(*shape, name="w", seed=0, dtype=torch.float32):
    parameter = torch.full(shape, math.nan, dtype=dtype)
    initialize([(name, parameter)], lambda _: STD, seed)
    return parameter


def test_same_seed_and_name_give_the_same_weights_and_others_do_not():
    weights = draw(40, 16)
    assert torch.equal(weights, draw(40, 16))
    for other in (draw(40, 16, name="v"), draw(40, 16, seed=1)):
        assert not (weights == other).any()


def test_known_values():
    """What a seed stands for must not change from one version to the next unnoticed."""
    weights = draw(40, 16, name="layers.0.attention.wq.weight", seed=42)
    found = [weights[0, 0], weights[20, 7], weights[39, 15]]
    assert found == pytest.approx(KNOWN, rel=1e-4)


def test_blocks_of_a_parameter_differ():
    assert len(draw(40, 16)[:39].view(13, -1).unique(dim=0)) == 13


def test_no_two_names_draw_alike_where_a_short_seed_would():
    """Of so many names two have the same seed of 32 bits."""
    seen = {}
    for number in range(300_000):
        seed = blake2b(f"0/{number}/0".encode(), digest_size=8).digest()[:4]
        if seed in seen:
            break
        seen[seed] = number
    one, other = (draw(3, 16, name=str(each)) for each in (seen[seed], number))
    assert number < 299_999
    assert not (one == other).any()


def test_the_state_of_a_generator_is_the_whole_hash():
    digest = shake_256(b"a name").digest(4 * 624)
    twister = np.random.MT19937()
    words = np.frombuffer(digest, np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    found = torch.empty(2000, dtype=torch.int64).random_(2**16, generator=generator_of("a name"))
    assert found.tolist() == [number % 2**16 for number in twister.random_raw(2000).tolist()]


def test_statistics(monkeypatch):
    monkeypatch.undo()
    weights = draw(3000, 1000)
    assert weights.mean().item() == pytest.approx(0, abs=4 * STD / math.sqrt(weights.numel()))
    assert weights.std().item() == pytest.approx(STD, rel=0.002)
    within = (weights.abs() < STD).float().mean().item()
    assert within == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.002)


def test_dtype_changes_only_the_rounding():
    assert torch.equal(draw(40, 16, dtype=torch.bfloat16), draw(40, 16).bfloat16())


def test_rule_decides_by_name_and_gradients_are_left_alone():
    model = nn.Sequential(nn.Linear(16, 40, bias=False), nn.RMSNorm(40))
    rule = {"0.weight": 0.5, "1.weight": "ones"}
    with torch.no_grad():
        model[1].weight.zero_()
    initialize(model.named_parameters(), rule.__getitem__, seed=0)
    torch.testing.assert_close(model[0].weight.detach(), draw(40, 16, name="0.weight") * 25)
    assert torch.equal(model[1].weight, torch.ones(40))
    assert model[0].weight.requires_grad
    assert model[0].weight.is_leaf


@pytest.mark.parametrize("shape", [(40, 16), (41, 16), (3, 16), (41,), (8, 6, 10)], ids=str)
@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
    ],
    ids=str,
)
def test_a_rank_draws_its_part_of_the_whole(ranks, shape, sizes, placements):
    whole = draw(*shape)
    for _ in ranks(4):
        mesh = init_device_mesh("cpu", sizes)
        sharded = empty(*shape, device_mesh=mesh, placements=placements)
        initialize([("w", sharded)], lambda _: STD, seed=0)
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert torch.equal(sharded.to_local(), expected.to_local())


@pytest.mark.parametrize(
    "placements",
    [[Shard(1)] * 2, [Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)]],
    ids=str,
)
def test_a_rank_draws_its_part_under_tensor_parallelism(ranks, placements):
    whole = draw(40, 16)
    for _ in ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        sharded = distribute_tensor(torch.zeros_like(whole), mesh, placements, src_data_rank=None)
        initialize([("w", sharded)], lambda _: STD, seed=0)
        assert torch.equal(sharded.to_local(), expected.to_local())


def pair():
    return nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 24, bias=False))


def check_fsdp_over_tensor_parallelism(rank, store, whole):
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    with torch.device("meta"):
        model = pair()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    model.to_empty(device="cpu")
    initialize(model.named_parameters(), lambda _: STD, seed=0)

    fsdp, tp = divmod(rank, 2)
    first, second = (parameter.to_local() for parameter in model.parameters())
    assert isinstance(model[0].weight, DTensor)
    assert torch.equal(first, whole["0.weight"].chunk(2)[tp].chunk(2)[fsdp])
    assert torch.equal(second, whole["1.weight"].chunk(2, dim=1)[tp].chunk(2)[fsdp])
    assert all(
        torch.equal(parameter.full_tensor(), whole[name])
        for name, parameter in model.named_parameters()
    )
    dist.destroy_process_group()


def test_model_under_fsdp_over_tensor_parallelism(tmp_path):
    plain = pair()
    initialize(plain.named_parameters(), lambda _: STD, seed=0)
    whole = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    arguments = (str(tmp_path / "store"), whole)
    start_processes(check_fsdp_over_tensor_parallelism, arguments, 4, start_method="fork")


def test_uneven_strided_part_is_a_part_of_a_part(ranks):
    """Tensor ranks have 21 and 20 rows, which FSDP splits again."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    plain = torch.empty(41, 16)
    initialize([("w", plain)], lambda _: STD, seed=0)
    rows = []
    for _ in ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        sharded = distribute_tensor(torch.zeros(41, 16), mesh, placements, src_data_rank=None)
        initialize([("w", sharded)], lambda _: STD, seed=0)
        (size, _), (begin, _) = local_extent(sharded)
        rows.append((begin, size))
        torch.testing.assert_close(sharded.to_local(), plain[begin : begin + size])
    assert rows == [(0, 11), (21, 10), (11, 10), (31, 10)]


def test_scattered_part_is_refused(ranks):
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    for _ in ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        sharded = distribute_tensor(torch.zeros(48, 16), mesh, placements, src_data_rank=None)
        with pytest.raises(AssertionError, match="scattered part"):
            initialize([("w", sharded)], lambda _: STD, seed=0)


def test_a_rank_draws_no_more_than_the_blocks_it_touches(ranks, monkeypatch):
    drawn = []
    normal = torch.Tensor.normal_

    def counted(self, *args, **kwargs):
        drawn.append(self.numel())
        return normal(self, *args, **kwargs)

    for _ in ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        sharded = empty(120, 16, device_mesh=mesh, placements=[Shard(0)])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "normal_", counted)
            initialize([("w", sharded)], lambda _: STD, seed=0)
    assert sum(drawn) == 120 * 16

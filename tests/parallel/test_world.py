"""One mesh with every axis, and process groups for those in use alone."""

import os

import pytest
import torch
import torch.distributed as dist

from tests import forked
from tests.ranks import free_port, run_ranks
from torchtitan.device import Device
from torchtitan.parallel import CommConfig, Degrees, open_world
from torchtitan.torch_private.distributed import group_members


def look(degrees):
    with open_world(degrees, CommConfig(), Device("cpu")) as world:
        one = torch.ones(())
        return {
            "axes": dict(zip(world.mesh.mesh_dim_names, world.mesh.shape, strict=True)),
            "groups": sorted(purpose for purpose, _ in group_members().values()),
            "members": {n: dist.get_process_group_ranks(g) for n, g in world.groups.items()},
            "data_mesh": world.data_mesh.shape,
            "data_rank": world.data_rank,
            "sum": world.sum(world.terms(one.clone()), over="all").item(),
        }


@pytest.mark.parametrize(
    ("degrees", "made", "data_mesh"),
    [
        # Besides the default group and the slow one: this rank's own, for all unused axes.
        (Degrees(), [], (1,)),
        (Degrees(dp_shard=4), ["alone"], (4,)),
        (Degrees(dp_replicate=4), ["alone"], (4, 1)),
        (Degrees(dp_shard=2, tp=2), ["alone", "dp_shard", "tp"], (2,)),
        (Degrees(dp_shard=2, cp=2), ["alone", "cp", "dp_shard"], (4,)),
        (Degrees(dp_replicate=2, cp=2), ["alone", "cp", "dp_replicate"], (2, 2)),
        (Degrees(pp=2, dp_shard=2), ["alone", "dp_shard", "pp"], (2,)),
    ],
)
def test_groups_are_made_for_axes_in_use(degrees, made, data_mesh):
    size = degrees.pp * degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp
    for rank, seen in enumerate(run_ranks(look, size, degrees)):
        assert seen["axes"] == degrees._asdict()
        own = sorted(name for name in seen["groups"] if name in (*Degrees._fields, "alone"))
        assert own == made if size > 1 else own in ([], ["alone"])
        assert seen["data_mesh"] == data_mesh
        assert all(rank in members for members in seen["members"].values())
        assert {n: len(seen["members"][n]) for n in degrees._fields} == degrees._asdict()
        assert seen["sum"] == size / degrees.tp


def test_ranks_of_a_sample_read_the_same_data():
    found = run_ranks(look, 8, Degrees(pp=2, dp_shard=2, tp=2))
    assert [seen["data_rank"] for seen in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert found[0]["members"]["tp"] == [0, 1]  # the innermost axis: the nearest ranks
    assert found[0]["members"]["pp"] == [0, 4]


def ask():
    with open_world(Degrees(dp_shard=3), CommConfig(), Device("cpu")) as world:
        found = [f"of rank {world.rank}"] * world.rank
        flags = world.any([world.rank == 1, False, world.rank > 0])
        return flags, world.gather_found(found), world.gather_found([])


def test_what_some_ranks_have_found_is_known_on_all():
    found = ["of rank 1", "of rank 2", "of rank 2"]
    assert run_ranks(ask, 3) == [([True, False, True], found, [])] * 3


def uneven(level):
    """What becomes of a collective to which one rank gives more than the other."""
    with open_world(Degrees(dp_shard=2), CommConfig(debug_level=level), Device("cpu")) as world:
        world.after_first_step()
        given = torch.ones(4 + world.rank)
        taken = [torch.empty_like(given) for _ in range(2)]
        error = ""
        if level == "detail":
            try:
                dist.all_gather(taken, given, group=world.slow_group)
            except RuntimeError as raised:
                error = str(raised)
        return str(dist.get_debug_level()), error


@pytest.mark.parametrize("level", [None, "off", "info", "detail"])
def test_the_level_of_checks_takes_effect(level):
    for found, error in run_ranks(uneven, 2, level):
        assert found == f"DebugLevel.{(level or 'off').upper()}"
        assert ("Detected mismatch between collectives" in error) == (level == "detail")


def misses():
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", "WORLD_SIZE": "2"}
    other, comm = os.fork(), CommConfig(init_timeout_seconds=20)
    os.environ["RANK"] = "0" if other else "1"
    with open_world(Degrees(dp_shard=2), comm, Device("cpu")) as world:
        if not other:
            os._exit(0)
        os.waitpid(other, 0)
        with pytest.raises(RuntimeError, match="by peer"):  # and no timeout
            world.sum(torch.ones(1), over="dp_shard")


def test_a_rank_that_dies_before_it_has_sent_anything_is_missed(tmp_path):
    ended = forked.run(misses, tmp_path)
    assert ended.status == 0, ended.stderr

"""A process group that has one rank, says that there are others, and sends nothing."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def fake_process_group(rank: int, ranks: int) -> Iterator[None]:
    """Pretend to be `rank` of `ranks`. Collectives return garbage.

    DTensor and the compiler cache results by mesh, with names of groups. Ranks that do the same
    share them: groups are named by their ranks relative to this rank, and meshes are equal if their
    relative ranks and the names of their groups are. So a result may have the mesh of an earlier
    rank, whose ranks are then taken relative to this one. No mesh that is made inside is equal to
    one that is made outside.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    initialize, names = DeviceMesh.__init__, Counter[str]()
    ranks_of_mesh: Any = vars(DeviceMesh)["mesh"].fget

    def initialize_relative(mesh: Any, *args: Any, **settings: Any) -> None:
        initialize(mesh, *args, **settings)
        mesh._flatten_rank_map, mesh._hash = (), None  # ranks of the whole world
        with _disable_current_modes():
            mesh._relative_ranks = tuple((mesh.mesh.flatten() - rank).tolist())

    def ranks_now(mesh: Any) -> torch.Tensor:
        found: torch.Tensor
        if (relative := vars(mesh).get("_relative_ranks")) is None:
            found = ranks_of_mesh(mesh)
        else:
            with _disable_current_modes():
                found = torch.tensor(relative, dtype=torch.int).view(mesh.shape) + rank
        return found

    def name_of(members: Sequence[int], use_hashed_name: bool) -> str:
        first, last = min(members, default=0) - rank, max(members, default=0) - rank
        name = f"{len(members)} ranks from {first} to {last}"
        names[name] += 1
        return f"{name}, {names[name]}"

    def names_of(mesh: Any) -> tuple[object, ...]:
        names = getattr(mesh, "_dim_group_names", ())
        return -1, vars(mesh).get("_relative_ranks"), *names  # threads have positive numbers

    def keep(mesh: Any, _: int | None) -> None:
        vars(mesh)["_thread_id"] = -1

    hook = sys.excepthook  # torch puts the rank before each line of a traceback, once a group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ExitStack() as opened:
            replace = mock.patch.object
            opened.enter_context(replace(DeviceMesh, "__init__", initialize_relative))
            opened.enter_context(replace(DeviceMesh, "mesh", property(ranks_now)))
            in_hash = property(names_of, keep)
            opened.enter_context(replace(DeviceMesh, "_thread_id", in_hash, create=True))
            opened.enter_context(replace(distributed_c10d, "_process_group_name", name_of))
            yield
    finally:
        sys.excepthook = hook
        dist.destroy_process_group()


@contextmanager
def hidden_shape_propagation() -> Iterator[None]:
    """Hide from dispatch modes the operators that DTensor runs on fake tensors of the whole shapes.

    It runs each once for each shape in a process, to know the shape of the result.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def hidden(*args: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args)

    with mock.patch.object(ShardingPropagator, name, hidden):
        yield


@contextmanager
def assumed_values(assume: Callable[[], None]) -> Iterator[None]:
    """Answer reads of the values of fake tensors: numbers are 1, and masks are true everywhere.

    `assume` is called at each of them. Values that fake tensors know, as those of constants, are
    theirs.
    """
    from torch._subclasses.fake_impls import op_implementations_dict

    def number(mode: Any, function: Any, tensor: Any) -> Any:
        assume()
        if tensor.dtype == torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    def indices(mode: Any, function: Any, tensor: Any) -> Any:
        assume()
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)

    answers = {
        torch.ops.aten._local_scalar_dense.default: number,
        torch.ops.aten.nonzero.default: indices,
    }
    with mock.patch.dict(op_implementations_dict, answers):
        yield

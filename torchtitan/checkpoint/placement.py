"""Which rank writes which piece of a tensor, and which blocks a rank reads: DCP's planners.

A piece that several ranks hold is written by one of them, chosen so that all write about as much.
When loading, each rank reads the blocks that it holds now, however they were cut when they were
saved; no rank needs another for that.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Piece, TensorSource
from torchtitan.config import ConfigError
from torchtitan.parallel import World
from torchtitan.torch_private.dtensor import stored

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


T = TypeVar("T")


class Writers:
    """Remembers the plan of each kind of save, since a run's tensors keep their layout."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._plans: dict[str, list[WriteItem]] = {}

    def pieces(self, kind: str, tensors: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
        """What this rank writes of `tensors`, which every rank of the world asks together."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self.world.rank == 0)
        if kind not in self._plans:
            everyones = self.world.collect(planner.create_local_plan())
            plans = planner.create_global_plan(everyones)[0] if everyones else None
            self._plans[kind] = self.world.deal(plans).items
        return [(_piece(item), _tensor(planner.resolve_data(item))) for item in self._plans[kind]]


def _piece(item: "WriteItem") -> Piece:
    data = item.tensor_data
    assert data is not None, item.index.fqn
    return Piece(
        name=item.index.fqn,
        dtype=data.properties.dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor), type(value)
    return stored(value).detach()


def load_into(tensors: Mapping[str, Tensor], source: TensorSource) -> None:
    """Copy from `source` the blocks of `tensors` that this rank holds; they are known to fit."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    found = source.shapes()
    wholes: dict[str, STORAGE_TYPES] = {}
    for name in tensors:
        dtype, shape = found[name]
        whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        wholes[name] = TensorStorageMetadata(TensorProperties(dtype), whole.sizes, [whole])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), Metadata(wholes), is_coordinator=True)
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            block = source.read(item.storage_index.fqn, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).copy_(block)


class FailedOnRank(RuntimeError):
    """Another rank met an error that nobody expects; its own message has the traceback."""


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """What `work` returns; if it failed on any rank, all ranks raise what the first of them met.

    Raises:
        ConfigError: where something is not as it should be: damaged, say, or a store that failed.
        OSError: where a disk failed.
        FailedOnRank: where another rank met anything else, which that rank raises itself.
    """
    value, problem = _attempt(work)
    everyones = world.gather(_for_others(world.rank, problem))
    if isinstance(everyones[world.rank], FailedOnRank):
        raise cast(Exception, problem)
    for found in everyones:
        if found is not None:
            raise found
    return cast(T, value)


def on_rank_0(world: World, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank; raises as `on_all_ranks` does."""
    value, problem = _attempt(work) if world.rank == 0 else (None, None)
    value, found = world.share((value, _for_others(0, problem)))
    if found is not None:
        raise problem or found
    return cast(T, value)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _for_others(rank: int, error: Exception | None) -> Exception | None:
    """What other ranks raise; not every error can be sent to them."""
    if error is None or isinstance(error, ConfigError | OSError):
        return error
    return FailedOnRank(f"rank {rank} failed: {type(error).__name__}: {error}")


def differences(tensors: Mapping[str, Tensor], source: TensorSource) -> list[str]:
    """Names and shapes in which a source does not fit, a line each."""
    found = source.shapes()
    mistakes = []
    for name, tensor in tensors.items():
        if name not in found:
            mistakes.append(f"{name} is not in the checkpoint")
        elif found[name][1] != tuple(tensor.shape):
            there, here = found[name][1], tuple(tensor.shape)
            mistakes.append(f"{name} is {there} there and {here} here")
    return mistakes

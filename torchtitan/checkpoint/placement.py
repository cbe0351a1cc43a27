"""Assignment of tensor pieces to the ranks that write them, and of blocks to read: DCP's planners.

A piece that several ranks hold is written by one of them, balancing the load. When loading, each
rank reads the blocks that it holds now, however they were sharded when they were saved, without
communication.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Piece, Sizes, TensorSource
from torchtitan.config import ConfigError
from torchtitan.parallel import World
from torchtitan.torch_private.dtensor import stored

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, WriteItem


T = TypeVar("T")


class Writers:
    """Plans of who writes what, cached by kind of save, since a run's tensors keep their layout."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._plans: dict[str, list[WriteItem]] = {}

    def pieces(self, kind: str, tensors: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
        """Return the pieces of `tensors` that this rank writes; all ranks call it together."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self.world.rank == 0)
        if kind not in self._plans:
            everyones = self.world.gather_object(planner.create_local_plan())
            plans = planner.create_global_plan(everyones)[0] if everyones else None
            self._plans[kind] = self.world.scatter_object(plans).items
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
    """Copy the blocks of `tensors` that this rank holds from `source`, which must match."""
    planner, items = _planned(tensors, source.shapes())
    with torch.no_grad():
        for item in items:
            block = source.read(item.storage_index.fqn, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).copy_(block)


def blocks_to_load(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[torch.dtype, Sizes]]
) -> Iterator[tuple[str, Sizes, Sizes]]:
    """Yield name, offsets and sizes of the blocks of `tensors` that this rank holds."""
    for item in _planned(tensors, shapes)[1]:
        yield item.storage_index.fqn, tuple(item.storage_offsets), tuple(item.lengths)


def _planned(
    tensors: Mapping[str, Tensor], found: Mapping[str, tuple[torch.dtype, Sizes]]
) -> "tuple[LoadPlanner, list[ReadItem]]":
    """Plan to load the blocks of `tensors` that this rank holds from tensors of these shapes."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    wholes: dict[str, STORAGE_TYPES] = {}
    for name in tensors:
        dtype, shape = found[name]
        whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        wholes[name] = TensorStorageMetadata(TensorProperties(dtype), whole.sizes, [whole])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), Metadata(wholes), is_coordinator=True)
    return planner, planner.create_local_plan().items


class FailedOnRank(RuntimeError):
    """Unexpected error on another rank, whose own message has the traceback."""


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Return the result of `work`; if it fails on any rank, all raise the first rank's error.

    Raises:
        ConfigError: if data is damaged, for example, or a store failed.
        OSError: if a disk failed.
        FailedOnRank: if another rank met any other error, which that rank raises itself.
    """
    value, problem = _attempt(work)
    if not world.any([problem is not None])[0]:
        return cast(T, value)
    everyones = world.gather(_for_others(world.rank, problem))
    if isinstance(everyones[world.rank], FailedOnRank):
        raise cast(Exception, problem)
    raise next(found for found in everyones if found is not None)


def on_rank_0(world: World, work: Callable[[], T]) -> T:
    """Return on every rank the result of `work` on rank 0; raise as `on_all_ranks` does."""
    value, problem = _attempt(work) if world.rank == 0 else (None, None)
    value, found = world.broadcast_object((value, _for_others(0, problem)))
    if found is not None:
        raise problem or found
    return cast(T, value)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _for_others(rank: int, error: Exception | None) -> Exception | None:
    """Return the error that other ranks raise; not every error can be pickled."""
    if error is None or isinstance(error, ConfigError | OSError):
        return error
    return FailedOnRank(f"rank {rank} failed: {type(error).__name__}: {error}")


def differences(tensors: Mapping[str, Tensor], source: TensorSource) -> list[str]:
    """Return the names and shapes in which a source does not match, one line each."""
    found = source.shapes()
    mistakes = []
    for name, tensor in tensors.items():
        if name not in found:
            mistakes.append(f"{name} is not in the checkpoint")
        elif found[name][1] != tuple(tensor.shape):
            there, here = found[name][1], tuple(tensor.shape)
            mistakes.append(f"{name} is {there} there and {here} here")
    return mistakes

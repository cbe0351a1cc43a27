"""Data parallelism by `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277).

One technique covers every data-parallel layout, because its mesh has two axes: parameters are
copied along `dp_replicate` and split along `dp_shard`, joined with `cp` if sequences are split too.

    DDP   dp_replicate = N, dp_shard = 1
    FSDP  dp_replicate = 1, dp_shard = N
    HSDP  both greater than 1

Gradients are summed, never averaged: the loss is already divided by the targets of the global
batch, so the sum over ranks is the gradient of the global mean.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallel.settings import ReshardPolicy

if TYPE_CHECKING:  # 1.3 s to import, which a recipe check should not pay
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run: `parameters` are stored, `compute` and `reduce` are what they become."""

    parameters: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


def apply(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    reshard: ReshardPolicy,
    cpu_offload: bool,
    pin_memory: bool,
) -> None:
    """Split and copy the parameters of `model` over `mesh` (copies, parts) or (parts), in place.

    Each block is gathered on its own, just before it is used. `reshard` says whether a block is
    freed again after its forward: `always`; `never`; `default`: all but the last, which the
    backward needs at once.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    # Under tensor parallelism the logits are a view of a DTensor; nothing changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if cpu_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)

    def shard(module: nn.Module, reshard_after_forward: bool) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=partial(placement, parts=mesh.size(-1)),
        )

    for block in blocks:
        is_last = block is blocks[-1]
        shard(block, reshard == "always" or (reshard == "default" and not is_last))
    shard(model, reshard == "always")
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; with a factor of 1 the plain sum is the same.
        module.set_force_sum_reduction_for_comms(True)


def placement(parameter: nn.Parameter, parts: int) -> "Shard | None":
    """Along which dim a parameter is split into `parts`; None: the first, as FSDP does by itself.

    Rows that tensor parallelism split already are split again only if that comes out even; else
    columns are, so that every rank's part stays one contiguous piece.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    return Shard(1) if len(parameter) % (parameter.device_mesh.size() * parts) else None


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """The modules that `apply` treated."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_after(sharded: "Sequence[FSDPModule]", is_last: bool) -> None:
    """Before a microbatch: whether its gradients are the last of the step.

    Sharded gradients are reduced for every microbatch, since keeping them whole would cost the
    memory that sharding saved; copies are summed once, with the last.
    """
    for module in sharded:
        module.set_requires_all_reduce(is_last)
        module.set_is_last_backward(is_last)

"""Parameters as seen by an optimizer: each with its name, its role and its placement on a mesh."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from torchtitan.torch_private.dtensor import is_dtensor, stored

Layout = Any
"""Mesh and placements of a DTensor; None for a plain tensor."""


@dataclass(frozen=True)
class GradientNorm:
    """The 2-norm, in float32, of all gradients on all ranks."""

    squares: Tensor
    """Terms (n,) of its square."""
    is_split: bool
    """Whether they are terms of this rank, to be summed over all ranks."""

    def terms(self, rank: int) -> Tensor:
        """Return the terms (n,) of `rank`, whose sum over all ranks is the square."""
        return self.squares if self.is_split or rank == 0 else self.squares * 0  # NaN stays NaN

    def complete(self) -> Tensor:
        """Return the norm (0-d), equal on the ranks that share a model."""
        squares = self.squares.clone()
        if self.is_split:
            dist.all_reduce(squares)
        return squares.sum().sqrt()


def global_norm(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm (0-d), in float32, of all gradients on all ranks; see `combined`."""
    return norm_of(gradients, stages).complete()


def norm_of(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> GradientNorm:
    """Return the norm of all gradients on all ranks; see `combined`."""
    by_layout: dict[Layout, list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(layout_of(gradient), []).append(local(gradient))
    norms = {layout: local_norms(group) for layout, group in by_layout.items()}
    return combined(norms, stages)


def combined(
    norms: Mapping[Layout, Sequence[Tensor]], stages: dist.ProcessGroup | None = None
) -> GradientNorm:
    """Combine this rank's gradient norms into the norm over all ranks.

    Gradients are grouped by mesh and placements: the square of each group is summed over the mesh
    axes that shard it, not over those that replicate it; then all are summed over `stages`, whose
    ranks have gradients of other parameters. If all ranks share all parameters, one sum is left.
    """
    squares = [torch.stack(list(group)).square().sum() for group in norms.values()]
    sharded = [_sharding_groups(layout) for layout in norms]
    is_staged = stages is not None and stages.size() > 1
    if not is_staged and all([group.size() for group in each] == [_ranks()] for each in sharded):
        return GradientNorm(torch.stack(squares), is_split=True)
    for square, groups in zip(squares, sharded, strict=True):
        for group in groups:
            dist.all_reduce(square, group=group)
    total = torch.stack(squares).sum()
    if is_staged:
        dist.all_reduce(total, group=stages)
    return GradientNorm(total[None], is_split=False)


def _sharding_groups(layout: Layout) -> list[dist.ProcessGroup]:
    """Return the groups of several ranks over which a layout shards a tensor."""
    axes = (
        axis for axis, each in enumerate(layout[1] if layout else ()) if not each.is_replicate()
    )
    groups = (layout[0].get_group(axis) for axis in axes)
    return [group for group in groups if group.size() > 1]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, in at least float32."""
    dtypes = {torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors}
    return torch._foreach_norm(tensors, 2, max(dtypes, key=lambda dtype: dtype.itemsize))


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor."""
    return stored(tensor.to_local() if is_dtensor(tensor) else tensor)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A parameter with the facts an optimizer may need."""

    tensor: Tensor
    """Tensor that is updated; a DTensor has only a part on this rank."""
    name: str
    """Name, the same on every layout."""
    role: str
    """Role: embedding, matrix, norm, bias, head, or another from the model's spec."""
    heads: tuple[int, int] | None = None
    """Dim of its attention heads and their number, if it has any."""
    growth: tuple[float, float] = (1.0, 1.0)
    """Widths of its inputs and outputs, relative to those in the base model."""

    @property
    def shape(self) -> Size:
        """Shape of the whole parameter, on every layout."""
        return self.tensor.shape

    @property
    def mesh(self) -> "DeviceMesh | None":
        """Mesh it is placed on; None if it is whole on this rank."""
        layout = layout_of(self.tensor)
        return layout[0] if layout else None

    @property
    def placements(self) -> "tuple[Placement, ...]":
        """Placement on each axis of the mesh: `Shard(dim)` or `Replicate()`."""
        layout = layout_of(self.tensor)
        return layout[1] if layout else ()


def name_parameters(
    parts: Sequence[nn.Module],
    role: Callable[[str, int], str],
    heads: Callable[[str], tuple[int, int] | None] = lambda name: None,
    growth: Callable[[str], tuple[float, float]] = lambda name: (1.0, 1.0),
) -> list[NamedParameter]:
    """Return all trained parameters of a model's parts.

    Args:
        role: returns the role for a name and a number of dims.
        heads: returns the dim and number of attention heads for a name.
        growth: returns the relative widths of inputs and outputs for a name.
    """
    return [
        NamedParameter(tensor, name, role(name, tensor.ndim), heads(name), growth(name))
        for part in parts
        for name, tensor in part.named_parameters()
        if tensor.requires_grad
    ]


def in_layers(name: str) -> str:
    """Return a parameter's name with its layer number replaced by *."""
    return re.sub(r"\.\d+\.", ".*.", name)


def redistribute_grads(parameters: Iterable[Tensor]) -> None:
    """Redistribute gradients like their parameters; those of norms still lack a sum over ranks.

    FSDP does this itself; without it, once per step is enough. One that changes nothing takes the
    host as long, so it is left out.
    """
    from torch.distributed.tensor import DTensor

    for parameter in parameters:
        gradient = parameter.grad
        if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)

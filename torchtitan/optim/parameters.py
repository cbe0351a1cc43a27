"""Parameters as an optimizer sees them: each with its name, its role, and how it lies on a mesh."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Size, Tensor, nn

from torchtitan.optim.norm import layout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A parameter, and what an optimizer may ask about it."""

    tensor: Tensor
    """What is updated; of a DTensor this rank holds a part."""
    name: str
    """The same on every layout."""
    role: str
    """embedding, matrix, norm, bias, head, or what else the model's spec calls it."""
    heads: tuple[int, int] | None = None
    """The dim along which its heads of attention lie, and how many there are, if it has any."""

    @property
    def shape(self) -> Size:
        """Of the whole parameter, on every layout."""
        return self.tensor.shape

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The ranks that it lies on; None: all of it is on this one."""
        layout = layout_of(self.tensor)
        return layout[0] if layout else None

    @property
    def placements(self) -> "tuple[Placement, ...]":
        """How it lies on each axis of the mesh: `Shard(dim)` or `Replicate()`."""
        layout = layout_of(self.tensor)
        return layout[1] if layout else ()


def name_parameters(
    parts: Sequence[nn.Module],
    role: Callable[[str, int], str],
    heads: Callable[[str], tuple[int, int] | None] = lambda name: None,
) -> list[NamedParameter]:
    """All that is trained of a model's parts.

    Args:
        role: from a parameter's name and its number of dims to its role.
        heads: from its name to the dim of its heads of attention, and their number.
    """
    return [
        NamedParameter(tensor, name, role(name, tensor.ndim), heads(name))
        for part in parts
        for name, tensor in part.named_parameters()
        if tensor.requires_grad
    ]


def in_layers(name: str) -> str:
    """A parameter's name as it is in all layers: * for the number of one."""
    return re.sub(r"\.\d+\.", ".*.", name)


def in_words(parameters: Iterable[NamedParameter]) -> str:
    """How many there are, in tensors and in numbers."""
    sizes = [parameter.tensor.numel() for parameter in parameters]
    return f"{len(sizes)} tensors, {sum(sizes):,} parameters"

"""Parameters as seen by an optimizer: each with its name, its role and its placement on a mesh."""

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
    """A parameter with the facts an optimizer may need."""

    tensor: Tensor
    """Tensor that is updated; a DTensor has only a part on this rank."""
    name: str
    """Name, the same on every layout."""
    role: str
    """Role: embedding, matrix, norm, bias, head, or another from the model's spec."""
    heads: tuple[int, int] | None = None
    """Dim of its attention heads and their number, if it has any."""

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
) -> list[NamedParameter]:
    """Return all trained parameters of a model's parts.

    Args:
        role: returns the role for a name and a number of dims.
        heads: returns the dim and number of attention heads for a name.
    """
    return [
        NamedParameter(tensor, name, role(name, tensor.ndim), heads(name))
        for part in parts
        for name, tensor in part.named_parameters()
        if tensor.requires_grad
    ]


def in_layers(name: str) -> str:
    """Return a parameter's name with its layer number replaced by *."""
    return re.sub(r"\.\d+\.", ".*.", name)


def in_words(parameters: Iterable[NamedParameter]) -> str:
    """Describe the number of tensors and of parameters."""
    sizes = [parameter.tensor.numel() for parameter in parameters]
    return f"{len(sizes)} tensors, {sum(sizes):,} parameters"

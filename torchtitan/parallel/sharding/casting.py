"""Parameters that are read in another form than they are kept in.

A module of a subclass of its own has a property for each of its parameters, and to read
`self.weight` is to compute what the property says. The parameters stay where they were, under their
names, for whoever lists, saves or updates them. A compiler sees what is computed.
"""

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def read_by(
    model: nn.Module, read: Callable[[Any], Tensor], without: Set[nn.Parameter] = frozenset()
) -> None:
    """Have every parameter of `model` read by `read`, in place, but for those in `without`."""
    # One class for all modules alike, or the compiler would take each for another.
    kinds: dict[Any, type[nn.Module]] = {}
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        names = tuple(name for name, parameter in own if parameter not in without)
        if not names:
            continue
        kind = type(module)
        if (kind, names) not in kinds:
            kinds[kind, names] = _reading(kind, names, read)
        module.__class__ = kinds[kind, names]


def _reading(
    kind: type[nn.Module], names: Iterable[str], read: Callable[[Any], Tensor]
) -> type[nn.Module]:
    """A subclass of `kind` whose parameters of these names are read by `read`."""

    def reader(name: str) -> property:
        # By way of `_parameters`, where whoever lists or loads them still finds them.
        return property(lambda module: read(module._parameters[name]))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


def compute_in(part: nn.Module, dtype: torch.dtype) -> None:
    """Mixed precision where nothing is sharded: parameters and inputs are cast where they are used.

    A gradient has the dtype of its parameter. FSDP2 over one rank gives the same numbers, by way of
    copies of every parameter and gradient (docs/gpu.md).
    """

    def cast_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in inputs
        )

    part.register_forward_pre_hook(cast_inputs)
    read_by(part, partial(torch.Tensor.to, dtype=dtype))

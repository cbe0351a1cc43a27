"""Parameters that are read in a different form from the stored one.

Each module becomes an instance of a subclass with a property for each of its parameters, so that
reading `self.weight` computes the property's value. The stored parameters keep their names and are
listed, saved and updated as before. A compiler sees the computation.
"""

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def read_by(
    model: nn.Module, read: Callable[[Any], Tensor], without: Set[nn.Parameter] = frozenset()
) -> None:
    """Make reads of all parameters of `model`, except those in `without`, go through `read`."""
    # Identical modules share a class, so that the compiler treats them alike.
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
    """Create a subclass of `kind` whose parameters `names` are read through `read`."""

    def reader(name: str) -> property:
        # Through `_parameters`, from which parameters are listed and loaded.
        return property(lambda module: read(module._parameters[name]))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


def compute_in(part: nn.Module, dtype: torch.dtype) -> None:
    """Apply mixed precision without sharding: parameters and inputs are cast where they are used.

    A gradient has the dtype of its parameter. FSDP2 over one rank gives the same numbers, but
    copies every parameter and gradient (docs/gpu.md).
    """

    def cast_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in inputs
        )

    part.register_forward_pre_hook(cast_inputs)
    read_by(part, partial(torch.Tensor.to, dtype=dtype))

"""Updates of this rank's parts of parameters, gradients and states.

An update of elements does the same to a part as to the whole, so torch's optimizers need not know
of DTensors. Given lists of them, torch first derives how each list is sharded, which takes seconds
for hundreds of parameters on two axes of a mesh.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchtitan.torch_private.compiler import without_compiler
from torchtitan.torch_private.dtensor import detached_part, is_dtensor, laid_out_as


def elementwise(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], **settings: Any
) -> Optimizer:
    """Build an optimizer whose update of an element depends on no other element."""
    optimizer = without_compiler(kind, groups, **settings)
    if any(is_dtensor(each) for group in optimizer.param_groups for each in group["params"]):
        vars(optimizer)["step"] = partial(_update_parts, optimizer, optimizer.step)
    return optimizer


def _update_parts(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """Let an optimizer see parts alone, and keep its new states as those of the whole."""
    groups, states = optimizer.param_groups, optimizer.state
    wholes = [p for group in groups for p in group["params"] if p.grad is not None]
    parts = {whole: detached_part(whole) for whole in wholes}
    given = {whole: {name: _part(s) for name, s in states[whole].items()} for whole in wholes}
    of_parts: defaultdict[Tensor, Any] = defaultdict(dict)
    for whole, part in parts.items():
        part.grad = detached_part(whole.grad)
        of_parts[part] = given[whole].copy()
    optimizer.state = of_parts
    optimizer.param_groups = [
        group | {"params": [parts[p] for p in group["params"] if p in parts]} for group in groups
    ]
    try:
        update()
    finally:
        optimizer.state, optimizer.param_groups = states, groups
    for whole, part in parts.items():
        for name, state in of_parts[part].items():
            if state is not given[whole].get(name):
                is_part = isinstance(state, Tensor) and state.shape == part.shape
                states[whole][name] = laid_out_as(whole, state) if is_part else state


def _part(state: Any) -> Any:
    return detached_part(state) if isinstance(state, Tensor) else state

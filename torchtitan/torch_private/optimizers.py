"""Torch's optimizers, without its compiler."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


def without_compiler(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], **settings: Any
) -> Optimizer:
    """An optimizer that does not import torch's compiler, which takes a second.

    Torch wraps `add_param_group` and `step` to keep the compiler out of them, and imports it to do
    so. Nobody compiles them here, so what is wrapped is called instead.
    """
    add = inspect.unwrap(Optimizer.add_param_group)
    add.__dict__["__dynamo_disable"] = add
    optimizer = kind(groups, **settings)
    update = inspect.unwrap(kind.step)
    # The wrapper of a step sets it too.
    vars(optimizer)["step"] = torch.no_grad()(lambda: update(optimizer))
    return optimizer

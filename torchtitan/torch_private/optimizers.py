"""Torch's optimizers, without its compiler."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


def without_compiler(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], **settings: Any
) -> Optimizer:
    """Build an optimizer without importing torch's compiler, which takes a second.

    Torch wraps `add_param_group` and `step` to keep the compiler out of them, and imports it to do
    so. They are not compiled here, so the wrapped functions are called directly.
    """
    add = inspect.unwrap(Optimizer.add_param_group)
    add.__dict__["__dynamo_disable"] = add
    optimizer = kind(groups, **settings)
    update = inspect.unwrap(kind.step)
    # Also set by the wrapper of a step.
    vars(optimizer)["step"] = torch.no_grad()(lambda: update(optimizer))
    return optimizer

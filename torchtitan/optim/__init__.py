"""Optimizers by the name used in a recipe; adding one is a file here and a line below."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan.config import Registry
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.optim.adam_and_sgd import SGD, Adam, AdamW
from torchtitan.optim.grouping import describe_groups, describe_rules, group_problems, state_bytes
from torchtitan.optim.muon import Muon
from torchtitan.optim.optimizer_group import InBackward, Optimizers
from torchtitan.optim.parameters import GradientNorm, NamedParameter, name_parameters
from torchtitan.optim.schedule import SCHEDULES, ScheduleConfig, WarmupStableDecay, rate_in_recipe
from torchtitan.optim.settings import (
    Compiled,
    GroupConfig,
    OptimizerConfig,
    ParameterGroup,
    UpdateRule,
)

OPTIMIZERS = Registry[type[OptimizerConfig]](
    "optimizer", {"AdamW": AdamW, "Adam": Adam, "SGD": SGD, "Muon": Muon}
)

OPTIMIZER_KEYS = Registry[type[OptimizerConfig]]("optimizer_key", {})
"""Settings classes that extend one of `OPTIMIZERS` by a key, by `NAME.key`."""


def without_idle_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Drop each key of `OPTIMIZER_KEYS` that has its default from a recipe (dotted keys)."""
    kept = dict(recipe)
    for path in OPTIMIZER_KEYS:
        key = path.partition(".")[2]
        value = kept.get(f"optimizer.{key}")
        if value is not None and value == OPTIMIZER_KEYS[path].model_fields[key].default:
            del kept[f"optimizer.{key}"]
    return kept


def open_optimizers(
    parameters: Sequence[NamedParameter],
    config: OptimizerConfig,
    stages: dist.ProcessGroup,
    device: Device,
    compiled: Compiled | None = None,
) -> Optimizers:
    """Build the optimizer for all trained parameters of this rank.

    Args:
        stages: ranks that hold the other parts of the model.
        device: device the model computes on.
        compiled: compiles the expensive parts of an update; None compiles nothing.
    """
    if config.early_step_in_backward:
        optimizers: Optimizers = InBackward(parameters, config, stages)
        logger.info("optimizer: parameters are updated during the backward; no step can be skipped")
    else:
        optimizers = Optimizers(parameters, config, stages)
    for optimizer, rule in optimizers.rules.items():
        rule.prepare(optimizer, compiled)
    groups = describe_groups(config, optimizers.assignments, stages, device)
    for line in (*groups, *optimizers.describe()):
        logger.info("%s", line)
    return optimizers

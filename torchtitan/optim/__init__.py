"""Optimizers by the name that a recipe gives; adding one is a file here and a line below."""

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.optim.adam import Adam, AdamW
from torchtitan.optim.group import Optimizers
from torchtitan.optim.grouping import describe_groups, group_problems
from torchtitan.optim.in_backward import InBackward
from torchtitan.optim.offload import Offloaded
from torchtitan.optim.parameters import NamedParameter, name_parameters
from torchtitan.optim.schedule import ScheduleConfig, learning_rate_factor
from torchtitan.optim.settings import GroupConfig, OptimizerConfig, ParameterGroup, UpdateRule
from torchtitan.optim.sgd import SGD

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "GroupConfig",
    "NamedParameter",
    "OptimizerConfig",
    "Optimizers",
    "ParameterGroup",
    "ScheduleConfig",
    "UpdateRule",
    "group_problems",
    "learning_rate_factor",
    "name_parameters",
    "open_optimizers",
]


def open_optimizers(
    parameters: Sequence[NamedParameter],
    config: OptimizerConfig,
    stages: dist.ProcessGroup,
    device: Device,
    redistribute_grads: Callable[[Iterable[Tensor]], None],
) -> Optimizers:
    """The optimizer over all that is trained on this rank, as the recipe has it.

    Args:
        stages: the ranks that hold the other parts of the model.
        device: where the model computes.
        redistribute_grads: brings gradients of parameters to where these are.
    """
    if config.early_step_in_backward:
        optimizers: Optimizers = InBackward(parameters, config, stages, redistribute_grads)
        logger.info("optimizer: each parameter is updated in the backward; no step is skipped")
    elif config.offload_states:
        optimizers = Offloaded(parameters, config, stages, device)
        logger.info("optimizer: states are in host memory, and updates are computed there")
    else:
        optimizers = Optimizers(parameters, config, stages)
    groups = describe_groups(config, optimizers.assignments, stages, device)
    for line in (*groups, *optimizers.describe()):
        logger.info("%s", line)
    return optimizers

"""Optimizers by the name that a recipe gives; adding one is a file here and a line below."""

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.optim.adam import Adam, AdamW
from torchtitan.optim.group import Optimizers
from torchtitan.optim.in_backward import InBackward
from torchtitan.optim.offload import Offloaded
from torchtitan.optim.problems import problems, problems_of_machine
from torchtitan.optim.schedule import ScheduleConfig, learning_rate_factor
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.optim.sgd import SGD

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "OptimizerConfig",
    "Optimizers",
    "ScheduleConfig",
    "learning_rate_factor",
    "open_optimizers",
    "problems",
    "problems_of_machine",
]


def open_optimizers(
    parts: Sequence[nn.Module],
    config: OptimizerConfig,
    stages: dist.ProcessGroup,
    device: Device,
    redistribute_grads: Callable[[Iterable[Tensor]], None],
) -> Optimizers:
    """The optimizer over every model part of this rank, as the recipe has it.

    Args:
        stages: the ranks that hold the other parts of the model.
        device: where the parts compute.
        redistribute_grads: brings gradients of parameters to where these are.
    """
    if config.early_step_in_backward:
        optimizers: Optimizers = InBackward(parts, config, stages, redistribute_grads)
        logger.info("optimizer: each parameter is updated in the backward; no step is skipped")
    elif config.offload_states:
        optimizers = Offloaded(parts, config, stages, device)
        logger.info("optimizer: states are in host memory, and updates are computed there")
    else:
        optimizers = Optimizers(parts, config, stages)
    if told := config.describe(optimizers.states()):
        logger.info("%s", told)
    return optimizers

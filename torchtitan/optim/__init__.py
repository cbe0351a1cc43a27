"""Optimizers by the name that a recipe gives; adding one is a file here and a line below."""

from torchtitan.optim.adam import Adam, AdamW
from torchtitan.optim.group import Optimizers
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
]

"""Saving a run and going on with it."""

from torchtitan.checkpoint.folder import Start, choose_start, saved_steps
from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.state import TrainState

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Start",
    "TrainState",
    "choose_start",
    "saved_steps",
]

"""Saving a run and going on with it."""

from torchtitan.checkpoint.contents import Contents
from torchtitan.checkpoint.folder import lock, saved_steps
from torchtitan.checkpoint.live import Live
from torchtitan.checkpoint.manager import Checkpointer, SaveFailed
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.start import Choice, Start
from torchtitan.checkpoint.state import TrainState

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Choice",
    "Contents",
    "Live",
    "SaveFailed",
    "Start",
    "TrainState",
    "lock",
    "saved_steps",
]

"""Saving and resuming runs."""

from torchtitan.checkpoint.contents import Checkpointable
from torchtitan.checkpoint.folder import Lock, lock, saved_steps
from torchtitan.checkpoint.initial import ResumePoint
from torchtitan.checkpoint.live import InMemoryState
from torchtitan.checkpoint.manager import Checkpointer, SaveFailed
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.start import ResumePolicy
from torchtitan.checkpoint.state import TrainState

__all__ = [
    "CheckpointConfig",
    "Checkpointable",
    "Checkpointer",
    "InMemoryState",
    "Lock",
    "ResumePoint",
    "ResumePolicy",
    "SaveFailed",
    "TrainState",
    "lock",
    "saved_steps",
]

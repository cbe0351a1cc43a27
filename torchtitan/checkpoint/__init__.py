"""Saving and resuming runs."""

from typing import TYPE_CHECKING

from torchtitan.packages import on_first_use

if TYPE_CHECKING:
    from torchtitan.checkpoint.contents import Checkpointable
    from torchtitan.checkpoint.folder import Lock, TrainState, lock, saved_steps
    from torchtitan.checkpoint.manager import Checkpointer, SaveFailed
    from torchtitan.checkpoint.placement import on_rank_0
    from torchtitan.checkpoint.saver import Saver
    from torchtitan.checkpoint.settings import CheckpointConfig
    from torchtitan.checkpoint.start import ResumePoint, ResumePolicy
    from torchtitan.checkpoint.tiers import choose_together
else:
    __getattr__ = on_first_use(__name__, __file__)

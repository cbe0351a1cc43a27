"""What a recipe says of replica groups.

A replica group is a run of its own, with its own launcher and its own ranks, that trains the same
model as the others, each on its share of every global batch. Nothing here needs torchft.
"""

import importlib.util
import os
from collections.abc import Iterator

from pydantic import Field

from torchtitan.config import Config

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable in which torchft looks for the address of its lighthouse."""


class FaultToleranceConfig(Config):
    """Replica groups that keep training when one of them is lost."""

    enable: bool = Field(
        False,
        description="Train as one of several replica groups, which meet at a torchft lighthouse; "
        f"its address is the environment variable {LIGHTHOUSE}.",
    )
    replica_id: int = Field(0, ge=0, description="Which of the groups this is, from 0.")
    group_size: int = Field(
        0,
        ge=0,
        description="Number of replica groups that share each global batch when all are present.",
    )
    min_replica_size: int = Field(
        1,
        ge=1,
        description="A step with fewer groups than this changes no weight, and is repeated.",
    )

    @property
    def groups(self) -> int:
        """Groups that the global batch is dealt to."""
        return self.group_size if self.enable else 1

    @property
    def group(self) -> int:
        """Which of them this is."""
        return self.replica_id if self.enable else 0


def problems(config: FaultToleranceConfig) -> Iterator[tuple[str, str]]:
    """What cannot work in the section: (key, message)."""
    groups = config.group_size
    if not config.enable:
        return
    if groups < 1:
        yield "fault_tolerance.group_size", "wanted the number of replica groups, at least 1"
        return
    if config.replica_id >= groups:
        message = f"there are {groups} groups (fault_tolerance.group_size), from 0 on"
        yield "fault_tolerance.replica_id", message
    if config.min_replica_size > groups:
        message = f"there are only {groups} groups (fault_tolerance.group_size)"
        yield "fault_tolerance.min_replica_size", message


def problems_of_machine(config: FaultToleranceConfig) -> Iterator[tuple[str, str]]:
    """What this machine lacks: (key, message)."""
    if not config.enable:
        return
    if importlib.util.find_spec("torchft") is None:
        message = 'torchft is not installed: pip install "torchft>=0.2,<0.3"'
        yield "fault_tolerance.enable", message
    if not os.environ.get(LIGHTHOUSE):
        message = (
            f"where is the lighthouse? Wanted {LIGHTHOUSE}=http://HOST:29510 in the environment"
        )
        yield "fault_tolerance.enable", message

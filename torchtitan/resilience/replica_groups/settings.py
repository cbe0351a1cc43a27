"""The settings of replica groups.

A replica group is a run of its own, with its own launcher and its own ranks, that trains the same
model as the others, each on its share of every global batch. Nothing here needs torchft.
"""

import importlib.util
import os
from collections.abc import Iterator

from pydantic import Field

from torchtitan.config import Config, Context, Problem
from torchtitan.packages import install

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable in which torchft looks for the address of its lighthouse."""


class FaultToleranceConfig(Config):
    """Replica groups that keep training when one of them is lost."""

    enable: bool = False
    """Train as one of several replica groups, coordinated by a torchft lighthouse; its address is
    in the environment variable TORCHFT_LIGHTHOUSE."""
    replica_id: int = Field(0, ge=0)
    """Number of this group, counted from 0."""
    group_size: int = Field(0, ge=0)
    """Number of replica groups that share each global batch when all are present."""
    min_replica_size: int = Field(1, ge=1)
    """Minimum number of groups in a step; a step with fewer changes no weight and is repeated."""

    @property
    def groups(self) -> int:
        """The number of groups that share the global batch."""
        return self.group_size if self.enable else 1

    @property
    def group(self) -> int:
        """The index of this group."""
        return self.replica_id if self.enable else 0

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.enable and self.group_size < 1:
            yield Problem("group_size", "wanted the number of replica groups, at least 1")
        elif self.enable:
            size, there = self.group_size, f"{self.group_size} groups (self.group_size)"
            if self.replica_id >= size:
                yield Problem("replica_id", f"there are {there}, counted from 0", ("group_size",))
            if self.min_replica_size > size:
                yield Problem("min_replica_size", f"there are only {there}", ("group_size",))
        if self.enable and context.world.is_here:
            if importlib.util.find_spec("torchft") is None:
                yield Problem("enable", f"torchft is not installed: {install('torchft')}")
            if not os.environ.get(LIGHTHOUSE):
                wanted = f"set {LIGHTHOUSE}=http://HOST:29510 in the environment"
                yield Problem("enable", f"the address of the lighthouse is missing; {wanted}")

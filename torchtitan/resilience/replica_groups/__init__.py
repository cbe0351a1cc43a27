"""Replica groups that come and go while a run continues: the section `[fault_tolerance]`."""

from torchtitan.resilience.replica_groups.group import ReplicaGroup
from torchtitan.resilience.replica_groups.settings import FaultToleranceConfig
from torchtitan.resilience.replica_groups.transport import InMemoryState

__all__ = ["FaultToleranceConfig", "InMemoryState", "ReplicaGroup"]

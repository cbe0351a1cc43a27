"""Replica groups that come and go while a run continues: the section `[fault_tolerance]`."""

from torchtitan.resilience.replica_groups.group import InMemoryState, ReplicaGroup
from torchtitan.resilience.replica_groups.settings import FaultToleranceConfig

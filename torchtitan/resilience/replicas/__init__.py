"""Replica groups that come and go while a run continues: the section `[fault_tolerance]`."""

from torchtitan.resilience.replicas.group import ReplicaGroup
from torchtitan.resilience.replicas.settings import (
    FaultToleranceConfig,
)

__all__ = [
    "FaultToleranceConfig",
    "ReplicaGroup",
]

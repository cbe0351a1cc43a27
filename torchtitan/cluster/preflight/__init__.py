"""Check of the nodes of a job before it trains: devices, links, versions, shared folder."""

from torchtitan.cluster.preflight.judgment import Verdict
from torchtitan.cluster.preflight.one_rank import check_rank

__all__ = ["Verdict", "check_rank"]

"""Check of the nodes of a job before it trains: devices, links, versions, shared folder."""

from torchtitan.preflight.judgment import Verdict
from torchtitan.preflight.one_rank import check_rank

__all__ = ["Verdict", "check_rank"]

"""Check of the nodes of a job before it trains: devices, links, versions, shared folder."""

from torchtitan.preflight.one_rank import check_rank
from torchtitan.preflight.judgment import Verdict

__all__ = ["Verdict", "check_rank"]

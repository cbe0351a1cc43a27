"""What each rank was doing when a run failed: recorded, kept, and told in plain words."""

from torchtitan.flight.recorder import Recorder
from torchtitan.flight.records import Collective, Group, Shape, recorded, sent_by_group
from torchtitan.flight.report import report
from torchtitan.flight.traces import RankTrace, read_traces

__all__ = [
    "Collective",
    "Group",
    "RankTrace",
    "Recorder",
    "Shape",
    "read_traces",
    "recorded",
    "report",
    "sent_by_group",
]

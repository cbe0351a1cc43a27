"""What each rank was doing when a run failed: recorded, written to disk, and summarized."""

from torchtitan.flight_recorder.recorder import Recorder
from torchtitan.flight_recorder.records import Collective, Group, Shape, recorded, sent_by_kind
from torchtitan.flight_recorder.report import report
from torchtitan.flight_recorder.traces import RankTrace, read_traces

__all__ = [
    "Collective",
    "Group",
    "RankTrace",
    "Recorder",
    "Shape",
    "read_traces",
    "recorded",
    "report",
    "sent_by_kind",
]

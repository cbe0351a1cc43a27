"""A recorder of each rank's activity, written out and summarized when a run fails."""

from torchtitan.flight_recorder.diagnosis import report
from torchtitan.flight_recorder.notes import is_gone, note_path, read_note, rescue
from torchtitan.flight_recorder.recorder import Recorder
from torchtitan.flight_recorder.records import Collective, Group, Shape, recorded, sent_by_kind
from torchtitan.flight_recorder.traces import RankTrace, read_traces

"""Reads the traces that the ranks of a run left on disk, and derives the state of each rank.

Of rank 3, in the folder comm.save_traces_folder:

    3.step    one line, the first and then the last note of its step (`notes`)
    3.json    what was raised and where, or where the rank was when it received SIGTERM
    3.stack   what Python wrote when the process crashed (a segmentation fault, an abort)
    rank_3    torch's Flight Recorder, under the name that torch itself uses with NCCL
    3.gloo    that of gloo, if `rank_3` is NCCL's
    3.traceback   of the error in 3.json, as Python writes it; 3.2.traceback after restart 2

All but the first exist only after a failure. Traces that torch wrote without the rest can be read
too.
"""

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan.config import ConfigError
from torchtitan.flight_recorder.notes import note_path, read_note
from torchtitan.flight_recorder.records import Collective, collectives, load, place

State = Literal["starting", "training", "finished", "ended", "unknown"]
"""`ended`: by an error that all ranks raise together, such as a mistake in the recipe."""

Kind = Literal["collective", "p2p", "other", "terminated"]
"""Place where an error was raised: in a collective, in a send or receive, or elsewhere;
`terminated`: nowhere, the process received SIGTERM."""

Fate = Literal["done", "raised", "waiting", "exchanging", "crashed", "lost", "stuck", "terminated"]
"""State in which a rank ended: `waiting` in a collective; `exchanging` in a send or receive without
a record; `lost` without a message; `stuck` outside communication; `terminated` by SIGTERM."""


@dataclass(frozen=True)
class Failure:
    """The record of a rank that failed, or that made no progress after SIGTERM."""

    time: float
    """Time in Unix seconds."""
    error: str
    """Message of the exception; empty if none was raised."""
    kind: Kind
    place: str
    """Innermost line outside torch."""
    groups: Mapping[str, tuple[str, list[int]]]
    """Purpose and ranks of each process group, by name; no ranks: all of them."""


@dataclass(frozen=True)
class RankTrace:
    """The traces of one rank."""

    rank: int
    state: State = "unknown"
    step: int = 0
    world_size: int = 0
    time: float = 0.0
    """Time of the note of the step in Unix seconds."""
    pid: int = 0
    host: str = ""
    restart: int = 0
    """Number of this start of the ranks."""
    kept_at: str = ""
    """File in the memory of `host` with the steps after this one, if it could not be read."""
    failure: Failure | None = None
    crash: str = ""
    has_ring: bool = False
    """Whether there is a complete trace of the Flight Recorder."""
    collectives: list[Collective] = field(default_factory=list)

    @property
    def fate(self) -> Fate:
        """The state in which this rank ended."""
        failure = self.failure
        if self.state in ("finished", "ended"):
            return "done"
        if failure and failure.error and failure.kind == "other":
            return "raised"
        if failure and failure.kind == "terminated":
            return "terminated"
        unfinished = self._unfinished()
        if failure and failure.kind == "p2p" and not (unfinished and unfinished.is_p2p):
            return "exchanging"
        if unfinished:
            return "waiting"
        if self.crash:
            return "crashed"
        return "stuck" if failure or self.has_ring else "lost"

    @property
    def waiting(self) -> Collective | None:
        """The collective that it was in, if it was in one."""
        return self._unfinished() if self.fate == "waiting" else None

    @property
    def last_finished(self) -> Collective | None:
        """The newest collective that it completed."""
        done = [c for c in self.collectives if c.finished and c is not self.waiting]
        return done[-1] if done else None

    def _unfinished(self) -> Collective | None:
        if pending := [c for c in self.collectives if not c.finished]:
            return pending[0]
        # Gloo marks a collective that failed as it does one that succeeded.
        failed = self.failure is not None and self.failure.kind == "collective"
        return self.collectives[-1] if failed and self.collectives else None


def read_traces(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks in `folder`, in rank order.

    Raises:
        ConfigError: if there are no traces, or a file is not what its name says.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; wanted one with the traces of a run")
    ranks = set[int]()
    rings: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if name := re.fullmatch(r"(\d+)\.(?:step|(gloo))|(?:.*\D)?(\d+)", path.name):
            rank = int(name[1] or name[3])
            ranks.add(rank)
            if name[2] or name[3]:
                rings.setdefault(rank, []).append(path)
    if not ranks:
        raise ConfigError(
            f"{folder}: no traces here; wanted the folder of a run, or its comm.save_traces_folder"
        )
    return [_read_rank(folder, rank, rings.get(rank, ())) for rank in sorted(ranks)]


def read_rank(folder: Path, rank: int, prefix: str) -> RankTrace:
    """Read the traces of one rank in `folder`; `prefix` is that of its Flight Recorder."""
    rings = [folder / f"{rank}.gloo", folder / f"{prefix}{rank}"]
    return _read_rank(folder, rank, [path for path in rings if path.exists()])


def _read_rank(folder: Path, rank: int, of_rings: Sequence[Path]) -> RankTrace:
    step, stack = note_path(folder, rank), folder / f"{rank}.stack"
    failure = read_failure(folder / f"{rank}.json")
    rings = [ring for path in of_rings if (ring := _read_ring(path)) is not None]
    note = read_note(step)
    everyone = range(note.get("world_size", 0))
    named = failure.groups.items() if failure else ()
    groups = {name: (purpose, ranks or everyone) for name, (purpose, ranks) in named}
    records = [collective for ring in rings for collective in collectives(ring, groups)]
    return RankTrace(
        **{"rank": rank, **note},
        failure=failure,
        crash=read_crash(stack.read_text(encoding="utf-8")) if stack.exists() else "",
        has_ring=bool(rings),
        collectives=sorted(records, key=lambda collective: collective.created),
    )


def read_failure(path: Path) -> Failure | None:
    """Read the record of a failure, if there is one."""
    return Failure(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _read_ring(path: Path) -> dict[str, Any] | None:
    try:
        return load(path.read_bytes(), str(path))
    except (EOFError, pickle.UnpicklingError):
        return None  # truncated: the process was killed while it wrote


def read_crash(text: str) -> str:
    """Shorten Python's crash report to the error and the innermost line outside torch."""
    if not (what := re.search(r"Fatal Python error: (.+)", text)):
        return ""
    # The main thread comes last, unless the one that crashed is known.
    threads = re.split(r"^(?=Current thread |Thread )", text, flags=re.MULTILINE)
    crashed = next((t for t in threads if t.startswith("Current thread")), threads[-1])
    lines = re.findall(r'File "(.+)", line (\d+) in (.+)', crashed)
    where = place([(file, int(line), function) for file, line, function in lines])
    return what[1] + (f" at {where}" if where else "")

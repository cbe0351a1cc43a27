"""The samples that a run consumed, from its ledger, and whether each was read exactly once.

A *session* is a process that trains. The samples of a run are those of its sessions, each up to the
checkpoint that a later one resumes from; what a session read after that is trained again.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigError
from torchtitan.metrics.data_ledger import LEDGER_FILE, chained
from torchtitan.tools.history import Row, RunHistory


@dataclass
class Session:
    """The rows of a session, from its start on."""

    number: int
    rows: list[Row]
    kept: int = 0
    """Number of the rows that are part of the run; 0 if it continued from an earlier session."""

    @property
    def start(self) -> Row:
        """The first row, which describes the session."""
        return self.rows[0]

    @property
    def end(self) -> Row:
        """The last row that is part of the run."""
        return self.rows[self.kept - 1]

    @property
    def samples(self) -> int:
        """Number of samples that are part of the run."""
        return self.end["samples"] - self.start["samples"] if self.kept else 0

    @property
    def trained_again(self) -> int:
        """Number of samples that were read after the last one that is part of the run."""
        return int(self.rows[-1]["samples"] - (self.end if self.kept else self.start)["samples"])

    def sources(self) -> dict[str, dict[str, int]]:
        """Return what the run read of each source, as far as it is recorded."""
        known = [row["sources"] for row in self.rows[: self.kept] if "sources" in row]
        first, last = known[0], known[-1]
        return {
            name: {
                "samples": counts["samples"] - first.get(name, {}).get("samples", 0),
                **{key: value for key, value in counts.items() if key != "samples"},
            }
            for name, counts in last.items()
        }


@dataclass
class Consumption:
    """The sessions of a run, and what is wrong with them."""

    sessions: list[Session] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[Session]:
        """The sessions that the run consists of."""
        return [session for session in self.sessions if session.kept]

    @property
    def end(self) -> Row:
        """The last row of the run."""
        return self.parts[-1].end

    @property
    def tokens(self) -> int:
        """Number of tokens that are part of the run."""
        return sum(part.samples * part.start["seq_len"] for part in self.parts)

    def sources(self) -> dict[str, dict[str, int]]:
        """Return the samples and tokens of each source, and the position in it."""
        found: dict[str, dict[str, int]] = {}
        for part in self.parts:
            for name, counts in part.sources().items():
                before = found.get(name, {"samples": 0, "tokens": 0})
                samples = counts["samples"]
                found[name] = counts | {
                    "samples": before["samples"] + samples,
                    "tokens": before["tokens"] + samples * part.start["seq_len"],
                }
        return found


def read_consumption(run: Path) -> Consumption:
    """Read and check the ledger of a run.

    Raises:
        ConfigError: if it has none.
    """
    history = RunHistory.open(run)
    rows = history.data_ledger
    if not any(row["event"] == "start" for row in rows):
        raise ConfigError(
            f"{run}: has no {LEDGER_FILE} with a session; runs of earlier versions, on other data "
            "than text, and with replica groups have none"
        )
    found = Consumption(problems=list(_broken_chains(rows)))
    for row in rows:
        if row["event"] == "start":
            found.sessions.append(Session(len(found.sessions) + 1, []))
        if not found.sessions:
            found.problems.append(f"step {row['step']} is before the start of the first session")
            continue
        found.sessions[-1].rows.append(row)
    for session in found.sessions:
        found.problems += _jumps(session)
        found.problems += _continue(session, found.sessions[: session.number - 1])
        found.problems += _differences(session, found.sessions[: session.number - 1])
    found.problems += _other_metrics(found, history.rows)
    return found


def _broken_chains(rows: Sequence[Row]) -> Iterator[str]:
    """Find rows that do not follow from the row before them."""
    chain = ""
    for row in rows:
        own = {key: value for key, value in row.items() if key != "chain"}
        if chained(own, chain) != row.get("chain"):
            yield (
                f"the row {own.get('event')} of step {own.get('step')} was changed, or a row "
                "before it is missing"
            )
        chain = row.get("chain", "")


def _jumps(session: Session) -> Iterator[str]:
    """Find steps between which another number of samples was read than they have."""
    batch, reported = session.start["global_batch"], -1
    for before, row in itertools.pairwise(session.rows):
        where = f"session {session.number}, step {row['step']}"
        if row["event"] == "rollback" and row["samples"] >= before["samples"]:
            reported = -1
            continue  # the steps since the last report are counted by the samples
        wanted = before["samples"] + (row["step"] - before["step"]) * batch
        if row["samples"] != wanted:
            yield f"{where}: {row['samples']} samples were read until then, and not {wanted}"
        elif row["samples"] == before["samples"] and row["hash"] != before["hash"]:
            yield f"{where}: sample {wanted} has the hashes {before['hash']} and {row['hash']}"
        if row["event"] == "steps":
            if row["step"] <= reported:
                yield f"{where} is there twice: the start of a session is missing"
            reported = row["step"]


def _continue(session: Session, earlier: Sequence[Session]) -> Iterator[str]:
    """Find the row of an earlier session where this one continues; mark what is not the run's."""
    start = session.start
    session.kept = len(session.rows)
    parts = [each for each in earlier if each.kept]
    if start["step"] == 0:  # the run starts over
        for part in parts:
            part.kept = 0
        return
    for part in reversed(parts):
        known = [n for n, row in enumerate(part.rows[: part.kept]) if row["step"] == start["step"]]
        if not known:
            part.kept = 0
            continue
        found = part.rows[known[-1]]
        part.kept = known[-1] + 1
        where = f"session {session.number} resumes after step {start['step']} at sample"
        if start["samples"] > found["samples"]:
            yield (
                f"{where} {start['samples']}, and session {part.number} had read "
                f"{found['samples']} until then: {start['samples'] - found['samples']} samples "
                "were skipped"
            )
        elif start["samples"] < found["samples"]:
            yield (
                f"{where} {start['samples']}, and session {part.number} had read "
                f"{found['samples']} until then: {found['samples'] - start['samples']} samples "
                "were repeated"
            )
        elif None not in (start["hash"], found["hash"]) and start["hash"] != found["hash"]:
            yield (
                f"{where} {start['samples']} with the hash {start['hash']}, and session "
                f"{part.number} had {found['hash']}: they read different samples"
            )
        return
    if earlier:
        yield (
            f"session {session.number} resumes after step {start['step']}, which no session "
            "before it has recorded: a part of the ledger is missing"
        )


def _differences(session: Session, earlier: Sequence[Session]) -> Iterator[str]:
    """Find a sample at which an earlier session that read the same had another hash."""
    start, own = session.start, hashes(session.rows)
    for other in earlier:
        theirs = hashes(other.rows)
        is_same = all(other.start.get(key) == start.get(key) for key in ("order", "identity"))
        if not is_same or theirs.get(start["samples"]) != start["hash"]:
            continue
        for samples in sorted(own.keys() & theirs.keys()):
            if samples > start["samples"] and own[samples] != theirs[samples]:
                yield (
                    f"sessions {other.number} and {session.number} have different hashes at "
                    f"sample {samples}: {theirs[samples]} and {own[samples]}"
                )
                break


def _other_metrics(found: Consumption, rows: Sequence[Row]) -> Iterator[str]:
    """Find reports of the run whose hash is not that of the ledger."""
    known = {n: h for part in found.parts for n, h in hashes(part.rows[: part.kept]).items()}
    last = max((row.get("samples", 0) for row in rows), default=0)
    if last > found.end["samples"]:
        yield (
            f"metrics.jsonl has {last} samples, and the ledger ends after {found.end['samples']}: "
            "its last rows are missing"
        )
    for row in rows:
        samples: Any = row.get("samples")
        own = row.get("data_hash")
        if None not in (samples, own) and known.get(samples, own) != own:
            yield (
                f"metrics.jsonl has the hash {own} at sample {samples}, and the ledger "
                f"{known[samples]}"
            )


def hashes(rows: Sequence[Row]) -> dict[int, str]:
    """Return the recorded hashes, by number of samples."""
    return {row["samples"]: row["hash"] for row in rows if row["hash"] is not None}

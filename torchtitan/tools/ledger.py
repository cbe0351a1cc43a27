"""`torchtitan data ledger`: which samples a run consumed, and whether each was read exactly once.

A *session* is a process that trains. The samples of a run are those of its sessions, each up to the
checkpoint that a later one resumes from; what a session read after that is trained again. They can
be read again to recompute their hash.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torchtitan.checkpoint.folder import read_state
from torchtitan.checkpoint.manifest import Damaged, read_manifest
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, local_path
from torchtitan.data import merge_states
from torchtitan.data.stream import BatchStream
from torchtitan.inputs import open_task
from torchtitan.job import RECIPE_FILE, JobConfig
from torchtitan.logging import progress_bar
from torchtitan.metrics.data_ledger import LEDGER_FILE, chained
from torchtitan.tools.history import Row, RunHistory
from torchtitan.tools.options import Flag, Run


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


def ledger(
    run: Run,
    as_json: Annotated[bool, Flag("--json", "Print the facts as JSON.")] = False,
    verify: Annotated[
        bool, Flag("--verify", "Read the samples again, and compare their hash.")
    ] = False,
) -> int:
    """Say which samples a run consumed, and whether each was read exactly once."""
    found = read_consumption(run)
    problems, compared = found.problems, None
    if verify and not problems:
        compared, problems = replay(run, found)
    if as_json:
        text = json.dumps(facts(run, found, problems, compared), indent=1)
    else:
        text = "\n".join(page(run, found, problems, compared))
    # In one piece, so that `| head` does not close the pipe in between.
    print(f"{text}\n", end="")
    return 1 if problems else 0


def facts(
    run: Path, found: Consumption, problems: list[str], compared: int | None
) -> dict[str, Any]:
    """Return all that is known, for `--json`."""
    return {
        "run": str(run),
        "is_complete": not problems,
        "problems": problems,
        "verified_hashes": compared,
        "first_sample": found.parts[0].start["samples"],
        "samples": found.end["samples"],
        "tokens": found.tokens,
        "hash": found.end["hash"],
        "sources": found.sources(),
        "sessions": [described(session) for session in found.sessions],
    }


def described(session: Session) -> dict[str, Any]:
    """Return the facts about a session."""
    start = session.start
    keys = ("step", "samples", "ranks", "layout", "seq_len", "global_batch")
    return {
        "session": session.number,
        "time": start["time"],
        **{key: start[key] for key in keys},
        "last_step": session.rows[-1]["step"],
        "samples_of_run": session.samples,
        "samples_trained_again": session.trained_again,
        "sources": session.sources() if session.kept else {},
    }


def page(run: Path, found: Consumption, problems: list[str], compared: int | None) -> Iterator[str]:
    """Yield the lines for a reader."""
    last = found.end
    yield (
        f"{run}: {sum(part.samples for part in found.parts):,} samples, {found.tokens:,} tokens, "
        f"hash {last['hash'] or 'unknown'}"
    )
    yield ""
    for session in found.sessions:
        yield from about(session)
    yield ""
    for name, counts in found.sources().items():
        documents = f"{counts['documents']:,} documents, " if "documents" in counts else ""
        yield (
            f"source {name}: {counts['samples']:,} samples, {counts['tokens']:,} tokens, "
            f"{documents}in epoch {counts['epoch'] + 1}"
        )
    known = next(row for row in reversed(found.parts[-1].rows) if "sources" in row)
    if known["samples"] < last["samples"]:
        yield f"sources are recorded until sample {known['samples']:,}, the last checkpoint"
    yield ""
    yield from (f"error: {problem}" for problem in problems)
    if not problems:
        yield "complete: each sample was read once, in order"
        if compared is not None:
            yield f"verified: the recipe gives the same samples, by {compared:,} hashes"


def about(session: Session) -> Iterator[str]:
    """Yield the lines about a session."""
    start = session.start
    layout = ", ".join(f"{axis} {size}" for axis, size in start["layout"].items())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start["time"]))
    last = session.end if session.kept else start
    yield (
        f"session {session.number}, {when}, {start['ranks']} rank{'s' * (start['ranks'] > 1)}"
        f"{f' ({layout})' if layout else ''}, {start['global_batch']} sequences of "
        f"{start['seq_len']} per step: samples {start['samples']:,} to {last['samples']:,}, "
        f"steps {start['step'] + 1:,} to {last['step']:,}"
    )
    if session.trained_again:
        yield (
            f"  {session.trained_again:,} more samples, until step {session.rows[-1]['step']:,}, "
            "were lost and trained again from the checkpoint"
        )
    end = session.end if session.kept else session.rows[-1]
    if steps := end.get("skipped"):
        yield f"  the updates of {steps:,} steps of the run were skipped, after they were read"
    if skipped := end.get("skipped_samples"):
        yield f"  {skipped:,} samples of the run were read and are not in the weights, by rollbacks"


def replay(run: Path, consumed: Consumption) -> tuple[int, list[str]]:
    """Read the samples of a run again, on one process; compare their hash with the recorded ones.

    Returns:
        The number of recorded hashes that were compared, and the first mistake, if any.

    Raises:
        ConfigError: if a recipe or the data cannot be read.
    """
    first = consumed.parts[0].start["samples"]
    compared, stream = 0, None
    with progress_bar("samples", consumed.end["samples"] - first) as show:
        for part in consumed.parts:
            job = recipe_of(run, part.start)
            following = open_alone(job, part.start)
            if stream is not None:
                following.load_state_dict(state_of(stream))
            elif part.start["samples"]:
                _start_later(following, job, part.start)
            stream, last = following, part.start["samples"]
            known = hashes(part.rows[: part.kept])
            while True:
                at = stream.samples
                if at in known:
                    compared += 1
                    if (found := state_of(stream)["hash"]) != known[at]:
                        stream.close()
                        return compared, [
                            f"samples {last:,} to {at:,} are not those that were recorded: their "
                            f"hash is {found}, and the ledger has {known[at]}"
                        ]
                    last = at
                if at >= part.end["samples"]:
                    break
                for _ in range(part.start["global_batch"]):
                    next(stream)
                show(completed=stream.samples - first)
            stream.close()
    return compared, []


def recipe_of(run: Path, start: Row) -> JobConfig:
    """Read the recipe of a session."""
    earlier = (run / RECIPE_FILE).with_suffix(f".{start['launch']}.toml")
    path = earlier if earlier.is_file() else run / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: has no {RECIPE_FILE}, so its samples cannot be read again")
    return load_job(str(path), (), start["ranks"], "cuda", exempt={"job.hardware"}).config


def open_alone(job: JobConfig, start: Mapping[str, Any]) -> BatchStream:
    """Open all samples of a session, one at a time."""
    stream = open_task(job).open_stream(
        job.data.model_copy(update={"num_workers": 1}),
        seed=job.debug.seed,
        seq_len=start["seq_len"],
        steps=job.training.steps,
        local_batch_size=1,
        accumulation=start["global_batch"],
        rank=0,
        ranks=1,
        sizes=job.step_sizes(job.degrees(start["ranks"])),
    )
    stream.follow(start["identity"])
    return stream


def state_of(stream: BatchStream) -> Any:
    """Return the merged state of a stream that reads all samples, as a checkpoint has it."""
    return json.loads(json.dumps(merge_states([stream.state_dict()])))


def _start_later(stream: BatchStream, job: JobConfig, start: Row) -> None:
    """Move to the first sample of a run that skips some, or continues another run."""
    # That of another run may be unknown.
    if start["hash"] is not None and int(start["hash"], 16) == 0:
        stream.skip(start["samples"], start["step"])
        return
    path = local_path(job.checkpoint.initial_load_path or "")
    try:
        stream.load_state_dict(dict(read_state(path, read_manifest(path))["data"]))
    except (Damaged, KeyError, OSError) as error:
        raise ConfigError(
            f"the run continues another at sample {start['samples']:,}, whose position cannot be "
            f"read again: {error}"
        ) from None


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
        if ahead := start["samples"] - found["samples"]:
            yield (
                f"{where} {start['samples']}, and session {part.number} had read "
                f"{found['samples']} until then: {abs(ahead)} samples were "
                f"{'skipped' if ahead > 0 else 'repeated'}"
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

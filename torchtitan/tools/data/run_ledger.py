"""`torchtitan data ledger`: the samples that a run consumed, read again to recompute their hash."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.checkpoint.folder import read_state
from torchtitan.checkpoint.manifest import Damaged, read_manifest
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, local_path
from torchtitan.data import merge_states
from torchtitan.data.stream import BatchStream
from torchtitan.inputs import open_task
from torchtitan.job import JobConfig
from torchtitan.logging import progress_bar
from torchtitan.provenance import RECIPE_FILE
from torchtitan.tools.data.consumption import Consumption, Session, hashes, read_consumption
from torchtitan.tools.history import Row
from torchtitan.tools.options import Run


def ledger(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the samples again, and compare their hash.")
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
        f"{start['seq_len']} a step: samples {start['samples']:,} to {last['samples']:,}, "
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
    with progress_bar("samples", consumed.end["samples"] - first) as show:
        return _compared(run, consumed, lambda samples: show(completed=samples - first))


def _compared(
    run: Path, consumed: Consumption, count: Callable[[int], None]
) -> tuple[int, list[str]]:
    compared, stream = 0, None
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
                        f"samples {last:,} to {at:,} are not those that were recorded: their hash "
                        f"is {found}, and the ledger has {known[at]}"
                    ]
                last = at
            if at >= part.end["samples"]:
                break
            for _ in range(part.start["global_batch"]):
                next(stream)
            count(stream.samples)
        stream.close()
    return compared, []


def recipe_of(run: Path, start: Row) -> JobConfig:
    """Read the recipe of a session."""
    earlier = (run / RECIPE_FILE).with_suffix(f".{start['launch']}.toml")
    path = earlier if earlier.is_file() else run / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: has no {RECIPE_FILE}, so its samples cannot be read again")
    return load_job(str(path), (), start["ranks"], "cuda").config


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
        stream.skip(start["samples"])
        return
    path = local_path(job.checkpoint.initial_load_path or "")
    try:
        stream.load_state_dict(dict(read_state(path, read_manifest(path))["data"]))
    except (Damaged, KeyError, OSError) as error:
        raise ConfigError(
            f"the run continues another at sample {start['samples']:,}, whose position cannot be "
            f"read again: {error}"
        ) from None

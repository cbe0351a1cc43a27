"""Runs that are harmed, and what is found afterwards: what all reliability trials share."""

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from tests import layouts, runs
from tests.layouts import LAYOUTS
from torchtitan import trainer
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.manifest import problems_of_files, read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.local_ranks import RanksFailed, run_ranks
from torchtitan.provenance import to_toml

# A fork has what its parent imported, so runs need not import it each.
for module in ("tensor", "fsdp", "pipelining", "checkpoint"):
    importlib.import_module(f"torch.distributed.{module}")

STEPS = 8
CASES = {
    "one rank": layouts.case(),
    "DDP 2": LAYOUTS["DDP 2"],
    "FSDP 2": LAYOUTS["FSDP 2"],
    "PP 2": LAYOUTS["PP 2, 1F1B"],
    "FSDP 2 x TP 2": LAYOUTS["FSDP 2 x TP 2"],
}
"""Layouts by what the trials call them."""
LOSS = WEIGHT = 1e-5
"""How far another layout may be off: losses relative, weights absolute."""

Tensors = dict[str, torch.Tensor]


def recipe(folder, layout="one rank", by="AdamW", **sections):
    """Eight steps of the tiny model, saved at every second one; `sections` win."""
    defaults = {
        "job": {"dump_folder": str(folder)},
        "model": {"flavor": "flat"},
        "data": {"report_unigram_loss": False},
        "training": {"steps": STEPS},
        "lr_scheduler": {"total_steps": STEPS},
        "checkpoint": {"enable": True, "interval": 2, "keep_latest_k": 3},
    }
    return layouts.job(CASES[layout], by, **layouts.tiny.merged(defaults, sections))


def ranks_of(layout):
    """How many processes a layout has."""
    return CASES[layout].ranks


# --- running ---


@dataclass(frozen=True)
class Played:
    """What became of a run."""

    statuses: tuple[int | None, ...]
    """Of each rank; minus a signal; None: it was killed since another one was gone."""
    log: str
    seconds: float

    @property
    def was_killed(self):
        return -signal.SIGKILL in self.statuses

    @property
    def status(self):
        """Of all ranks that ended by themselves, which agree."""
        (one,) = set(self.statuses) - {None}
        return one


def play(job, ranks=1, traps=None, status=None):
    """Train as from the command line, on forked ranks; `status`: how it must end."""
    played = play_each([job], ranks, traps)[0]
    assert status is None or played.status == status, played.log
    return played


def play_each(jobs, ranks=1, traps=None):
    """Train one after the other; a single rank does so in the same process."""
    if ranks > 1 and len(jobs) > 1:
        return [play(job, ranks, traps) for job in jobs]
    folder = Path(jobs[0].job.dump_folder)
    scratch = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    scratch.chmod(0o755)
    for number, job in enumerate(jobs):
        (scratch / f"{number}.toml").write_text(to_toml(job), encoding="utf-8")
    began = time.perf_counter()
    failed = ""
    try:
        found = run_ranks(_enter, ranks, scratch, len(jobs), dict(traps or {}))
        statuses = list(zip(*found, strict=True))
    except RanksFailed as error:
        statuses, failed = [error.codes] * len(jobs), str(error)
    seconds = time.perf_counter() - began
    logs = [
        "".join(path.read_text() for path in sorted(scratch.glob(f"{number}.*.log")))
        for number in range(len(jobs))
    ]
    return [
        Played(status, log + failed, seconds) for status, log in zip(statuses, logs, strict=True)
    ]


def _enter(scratch, count, traps):
    rank = int(os.environ["RANK"])
    if rank in traps:
        traps[rank]()
    statuses = []
    for number in range(count):
        with (scratch / f"{number}.{rank}.log").open("w", buffering=1) as sys.stderr:
            try:
                words = ["--job.config_file", str(scratch / f"{number}.toml")]
                statuses.append(trainer.main(words))
                if statuses[-1] and os.environ["WORLD_SIZE"] != "1":
                    os._exit(statuses[-1])  # others may wait for this rank: a launcher ends them
            except BaseException:
                traceback.print_exc()
                raise
    return statuses


# --- traps ---


def die():
    """End this process at once, whatever its threads are doing."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a thread that is not the main one may run on for a moment


def after_seconds(seconds):
    """Dies at a moment."""
    return lambda: threading.Timer(seconds, die).start()


def at_call(place, number=1, action=None):
    """Dies when a function is called for the `number`-th time, or has `action` done instead."""

    def set_trap():
        module, _, path = place.partition(":")
        owner = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function, calls = getattr(owner, name), 0

        def trapped(*arguments, **named):
            nonlocal calls
            calls += 1
            if number not in (0, calls):
                return function(*arguments, **named)
            return action(function, *arguments, **named) if action else die()

        setattr(owner, name, trapped)

    return set_trap


def copy_late():
    """Copies weights for a save only when something waits for the copy, or after an update."""
    gates = {}

    def begin(function, staging, *rest):
        gates[staging] = threading.Event(), threading.Event()
        return function(staging, *rest)

    def copy(function, staging, *rest):
        may_copy, is_copied = gates[staging]
        assert may_copy.wait(60), "nothing waits for the copy"
        copies = function(staging, *rest)
        is_copied.set()
        return copies

    def wait(function, staging):
        if staging in gates:
            gates[staging][0].set()
        return function(staging)

    def update(function, *rest):
        updated = function(*rest)
        for may_copy, is_copied in gates.values():
            may_copy.set()
            is_copied.wait()
        return updated

    for name, action in {"begin": begin, "_copy": copy, "wait": wait}.items():
        at_call(f"torchtitan.checkpoint.saver:Staging.{name}", 0, action)()
    at_call("torchtitan.optim.optimizer_group:Optimizers.step", 0, update)()


LIMIT = 100.0
"""Seconds to wait for what another process does."""


def wait_until(happened):
    until = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.001)


# --- what is on disk ---


def checkpoints(folder):
    """Complete checkpoints of a run by step."""
    return saved_steps(folder / "checkpoint")


def leftovers(folder):
    """What else is among the checkpoints."""
    complete = {path.name for path in checkpoints(folder).values()}
    return sorted({path.name for path in (folder / "checkpoint").glob("*")} - complete)


def damage(checkpoint):
    """What is wrong with a checkpoint, read from its first byte to its last."""
    return list(problems_of_files(checkpoint, read_manifest(checkpoint)))


def tensors(checkpoint):
    """All of a checkpoint, whatever layout wrote it, without what is of single ranks."""
    saved = SavedTensors(checkpoint)
    return {n: saved.read(n).clone() for n in saved.shapes() if not n.startswith("rng.")}


@dataclass(frozen=True)
class End:
    """The numbers that a run came to."""

    losses: Mapping[int, float]
    tensors: Tensors
    data: Mapping[str, Any]
    """Where the data stands."""

    @classmethod
    def of(cls, folder, step=STEPS):
        """Of a run that was finished."""
        path = checkpoints(folder)[step]
        state = json.loads((path / "train_state.json").read_text())
        counters = state["train_state"] | {"history": None}  # it holds losses, which may be off
        return cls(runs.losses(folder), tensors(path), {"data": state["data"], **counters})

    def assert_same(self, other, *, to_the_bit):
        """`other` is how the undisturbed run ended."""
        assert self.data == other.data
        assert self.losses.keys() == other.losses.keys()
        assert self.tensors.keys() == other.tensors.keys()
        if to_the_bit:
            assert self.losses == other.losses
            different = [n for n, t in self.tensors.items() if not torch.equal(t, other.tensors[n])]
            assert not different
        else:
            assert self.losses == pytest.approx(other.losses, rel=LOSS)
            for name, tensor in self.tensors.items():
                if name.startswith("model."):
                    off = (tensor - other.tensors[name]).abs().max().item()
                    assert off <= WEIGHT, name

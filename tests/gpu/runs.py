"""Stage 1 besides: what a person would start, as processes of its own on the device."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.runs import losses

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ("train_configs/debug_model.toml",)
SMALL = (
    *("--training.seq_len", "128", "--training.global_batch_size", "4"),
    *("--validation.enable", "false", "--metrics.log_freq", "1"),
    *("--lr_scheduler.warmup_steps", "2"),
)


def start(*arguments, fails=False):
    """What `torchtitan ARGUMENTS` prints; an AssertionError with its last lines if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.tools.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"status {done.returncode}:\n{said[-1500:]}"
    return said


def train(folder, *flags, fails=False):
    return start("train", *DEBUG, *SMALL, "--job.dump_folder", str(folder), *flags, fails=fails)


def learns(folder):
    """The debug recipe's first steps, with validation."""
    train(
        folder,
        *["--training.steps", "30", "--validation.enable", "true", "--validation.freq", "15"],
    )
    found = losses(Path(folder))
    assert found[30] < found[1] - 1, found
    return {"first loss": found[1], "last loss": found[30]}


def resumes(mode, *flags):
    def check(folder):
        saving = ("--checkpoint.interval", "3", "--checkpoint.async_mode", mode, *flags)
        saving += ("--debug.deterministic", "true", "--training.steps", "6")
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        train(whole, *saving)
        shutil.copytree(whole, cut)
        shutil.rmtree(cut / "checkpoint" / "step-6")
        train(cut, *saving)
        assert losses(whole) == losses(cut), f"{losses(whole)}\n{losses(cut)}"
        return {}

    return check


def says_out_of_memory(folder):
    flags = "--training.steps 2 --training.local_batch_size 540 --training.global_batch_size 540 "
    flags += "--training.seq_len 8192 --profiling.enable_memory_snapshot true"
    said = train(folder, *flags.split(), "--checkpoint.enable", "false", fails=True)
    assert "OutOfMemoryError" in said, said[-1500:]
    evidence = json.loads(Path(folder, "out_of_memory", "rank0.json").read_text())
    assert evidence["held_gib"] < evidence["peak_gib"] < evidence["capacity_gib"], evidence
    assert list(Path(folder, "memory_snapshot").rglob("*")), "no memory snapshot"
    return {"peak GiB": evidence["peak_gib"], "phase": evidence["phase"]}


def traces(folder):
    flags = "--training.steps 6 --profiling.enable_profiling true --profiling.profile_freq 5 "
    flags += "--profiling.profiler_warmup 1 --profiling.enable_memory_snapshot true"
    train(folder, *flags.split(), "--checkpoint.enable", "false")
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    found = sorted(str(path.relative_to(folder)) for path in files)
    assert any("profile_traces" in name for name in found), found
    assert any("memory_snapshot" in name for name in found), found
    start("plan", folder)
    return {}


def generates(folder):
    train(folder, "--training.steps", "10")
    assert "def" in start("generate", folder, "--prompt", "def ", "--tokens", "8")
    return {}


def debug_recipe(folder):
    """The README's first command, on a GPU."""
    start("train", *DEBUG, "--job.dump_folder", folder)
    found = losses(Path(folder))
    assert found[max(found)] < found[1] - 2, found
    return {"first loss": found[1], "last loss": found[max(found)]}


def preflight(folder):
    """Of one rank, with nothing to compare; rates beside the data sheet."""
    said = start("preflight", *DEBUG, "--job.dump_folder", folder, "--json", "--processes", "1")
    verdict = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert not verdict["faults"], verdict["faults"]
    rates = {f"{name} {rate['unit']}": rate["lowest"] for name, rate in verdict["rates"].items()}
    return {"seconds": verdict["seconds"], **rates}


COMPILED = ("--compile.enable", "true")
CASES = {
    "trains": learns,
    "the debug recipe": debug_recipe,
    "resumes": resumes("disabled"),
    "resumes, async": resumes("async"),
    "resumes, async with pinned memory": resumes("async_with_pinned_mem"),
    "resumes, compiled, bf16": resumes(
        "disabled", *COMPILED, "--training.mixed_precision_param", "bfloat16"
    ),
    "traces and memory snapshots": traces,
    "out of memory": says_out_of_memory,
    "generates": generates,
    "preflight": preflight,
}


def check(name, device, backend):
    with TemporaryDirectory() as folder:
        return CASES[name](folder)


def names(rehearsed):
    return ["trains", "generates", "preflight"] if rehearsed else list(CASES)

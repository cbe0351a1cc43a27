"""`scripts/gpu`: proves and measures the code on one GPU. docs/gpu.md says how to read its page."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.gpu import page, pool


class Stage(NamedTuple):
    """Cases that are checked alike."""

    about: str
    minutes: float
    """What it may take."""
    limit: float
    """Seconds of a case."""
    at_once: bool
    """Whether cases may share the device: not where they are timed."""


STAGES = {
    "right": Stage("one device against the CPU", 3, 150, True),
    "runs": Stage("runs as a person starts them", 3, 150, True),
    "ranks": Stage("layouts whose ranks share the device", 6, 150, True),
    "fast": Stage("speed beside a loop by hand", 16, 120, False),
    "many": Stage("one rank of many", 11, 240, False),
    # The first bases of 7B and two of three refreshes took most of two minutes on an H100.
    "systems": Stage("memory and speed of systems from papers", 12, 300, False),
    "real": Stage("a piece of the real run", 9, 540, False),
    "peer": Stage("speed beside TorchTitan 0.2.2, from its wheel", 18, 540, False),
}


def main():
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    environment = about(arguments.rehearse)
    (arguments.output / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    if not arguments.rehearse and not environment["device"]:
        raise SystemExit("there is no CUDA device here; --rehearse goes through all on a CPU")
    until = time.monotonic() + 60 * arguments.minutes
    failed = 0
    for name in arguments.stage or STAGES:
        failed += run(name, arguments, until)
        written = page.write(arguments.output)
    print(written)
    raise SystemExit(1 if failed else 0)


def parse():
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description="Prove and measure the code on one GPU, and write a page."
    )
    stages = "; ".join(f"{name}: {stage.about}" for name, stage in STAGES.items())
    parser.add_argument("--stage", nargs="+", choices=STAGES, help=f"absent: all. {stages}")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose names contain it")
    minutes = sum(stage.minutes for stage in STAGES.values())
    parser.add_argument("--minutes", type=float, default=minutes, help=f"absent: {minutes:.0f}")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) // 3, 1), help="cases at once"
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"), help="folder")
    return parser.parse_args()


def run(name, arguments, until):
    """Check the cases of a stage; how many failed."""
    stage, begin = STAGES[name], time.monotonic()
    rehearsed = arguments.rehearse
    cases = [
        case
        for case in import_module(f"tests.gpu.{name}").names(rehearsed)
        if not arguments.only or any(text in case for text in arguments.only)
    ]
    results = []
    with open(arguments.output / f"{name}.jsonl", "a") as kept:

        def tell(result):
            results.append(result)
            if result.error != pool.NOT_RUN:
                kept.write(json.dumps(result._asdict()) + "\n")
                kept.flush()
            print(f"{name} {len(results)}/{len(cases)}: {line(result)}", flush=True)

        pool.run(
            cases,
            (name, "cpu", "aot_eager") if rehearsed else (name, "cuda", "inductor"),
            workers=arguments.workers if stage.at_once else 1,
            limit=stage.limit,
            until=min(until, begin + 60 * stage.minutes),
            log=str(arguments.output / f"{name}.log"),
            tell=tell,
        )
    return sum(result.error not in (None, pool.NOT_RUN) for result in results)


def line(result):
    figures = [f"{k} {v:.3g}" for k, v in result.figures.items() if isinstance(v, float)]
    word = result.error.strip().splitlines()[0] if result.error else "ok"
    return f"{result.case}: {word} {', '.join(figures)} ({result.seconds:.0f} s)"


def about(rehearsed):
    """Device, driver, versions and command."""
    smi = subprocess.check_output
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        device, driver = smi(query, text=True).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        device, driver = None, None
    return {
        "device": platform.processor() or platform.machine() if rehearsed else device,
        "driver": None if rehearsed else driver,
        **{name: version(name) for name in ("torch", "torchao")},
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["scripts/gpu", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()

"""Plant faults, one at a time, and see whether the tests find them.

    python -m tests.mutations                      every fault, each with the tests of its tier
    python -m tests.mutations --only NAME ...      these faults
    python -m tests.mutations --tier default       with the tests of this tier alone
    python -m tests.mutations --known              only the tests that found them last

A fault is planted in a copy of the working tree, never in the tree itself. The tests that found it
last are run first, then all of the tier, up to the first failure, which must pass in the copy
without the fault. The exit status is 1 if a fault was not found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutations.faults import ROOT, TIERS, Fault, FaultError, plant, read_faults

MARKERS = {"default": "not gate and not slow", "gate": "not slow"}
# They compare the code with a description of it, and would see any change.
LEFT_OUT = ("tests/mutations", "tests/test_budget.py")
NOT_COPIED = (".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "outputs")


class Result(NamedTuple):
    """How a fault fared; `test` is empty if no test found it."""

    fault: Fault
    test: str
    seconds: float


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--tier", choices=TIERS, help="run this tier (default: that of the fault)")
    parser.add_argument("--known", action="store_true", help="run only the tests in found_by")
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests of the tier alone")
    options = parser.parse_args(arguments)
    faults = {fault.name: fault for fault in read_faults()}
    if unknown := set(options.only or ()) - faults.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; allowed: {', '.join(faults)}")
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = copied(Path(folder) / "torchtitan")
            for name in options.only or faults:
                tier = options.tier or faults[name].tier
                results.append(run(faults[name], copy, tier, options.known, options.tests))
                print(row(results[-1]), flush=True)
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missed = [result.fault.name for result in results if not result.test]
    print(f"\n{len(results) - len(missed)} of {len(results)} faults found")
    if missed:
        print(f"not found: {', '.join(missed)}")
    return bool(missed)


def row(result):
    found = result.test or "NOT FOUND"
    return f"{result.fault.name:48} {result.seconds:6.0f} s  {found}"


def copied(copy):
    """A copy of the working tree, with its history, which some tests read."""
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return copy


def run(fault, copy, tier, known, tests):
    """Plant a fault, run tests up to the first that finds it, and put the file back."""
    path, start = copy / fault.file, time.monotonic()
    original = path.read_text()
    plant(fault, copy)
    try:
        for chosen in stages(fault, known, tests):
            for test in failures(chosen, copy, tier):
                path.write_text(original)
                if not failures([test], copy, "gate"):
                    return Result(fault, test, time.monotonic() - start)
                plant(fault, copy)
        return Result(fault, "", time.monotonic() - start)
    finally:
        path.write_text(original)


def stages(fault, known, tests):
    if fault.found_by:
        yield [*fault.found_by]
    if not known:
        yield [*tests, "-n", "auto"]


def failures(tests, copy, tier):
    """The first tests that fail: one, or with several workers those that ran at that time.

    Raises:
        RuntimeError: if pytest itself fails.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", MARKERS[tier]]
        command += [f"--ignore={place}" for place in LEFT_OUT]
        done = subprocess.run(
            [*command, "-o", f"cache_dir={cache}", *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        record = Path(cache) / "v/cache/lastfailed"
        found = list(json.loads(record.read_text())) if record.is_file() else []
    # 0: all passed, 1: some failed, 5: none was chosen.
    if done.returncode not in (0, 1, 5) and not found:
        raise RuntimeError(f"pytest failed:\n{done.stdout}\n{done.stderr}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())

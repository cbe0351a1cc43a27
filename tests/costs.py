"""The processor time of tests: what exceeds its limit, and the report of a release.

A pytest plugin. A test may take 2 seconds of processor, those of the processes that it starts
included; one marked `costs("why")` 10. Nothing fails above these: a busy or slow machine must not
turn a right change red. The twenty most expensive tests above their limit are listed after a run.
"""

import datetime
import os
import platform
import resource
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT, LIMIT_WITH_REASON = 2.0, 10.0
SHOWN = 20
SPENT = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--report", metavar="FILE", help="write minutes by folder, as Markdown")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(), "costs of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        limit = LIMIT_WITH_REASON if item.get_closest_marker("costs") else LIMIT
        report.user_properties += [("processor", processor_seconds() - item.stash[SPENT])]
        report.user_properties += [("limit", limit)]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[SPENT] = processor_seconds()


def processor_seconds():
    """Seconds of processor that this process has used, and those it started that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Costs:
    """Adds up reports, in the process that prints them."""

    def __init__(self):
        self.start = datetime.datetime.now(datetime.UTC)
        self.processor = {}
        self.minutes = defaultdict(float)
        self.outcomes = defaultdict(Counter)
        self.skipped = Counter()

    def pytest_runtest_logreport(self, report):
        folder = folder_of(report.nodeid)
        self.minutes[folder] += report.duration / 60
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[folder][report.outcome] += 1
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            found = dict(report.user_properties)
            self.processor[report.nodeid] = (found["processor"], found["limit"])

    def pytest_terminal_summary(self, terminalreporter, config):
        above = [(spent, name) for name, (spent, limit) in self.processor.items() if spent > limit]
        if above:
            terminalreporter.section(f"{len(above)} tests exceed their seconds of processor")
            for spent, name in sorted(above, reverse=True)[:SHOWN]:
                terminalreporter.write_line(f"{spent:6.1f} s  {name}")
        if config.option.report:
            Path(config.option.report).write_text(self.report())

    def report(self):
        """What ran, where and when, and how long it took, as a page of Markdown."""
        wall = (datetime.datetime.now(datetime.UTC) - self.start).total_seconds() / 60
        commit = git("rev-parse", "--short", "HEAD") + (" with changes" * bool(git("diff", "HEAD")))
        kinds = ("passed", "failed", "skipped")
        rows = [
            [folder, *(str(self.outcomes[folder][kind]) for kind in kinds), f"{minutes:.1f}"]
            for folder, minutes in sorted(self.minutes.items(), key=lambda each: -each[1])
        ]
        slowest = sorted(((spent, name) for name, (spent, _) in self.processor.items()))[::-1]
        total = sum(self.outcomes.values(), Counter[str]())
        lines = [
            "# Tests of a release",
            "",
            "Written by `./scripts/test --release`, which runs every test.",
            "",
            f"- Started: {self.start:%Y-%m-%d %H:%M} UTC, took {wall:.0f} minutes",
            f"- Commit: {commit}",
            f"- Machine: {machine()}",
            f"- Tests: {', '.join(f'{total[kind]} {kind}' for kind in kinds)}",
            "",
            "## Minutes by folder",
            "",
            "Minutes are summed over the workers that ran side by side.",
            "",
            *table([["folder", *kinds, "minutes"], *rows]),
            "",
            "## Skipped",
            "",
            *table([["why", "tests"], *([why, str(n)] for why, n in self.skipped.most_common())]),
            "",
            "## Most processor time",
            "",
            *table([["test", "seconds"], *([n, f"{s:.1f}"] for s, n in slowest[:30])]),
        ]
        return "\n".join(lines) + "\n"


def folder_of(name):
    """The folder of a test below tests/, or its file there."""
    return "/".join(name.partition("::")[0].split("/")[1:3][: 2 if "unit/" in name else 1])


def table(rows):
    head, *rest = rows
    ruler = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(row)} |" for row in (head, ruler, *rest)]


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return (
        f"{os.cpu_count()} cores ({cpu}), {memory:.0f} GiB, {', '.join(gpus) or 'no GPU'}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )

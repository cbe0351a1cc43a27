"""Check the nodes of a job before it trains: devices, links, versions, shared folder."""

import hashlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from torchtitan import __version__
from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.cluster import measurements
from torchtitan.cluster.agent import Agent, describe
from torchtitan.cluster.launcher import (
    Endpoint,
    LaunchOptions,
    LocalAddress,
    Nodes,
    Patience,
    Processes,
    RendezvousSettings,
    RunName,
    given,
    torchrun_words,
    with_nodes,
)
from torchtitan.cluster.measurements import Rates
from torchtitan.cluster.schedulers import fill
from torchtitan.config import ConfigError, first_of, local_path, split_recipe
from torchtitan.device import Device, devices_here, pick
from torchtitan.inputs import require_recipe
from torchtitan.job import JobConfig
from torchtitan.logging import configure, logger
from torchtitan.packages import PACKAGE, requirements
from torchtitan.parallel import Degrees, Launch, World, open_world
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.resilience.stop import status_of_stop
from torchtitan.tools.options import Flag, Recipe, RecipeVerb, Text, number, verb
from torchtitan.trainer import read

REPORT = "TORCHTITAN_PREFLIGHT_REPORT"
"""Variable with the file for the verdict, which the launcher of the node prints."""
fraction = number("a number > 0 and <= 1", lambda value: 0 < value <= 1)
app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def preflight(
    context: typer.Context,
    recipe: Recipe = None,
    least_rate: Annotated[
        float | None,
        Text(
            "F",
            "Minimum rate of a rank, as a fraction of the median (default: 0.8 for devices, 0.5 "
            "for links and folders).",
            parser=fraction,
        ),
    ] = None,
    as_json: Annotated[bool, Flag("--json", "Print JSON.")] = False,
    processes: Processes = None,
    nnodes: Nodes = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunName = None,
    rdzv_conf: RendezvousSettings = None,
    local_addr: LocalAddress = None,
    rejoin_minutes: Patience = None,
) -> int:
    words = [*([recipe] if recipe else []), *context.args]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return as_rank(words, least_rate, as_json)
    options, origins = fill(given(context), os.environ, devices_here)
    options.setdefault("processes", devices_here())
    launch = LaunchOptions(**options, max_restarts=0, origins=origins)
    load(words, launch.nnodes[-1] * launch.processes)
    if least_rate:
        words += [f"--least-rate={least_rate}"]
    return with_nodes(launch, lambda options: on_this_node(options, words, as_json))


def load(words: Sequence[str], ranks: int) -> JobConfig:
    """Read the recipe, but for what other nodes may have and this one may not."""
    path, flags = split_recipe(words)
    require_recipe(path, flags, "preflight")
    job = load_job(path, flags, ranks, pick().type, exempt=ELSEWHERE).config
    configure(color=not job.metrics.disable_color_printing, level=job.metrics.log_level)
    return job


def on_this_node(options: LaunchOptions, words: Sequence[str], as_json: bool) -> int:
    """Run the ranks of this node, and print what all ranks found; return the exit status."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        os.environ[REPORT] = str(report)
        apart = replace(options, rdzv_id=f"{options.rdzv_id}-preflight")
        agent = Agent(
            torchrun_words(apart, "torchtitan", "preflight", *words),
            rejoin_seconds=options.patience * 60,
            not_restarted=(),
            is_finished=report.exists,
            at_failure=lambda: None,
            yields_to=options.rdzv_id,
        )
        try:
            agent.work()
        except ChildFailedError as error:
            if agent.stopped_by is None:
                logger.error("%s", describe(error.failures))
        except RendezvousClosedError:
            logger.info("the run has begun on other nodes, so this one is not checked")
            return 0
        except SignalException as error:
            if agent.stopped_by is None:
                return ExitCode.SIGNALED + error.sigval
        if agent.stopped_by:
            return status_of_stop(agent.stopped_by, True)
        return (
            told(json.loads(report.read_text(encoding="utf-8")), as_json) if report.exists() else 1
        )


def as_rank(words: Sequence[str], least_rate: float | None, as_json: bool) -> int:
    """Check this rank, started by a launcher; return the exit status."""
    launch = Launch.read()
    device = pick(launch.local_rank)
    device.make_current()
    job, problem = load(words, launch.size), ""
    try:
        read(words, launch.size, device.type, local_ranks=launch.local_size)
    except ConfigError as error:
        problem = str(error)
    verdict = check_rank(job, device, problem, least_rate)
    found = {"status": verdict.status, "text": [*verdict.lines()], "json": asdict(verdict)}
    if REPORT not in os.environ:
        return told(found, as_json) if launch.rank == 0 else verdict.status
    if launch.local_rank == 0:
        Path(os.environ[REPORT]).write_text(json.dumps(found), encoding="utf-8")
    return 0  # an agent would end the other ranks, which may not have written it yet


def told(found: dict[str, Any], as_json: bool) -> int:
    """Print a verdict; return its exit status."""
    print(json.dumps(found["json"], indent=1) if as_json else "\n".join(found["text"]))
    status: int = found["status"]
    return status


UNITS = {
    "products": "TFLOP/s",
    "memory": "GB/s",
    "free memory": "GiB",
    "to device": "GB/s",
    "from device": "GB/s",
    "pairs inside a node": "GB/s",
    "pairs between nodes": "GB/s",
    "sum in a node": "GB/s",
    "sum": "GB/s",
    "writing": "MB/s",
    "reading": "MB/s",
}
"""Rates by name, in the order in which they are shown."""
LEAST = dict.fromkeys(("products", "memory", "free memory", "to device", "from device"), 0.8)
LEAST_OTHERS = 0.5
"""Minimum rate of a rank as a fraction of the median: of a device, and of links and folders, which
others may use at the same time."""
CLOCK_SECONDS = 1.0
"""Most that a clock may be off; files and logs of several nodes are ordered by time."""


@dataclass
class RankReport:
    """Measurements of one rank."""

    rank: int
    node: int
    """Number of its node."""
    host: str
    device: str
    facts: dict[str, str] = field(default_factory=dict)
    """Versions and settings that must be equal on all ranks."""
    rates: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Descriptions of everything that failed."""
    problem: str = ""
    """Mistake in the recipe that was found here."""
    clock: float = 0.0
    """Seconds that the clock is ahead of the median."""

    @property
    def place(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True)
class Fault:
    """A finding that ends the job before it trains."""

    what: str
    """A rate, a version, "clock", "recipe" or "broken"."""
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Verdict:
    """Result of a preflight, equal on all ranks."""

    ranks: int
    nodes: int
    seconds: float
    rates: dict[str, dict[str, Any]]
    """By name: unit, median, lowest, its rank and host, and the limit."""
    clock: float
    """Largest offset of a clock from the median, in seconds."""
    faults: list[Fault]

    @property
    def status(self) -> int:
        """Exit status: 2 for a mistake in the recipe that all ranks find, 1 for another fault."""
        everywhere = any(f.what == "recipe" and len(f.ranks) == self.ranks for f in self.faults)
        return 2 if everywhere else int(bool(self.faults))

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        yield f"preflight: {ranks} on {nodes}, {self.seconds:.0f} s"
        if self.rates:
            yield f"  {'':<20}{'':<9}{'median':>9}{'lowest':>9}{'wanted':>9}"
        for name, rate in self.rates.items():
            numbers = "".join(f"{rate[key]:>9.4g}" for key in ("median", "lowest", "least"))
            yield f"  {name:<20}{rate['unit']:<9}{numbers}  rank {rate['rank']} ({rate['host']})"
        yield f"  clocks within {self.clock:.3f} s; wanted {CLOCK_SECONDS:g}"
        if self.ranks == 1:
            yield "  one rank: there is none to compare it with"
        for fault in self.faults:
            yield f"fault: {fault.message}"
        many = len(self.faults)
        yield f"{many} fault{'s' * (many > 1)}" if many else "no faults"


def judge(reports: Sequence[RankReport], seconds: float, least: float | None = None) -> Verdict:
    """Compare the reports of all ranks.

    Args:
        least: least rate as a fraction of the median; None: `LEAST`, or `LEAST_OTHERS`.
    """
    rates = {}
    faults = [*_broken(reports), *_odd(reports)]
    for name, unit in UNITS.items():
        having = [report for report in reports if name in report.rates]
        if not having:
            continue
        slowest = min(having, key=lambda report: report.rates[name])
        middle = median(report.rates[name] for report in having)
        wanted = middle * (least or LEAST.get(name, LEAST_OTHERS))
        rates[name] = {
            "unit": unit,
            "median": middle,
            "lowest": slowest.rates[name],
            "least": wanted,
            "rank": slowest.rank,
            "host": slowest.host,
        }
        for report in having:
            if (rate := report.rates[name]) < wanted:
                message = (
                    f"{report.place}: {name} {rate:.4g} {unit}, {rate / middle:.2f} of the median; "
                    f"wanted {wanted:.4g} or more"
                )
                faults.append(Fault(name, (report.rank,), message))
    late = {report.rank: report for report in reports if abs(report.clock) > CLOCK_SECONDS}
    for rank, report in late.items():
        side = "ahead of" if report.clock > 0 else "behind"
        message = f"{report.place}: the clock is {abs(report.clock):.1f} s {side} the others"
        faults.append(Fault("clock", (rank,), message))
    nodes = len({report.node for report in reports})
    clock = max(abs(report.clock) for report in reports)
    return Verdict(len(reports), nodes, seconds, rates, clock, faults)


def _broken(reports: Sequence[RankReport]) -> Iterator[Fault]:
    """Yield failures, once for all ranks with the same one."""
    said: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        found = [("broken", message) for message in report.faults]
        found += [("recipe", report.problem)] if report.problem else []
        for each in found:
            said.setdefault(each, []).append(report)
    for (what, message), saying in said.items():
        yield Fault(what, tuple(report.rank for report in saying), f"{_places(saying)}: {message}")


def _odd(reports: Sequence[RankReport]) -> Iterator[Fault]:
    """Yield versions and settings that are not those of most ranks."""
    for name in {name: None for report in reports for name in report.facts}:
        counts = Counter(report.facts.get(name, "none") for report in reports)
        (common, _), *others = counts.most_common()
        for value, _ in others:
            odd = [report for report in reports if report.facts.get(name, "none") == value]
            message = f"{_places(odd)}: {name} is {value}; that of most ranks is {common}"
            yield Fault(name, tuple(report.rank for report in odd), message)


def _places(reports: Sequence[RankReport], most: int = 8) -> str:
    return first_of([report.place for report in reports], most)


SETTINGS = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_LAUNCH", "OMP_")
"""Beginnings of variables that change how a run computes or communicates."""
PLACES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE")
"""Variables with such a beginning that may differ between nodes."""


def check_rank(
    job: JobConfig, device: Device, problem: str = "", least: float | None = None
) -> Verdict:
    """Measure this rank together with the others of the launch, and judge all.

    Args:
        problem: mistake in the recipe that this rank has found.
        least: least rate as a fraction of the median of all ranks; see `judge`.
    """
    launch, began = Launch.read(), time.monotonic()
    with open_world(Degrees(dp_shard=launch.size), job.comm, device) as world:
        report = measured(job, world, launch)
        report.problem = problem
        reports = world.gather_object(report)
        seconds = time.monotonic() - began
        verdict: Verdict = world.broadcast_object(reports and judge(reports, seconds, least))
    return verdict


def measured(job: JobConfig, world: World, launch: Launch) -> RankReport:
    """Measure this rank; a failure is part of the report, so that all ranks continue."""
    device = world.device
    node, where = int(os.environ.get("GROUP_RANK", 0)), f"{device.type}:{launch.local_rank}"
    report = RankReport(world.rank, node, socket.gethostname(), where, facts(job, device))

    def attempt(act: Callable[[], Rates]) -> bool:
        try:
            report.rates |= act()
        except (measurements.Broken, ConfigError, RuntimeError, OSError) as error:
            report.faults.append(str(error).partition("\n")[0])
            return False
        return True

    attempt(lambda: measurements.products(device))
    attempt(lambda: measurements.memory(device))
    attempt(lambda: measurements.host_link(device))
    nodes = world.gather(node)
    attempt(lambda: measurements.sums(world, nodes))
    attempt(lambda: measurements.pairs(world, nodes))
    report.clock = measurements.clocks(world)[world.rank]
    folder, sees = local_path(job.job.dump_folder), True
    for stage in measurements.shared_folder(world, folder, is_first=launch.local_rank == 0):
        sees = sees and attempt(stage)
        world.gather(None)
    return report


def facts(job: JobConfig, device: Device) -> dict[str, str]:
    """Return versions and settings that must be equal on all ranks."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(SETTINGS) and k not in PLACES}
    found = {
        "python": platform.python_version(),
        "torchtitan": f"{__version__}, code {code()}",
        **{
            name: _version(name) for name, each in sorted(requirements().items()) if not each.marker
        },
        "recipe": digest(json.dumps(job.flat(), sort_keys=True, default=str).encode()),
        "device": device.name,
        "device memory": f"{device.memory_capacity():.0f} GiB",
        **{name: variables[name] for name in sorted(variables)},
    }
    if device.type == "cuda":
        found["CUDA"] = f"{torch.version.cuda or torch.version.hip}"
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def code() -> str:
    """Return a digest of the code of this package."""
    return digest(*(path.read_bytes() for path in sorted(Path(PACKAGE).rglob("*.py"))))


def digest(*contents: bytes) -> str:
    """Return a short digest, equal for equal contents."""
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

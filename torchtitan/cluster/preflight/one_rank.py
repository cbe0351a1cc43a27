"""A rank of a preflight: it measures, and learns the verdict on all ranks."""

import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan import __version__
from torchtitan.cluster.preflight import measurements
from torchtitan.cluster.preflight.judgment import RankReport, Verdict, judge
from torchtitan.cluster.preflight.measurements import Rates
from torchtitan.config import ConfigError, local_path
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.packages import PACKAGE, requirements
from torchtitan.parallel import Degrees, Launch, World, open_world

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

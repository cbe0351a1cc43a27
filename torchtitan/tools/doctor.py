"""Report versions, devices and missing packages, with the commands to install them."""

import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist

from torchtitan import __version__
from torchtitan.config import counted
from torchtitan.convert import CONVERTERS
from torchtitan.convert.settings import LinearConverterConfig
from torchtitan.device import GIB, Device, compiles_for_cpu, cpu_has_bfloat16, pick
from torchtitan.packages import (
    DISTRIBUTION,
    PACKAGE,
    install,
    is_installed,
    other_torchtitan,
    requirements,
)
from torchtitan.tools.options import Flag, Verb, verb

CUDA_WHEEL = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
OPTIONAL = {
    "s3fs": ("s3fs", "checkpoints on S3"),
    "gcsfs": ("gcsfs", "checkpoints on Google Cloud Storage"),
    "torchft": ("torchft", "replica groups: fault_tolerance.enable"),
    "pillow": ("PIL", "JPEG and PNG files"),
    "tifffile": ("tifffile", "TIFF files"),
}
"""Module and use of each optional package."""
SHARED_MEMORY = 1.0
"""GiB of /dev/shm below which NCCL may fail; containers often have 0.06."""

app = verb()


class Finding(NamedTuple):
    """A line of the report."""

    section: str
    name: str
    state: Literal["ok", "missing", "error"]
    """An error is something without which training cannot work."""
    detail: str
    fix: str = ""
    """Command that mends it."""


@app.command(cls=Verb, help=__doc__)
def doctor(as_json: Annotated[bool, Flag("--json", "Print JSON.")] = False) -> int:
    device = pick()
    found = [*versions(), *devices(device), *backends(device), *features(device), *system(device)]
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        section = ""
        for finding in found:
            if finding.section != section:
                section = finding.section
                print(f"{section}:")
            fix = f"  -> {finding.fix}" if finding.fix else ""
            print(f"  {finding.state:<7}  {finding.name:<19}  {finding.detail}{fix}")
        print(verdict(found, device))
    return int(any(finding.state == "error" for finding in found))


def verdict(found: Sequence[Finding], device: Device) -> str:
    """Say in a line whether this machine can train."""
    wrong = [finding.name for finding in found if finding.state == "error"]
    if wrong:
        return f"not ready to train; first mend {', '.join(wrong)}"
    absent = sum(finding.state == "missing" for finding in found)
    return f"ready to train on {device.type}; missing: {counted(absent, 'optional feature')}"


def versions() -> Iterator[Finding]:
    """Find the versions of Python and of the required packages."""
    yield Finding("versions", "python", "ok", platform.python_version())
    yield Finding("versions", DISTRIBUTION, "ok", f"{__version__} in {PACKAGE}")
    for name, requirement in sorted(requirements().items()):
        if requirement.marker:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("versions", name, "error", "not installed", install(name))
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding("versions", name, "ok", found)
        else:
            wanted = f"{found}; wanted {requirement.specifier}"
            yield Finding("versions", name, "error", wanted, install(name))
    if other := other_torchtitan():
        detail = f"{other} of Meta is installed, too, with the same import name"
        fix = f"pip uninstall torchtitan, and install {DISTRIBUTION} again"
        yield Finding("versions", "torchtitan", "missing", detail, fix)


def devices(device: Device) -> Iterator[Finding]:
    """Find the devices, and why torch does not use those of NVIDIA."""
    driver = nvidia_driver()
    if device.type == "cuda":
        toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        driver = f", driver {driver}" if driver else ""
        yield Finding("devices", "torch for", "ok", f"{toolkit}{driver}")
        for each in (Device("cuda", index) for index in range(torch.cuda.device_count())):
            detail = f"{each.name}, {each.memory_capacity():.0f} GiB"
            yield Finding("devices", f"cuda:{each.index}", "ok", detail)
        return
    memory = f"{device.memory_limit():.0f} GiB"
    yield Finding("devices", "cpu", "ok", f"{device.name}, {os.cpu_count()} cores, {memory}")
    if driver and torch.version.cuda is None:
        detail = f"torch is built for the CPU, and there is an NVIDIA driver {driver}"
        yield Finding("devices", "cuda", "missing", detail, CUDA_WHEEL)
    elif driver:
        detail = f"torch for CUDA {torch.version.cuda} finds no device with driver {driver}"
        fix = "nvidia-smi shows the devices and the newest CUDA that the driver supports"
        yield Finding("devices", "cuda", "missing", detail, fix)
    else:
        yield Finding("devices", "cuda", "missing", "no NVIDIA driver was found")


def nvidia_driver() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def backends(device: Device) -> Iterator[Finding]:
    """Find the backends, and try that of the device with a process group of one rank."""
    for name in ("gloo", "nccl"):
        if not dist.is_backend_available(name):
            state: Literal["missing", "error"] = "error" if name == device.backend else "missing"
            yield Finding("backends", name, state, "not in this build of torch")
            continue
        failure = try_backend(device) if name == device.backend else ""
        detail = failure or "available"
        if name == "nccl" and not failure:
            detail = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding("backends", name, "error" if failure else "ok", detail)


def try_backend(device: Device) -> str:
    """Reduce a tensor among one rank; return the error, if any."""
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        minute = timedelta(minutes=1)
        try:
            device.make_current()
            dist.init_process_group(
                device.backend, store=store, rank=0, world_size=1, timeout=minute
            )
            dist.all_reduce(torch.ones(1, device=device.torch_device))
            device.synchronize()
            dist.destroy_process_group()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""


def features(device: Device) -> Iterator[Finding]:
    """Find what the features need that not every machine has."""
    for name, converter in CONVERTERS.items():
        if issubclass(converter, LinearConverterConfig):
            lack, fix = (
                converter(name=name).lacks(device.capability),
                "set emulate = true in [[convert]]",
            )
            yield _needs(name, not lack, lack or "matrix products", fix)
    peers = device.type == "cuda" and torch.cuda.device_count() > 1
    peers = peers and torch.cuda.can_device_access_peer(0, 1)
    detail = "asynchronous tensor parallelism"
    detail += "" if peers else "; needs two CUDA devices with peer access"
    yield _needs("symmetric memory", peers, detail, "")
    if device.type == "cpu":
        fix = 'training.mixed_precision_param = "float32"'
        yield _needs("bfloat16", cpu_has_bfloat16(), "arithmetic without emulation", fix)
    compiles = compiles_for_cpu() if device.type == "cpu" else is_installed("triton")
    needed = "apt-get install g++" if device.type == "cpu" else "pip install triton"
    yield _needs("torch.compile", compiles, "compile.enable", needed)
    for package, (module, use) in OPTIONAL.items():
        yield _needs(package, is_installed(module), use, install(package))
    is_known = "WANDB_API_KEY" in os.environ or os.environ.get("WANDB_MODE") == "offline"
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    is_known = is_known or (netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8"))
    yield _needs("wandb login", is_known, "metrics.enable_wandb", "wandb login")


def _needs(name: str, is_there: bool, detail: str, fix: str, section: str = "features") -> Finding:
    return Finding(section, name, "ok" if is_there else "missing", detail, "" if is_there else fix)


def system(device: Device) -> Iterator[Finding]:
    """Find limits of the system that NCCL runs into."""
    if device.type == "cpu":
        return
    free = shutil.disk_usage("/dev/shm").free / GIB
    detail, fix = f"{free:.2f} GiB free in /dev/shm", "docker run --shm-size 8g"
    yield _needs("shared memory", free >= SHARED_MEMORY, detail, fix, "system")
    if Path("/sys/class/infiniband").is_dir():
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        is_free = limit == resource.RLIM_INFINITY
        detail = "unlimited" if is_free else f"{limit:,} bytes; InfiniBand needs unlimited"
        yield _needs("locked memory", is_free, detail, "ulimit -l unlimited", "system")

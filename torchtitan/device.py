"""Device abstraction of CPU and CUDA: backend, streams, memory, random state, peak FLOP/s.

Other modules use a `Device` and need no conditions, as both kinds have the same methods; values
unknown for a CPU (its dense peak, for one) are `None`, not a guess.

Peaks are dense (no sparsity), per device as torch sees it, from the vendors' data sheets and
architecture white papers: NVIDIA Ampere A100/A30/A40/A10, Hopper H100/H200/GH200, Ada L4/L40/L40S,
RTX white papers (figures with fp32 accumulation), Blackwell HGX and NVL72; AMD CDNA 2 and 3. If a
sheet has only the figure with sparsity, the dense one is half of it.
"""

import ctypes
import gc
import math
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import torch
from pydantic import Field

from torchtitan.config import Config, Context, Problem

GIB = 1024**3
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# Collections of young garbage per collection of all objects.
FULL_COLLECTION = 10

ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
# FSDP allocates and frees parameters of many sizes, which fit in the gaps of other segments badly.
ALLOCATOR_SETTINGS = "expandable_segments:True"

# Seconds of a clock on a CPU, an event in the stream on CUDA.
Stamp = float | torch.Event

# Full device name (without "NVIDIA ") -> dense TFLOP/s in bf16 (and fp16), and in fp32 without TF32
# or None. A name must match whole: cut-down, MIG and mobile variants are other devices.
PEAK_TFLOPS: Mapping[str, tuple[float, float | None]] = {
    r"GB200": (2500, None),
    r"B200": (2250, None),
    r"GH200 \d+GB?( HBM3e?)?": (989, 67),
    r"H200": (989, 67),
    r"H200 NVL": (835, 60),
    r"H100 80GB HBM3": (989, 67),
    r"H100 NVL": (835, 60),
    r"H100 PCIe": (756, 51),
    r"A[18]00-SXM4-[48]0GB": (312, 19.5),
    r"A[18]00-PCIE-[48]0GB|A[18]00 80GB PCIe": (312, 19.5),
    r"A40": (149.7, 37.4),
    r"A30": (165, 10.3),
    r"A10": (125, 31.2),
    r"L40S": (362, 91.6),
    r"L40": (181, 90.5),
    r"L4": (121, 30.3),
    r"RTX 6000 Ada Generation": (364.2, 91.1),
    r"RTX A6000": (154.8, 38.7),
    r"GeForce RTX 4090": (165.2, 82.6),
    r"GeForce RTX 3090": (71, 35.6),
    r"AMD Instinct MI325X( OAM)?": (1307.4, 163.4),
    r"AMD Instinct MI300X( OAM)?": (1307.4, 163.4),
    # torch sees one of the two dies of the package.
    r"AMD Instinct MI250X( / MI250)?": (191.5, 23.95),
}


def allocator_settings() -> str:
    """Return the settings of torch's CUDA allocator: of the environment, or else our own."""
    found = (os.environ.get(variable) for variable in ALLOCATOR_VARIABLES)
    return next(filter(None, found), ALLOCATOR_SETTINGS)


def peak_flops(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Return the dense peak of the device called `name` in FLOP/s; None if not known for sure."""
    name = name.removeprefix("NVIDIA ")
    for pattern, (half, single) in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name):
            peak = {torch.bfloat16: half, torch.float16: half, torch.float32: single}.get(dtype)
            return None if peak is None else peak * 1e12
    return None


DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """One CPU or one CUDA device (NVIDIA or ROCm); a value that may be copied and compared."""

    type: DeviceType
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """Device for torch's `device=` arguments."""
        return torch.device("cuda", self.index) if self.type == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend of `torch.distributed` for tensors on this device."""
        return "nccl" if self.type == "cuda" else "gloo"

    @property
    def name(self) -> str:
        """Model name, as the vendor writes it."""
        return torch.cuda.get_device_name(self.index) if self.type == "cuda" else _cpu_name()

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, such as (9, 0); None on a CPU."""
        return torch.cuda.get_device_capability(self.index) if self.type == "cuda" else None

    def peak_flops(self, dtype: torch.dtype = torch.bfloat16) -> float | None:
        """Return the dense peak in FLOP/s; None on a CPU or without a reliable figure."""
        return peak_flops(self.name, dtype) if self.type == "cuda" else None

    def make_current(self) -> None:
        """Make this the device of tensors created on "cuda" without an index.

        This sets `ALLOCATOR_SETTINGS`, which torch reads on first use, unless the environment has
        others.
        """
        if self.type == "cuda":
            os.environ[ALLOCATOR_VARIABLES[0]] = allocator_settings()
            torch.cuda.set_device(self.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory for this device; on a CPU, return the tensor itself."""
        return tensor.pin_memory() if self.type == "cuda" else tensor

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.index)

    @contextmanager
    def side_stream(self) -> Iterator[torch.Event]:
        """Run work queued inside after earlier work, concurrently with later work; CUDA only.

        The event marks its end: `wait` makes later work wait, `synchronize` the host.
        """
        now = torch.cuda.current_stream(self.index)
        stream, done = torch.Stream(f"cuda:{self.index}"), torch.Event("cuda")
        stream.wait_stream(now)
        with stream:
            yield done
            done.record(stream)

    def stamp(self, clock: Callable[[], float] = time.perf_counter) -> Stamp:
        """Record a moment on the device's own timeline, without synchronization."""
        if self.type == "cpu":
            return clock()
        event = torch.Event("cuda", enable_timing=True)
        event.record(torch.cuda.current_stream(self.index))
        return event

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Return the seconds between two stamps; waits until the device has reached the second."""
        if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        assert not isinstance(begin, torch.Event), "stamps of two devices"
        assert not isinstance(end, torch.Event), "stamps of two devices"
        return end - begin

    def memory_peak(self) -> float:
        """Return the peak GiB reserved by torch since the last reset, or resident by now."""
        if self.type == "cuda":
            return torch.cuda.max_memory_reserved(self.index) / GIB
        return _resident_peak() / GIB

    def memory_capacity(self) -> float:
        """Return the GiB of the device, or of the machine."""
        if self.type == "cuda":
            return torch.cuda.get_device_properties(self.index).total_memory / GIB
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB

    def memory_limit(self) -> float:
        """Return the maximum GiB for processes, with a machine's swap and its cgroup limits."""
        if self.type == "cuda":
            return self.memory_capacity()
        ram = _group_limit("memory.max", "memory.limit_in_bytes")
        swap = _group_limit("memory.swap.max")
        total = min(self.memory_capacity(), ram) + min(_meminfo("SwapTotal"), swap)
        return min(total, _group_limit("memory.memsw.limit_in_bytes"))

    def memory_available(self) -> float:
        """Return the GiB that are free, or would be without caches.

        On CUDA only for the device of this process: the query creates a context there, which stays,
        and takes about half a GiB.
        """
        if self.type == "cuda":
            return torch.cuda.mem_get_info(self.index)[0] / GIB
        return min(_meminfo("MemAvailable") or self.memory_capacity(), self.memory_limit())

    def reset_memory_peak(self) -> None:
        """Start a new peak. The kernel keeps one peak per process, so a CPU's is never reset."""
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.index)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Return the state of torch's default generators: the CPU's, and this device's."""
        state = {"cpu": torch.get_rng_state()}
        if self.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.index)
        return state

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `rng_state`; a state of the other kind of device is ignored."""
        torch.set_rng_state(state["cpu"])
        if self.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.index)


def collect_garbage(step: int, every: int) -> int:
    """Collect Python's garbage at a fixed interval of steps, and return free memory to the kernel.

    Long-lived small objects, such as the Flight Recorder's entries, fragment the heap between
    tensors, so that it grows though little is in use. Only glibc has a call to return memory. Young
    objects are collected each time, and all objects each tenth time, since that takes longer the
    more objects there are. It depends on the step alone, so it is the same on all ranks. Returns
    the number of objects found.
    """
    calls, rest = divmod(step, every)
    if rest:
        return 0
    found = gc.collect(1 if calls % FULL_COLLECTION else 2)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return found


def pick(local_rank: int = 0) -> Device:
    """Return the device of this process: CUDA number `local_rank` if there is CUDA, else the CPU.

    Raises RuntimeError when more processes were started here than there are CUDA devices.
    """
    if not torch.cuda.is_available():
        return Device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no CUDA device: this machine shows {count}; start at "
            f'most {count} processes here, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
        )
    return Device("cuda", local_rank)


def devices_here() -> int:
    """Return the number of devices of this machine: of CUDA, or one CPU."""
    return torch.cuda.device_count() or 1


def smallest(local_ranks: int) -> Device:
    """Return the device with the smallest memory of the first `local_ranks` of this machine.

    Any process may call it: neither the count nor the properties of devices create a context.
    """
    if not torch.cuda.is_available():
        return Device("cpu")
    devices = range(min(local_ranks, torch.cuda.device_count()))
    return min((Device("cuda", index) for index in devices), key=Device.memory_capacity)


def compiles_for_cpu() -> bool:
    """Whether inductor can compile for the CPU, which needs a C++ compiler."""
    return bool(shutil.which("g++") or shutil.which("clang++"))


def _meminfo(key: str) -> float:
    """Return the GiB in a line of /proc/meminfo; 0 if there is none."""
    path = PROC / "meminfo"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 / GIB if found else 0.0


def _group_limit(*names: str) -> float:
    """Return the smallest GiB in these files of this process's control groups; else infinite."""
    files = (folder / name for folder in _groups() for name in names)
    limits = [path.read_text(encoding="utf-8").strip() for path in files if path.is_file()]
    return min((int(text) / GIB for text in limits if text.isdecimal()), default=math.inf)


def _groups() -> Iterator[Path]:
    """Yield the folder of each control group (v1 and v2) of this process, up to the root."""
    path = PROC / "self/cgroup"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container may see its own group as the root, so part of the path may be missing.
        folders = PurePath(group.lstrip("/"))
        for above in (folders, *folders.parents):
            yield CGROUPS / ("memory" if controllers else "") / above


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16, rather than emulating it; True if unknown."""
    known = f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split()  # of x86, of ARM
    return not known or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(known)


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """Return the first line of /proc/cpuinfo with this key; empty if there is none."""
    path = PROC / "cpuinfo"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _resident_peak() -> int:
    """Return the peak in bytes: `VmHWM`, or else `ru_maxrss`, which may be inherited."""
    status = PROC / "self/status"
    if status.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class DebugConfig(Config):
    """Seed and determinism."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the weights and of the data order."""
    deterministic: bool = False
    """Use only deterministic algorithms, which are slower on CUDA."""
    deterministic_warn_only: bool = False
    """Warn about operations without a deterministic algorithm instead of failing."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.deterministic_warn_only and not self.deterministic:
            message = "it has no effect without self.deterministic = true"
            yield Problem("deterministic_warn_only", message, ("deterministic",))


def set_determinism(config: DebugConfig) -> None:
    """Seed the generators and, if asked, allow only deterministic algorithms."""
    torch.manual_seed(config.seed)
    if config.deterministic:
        # Read by cuBLAS on first use; without it torch refuses matrix products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Torch imports its compiler for this setting, which takes a second, so it is set only if
    # needed.
    if config.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(
            config.deterministic, warn_only=config.deterministic_warn_only
        )

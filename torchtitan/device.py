"""The only place that knows CPU from CUDA: backend, streams, memory, random state, peak FLOP/s.

Everything else holds a `Device` and asks it. Both kinds answer the same questions, so no other
module needs a condition; what a CPU cannot know (its dense peak, for one) is `None`, not a guess.

Peaks are dense (no sparsity), per device as torch sees it, from the vendors' data sheets and
architecture white papers: NVIDIA Ampere A100/A30/A40/A10, Hopper H100/H200/GH200, Ada L4/L40/L40S,
RTX white papers (figures with fp32 accumulation), Blackwell HGX and NVL72; AMD CDNA 2 and 3.
Where a sheet gives only the figure with sparsity, the dense one is half of it.
"""

import ctypes
import gc
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
from pathlib import Path
from typing import Literal

import torch

GIB = 1024**3

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


def peak_flops(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Dense peak of the device called `name`, FLOP/s, or None where it is not known for sure."""
    name = name.removeprefix("NVIDIA ")
    for pattern, (half, single) in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name):
            peak = {torch.bfloat16: half, torch.float16: half, torch.float32: single}.get(dtype)
            return None if peak is None else peak * 1e12
    return None


@dataclass(frozen=True)
class Device:
    """One CPU or one CUDA device (NVIDIA or ROCm); a value, so it may be copied and compared."""

    type: Literal["cpu", "cuda"]
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """What to pass to torch as `device=`."""
        return torch.device("cuda", self.index) if self.type == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend of `torch.distributed` for tensors that live here."""
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
        """Dense peak, FLOP/s; None on a CPU and on devices whose peak is not known for sure."""
        return peak_flops(self.name, dtype) if self.type == "cuda" else None

    def make_current(self) -> None:
        """Let tensors made on "cuda" without an index land here."""
        if self.type == "cuda":
            torch.cuda.set_device(self.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory that this device reads by itself; on a CPU, the tensor as it is."""
        return tensor.pin_memory() if self.type == "cuda" else tensor

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.index)

    @contextmanager
    def beside(self) -> Iterator[torch.Event]:
        """CUDA only: what is queued inside runs after what is queued already, beside what follows.

        The event is reached when it is done: `wait` makes later work wait, `synchronize` the host.
        """
        now = torch.cuda.current_stream(self.index)
        aside, done = torch.Stream(f"cuda:{self.index}"), torch.Event("cuda")
        aside.wait_stream(now)
        with aside:
            yield done
            done.record(aside)

    def stamp(self, clock: Callable[[], float] = time.perf_counter) -> Stamp:
        """A moment on the device's own time line; costs no synchronization."""
        if self.type == "cpu":
            return clock()
        event = torch.Event("cuda", enable_timing=True)
        event.record(torch.cuda.current_stream(self.index))
        return event

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Seconds between two stamps; waits until the device has reached the second."""
        if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        assert not isinstance(begin, torch.Event), "stamps of two devices"
        assert not isinstance(end, torch.Event), "stamps of two devices"
        return end - begin

    def memory_peak(self) -> float:
        """Peak GiB: reserved by torch since the last reset, or resident in this process's life."""
        if self.type == "cuda":
            return torch.cuda.max_memory_reserved(self.index) / GIB
        return _resident_peak() / GIB

    def memory_capacity(self) -> float:
        """GiB of the device, or of the machine."""
        if self.type == "cuda":
            return torch.cuda.get_device_properties(self.index).total_memory / GIB
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB

    def memory_limit(self) -> float:
        """GiB that processes could have at the most: on a machine its swap counts, and a limit of
        the control group they are in."""
        if self.type == "cuda":
            return self.memory_capacity()
        here = self.memory_capacity() + _meminfo("SwapTotal")
        group = [_control_group(name) for name in ("memory.max", "memory.swap.max")]
        return min(here, sum(group))

    def memory_available(self) -> float:
        """GiB that are free, or would be without caches."""
        if self.type == "cuda":
            return torch.cuda.mem_get_info(self.index)[0] / GIB
        return min(_meminfo("MemAvailable") or self.memory_capacity(), self.memory_limit())

    def reset_memory_peak(self) -> None:
        """Start a new peak. The kernel keeps one peak per process, so a CPU's is never reset."""
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.index)

    def allocation_retries(self) -> int:
        """How often torch emptied its cache to go on; more than 0 means memory is too tight."""
        if self.type == "cuda":
            return int(torch.cuda.memory_stats(self.index).get("num_alloc_retries", 0))
        return 0

    def rng_state(self) -> dict[str, torch.Tensor]:
        """State of torch's default generators: the CPU's, and this device's."""
        state = {"cpu": torch.get_rng_state()}
        if self.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.index)
        return state

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `rng_state` gave; a state of the other kind of device is left alone."""
        torch.set_rng_state(state["cpu"])
        if self.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.index)


def collect_garbage() -> int:
    """Python's, and what the C library keeps of freed memory goes back to the kernel.

    Small objects that live long, such as the Flight Recorder's entries, lie between tensors that
    come and go, so that the heap of a rank grows though little is in use. Elsewhere than in glibc
    there is no such call, and nothing is given back. Returns how many objects were found.
    """
    found = gc.collect(1)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return found


def pick(local_rank: int = 0) -> Device:
    """The device of this process: CUDA number `local_rank` where there is CUDA, else the CPU.

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


def compiles_for_cpu() -> bool:
    """Whether there is what inductor needs for code of the CPU: a compiler of C++."""
    return bool(shutil.which("g++") or shutil.which("clang++"))


def _meminfo(key: str) -> float:
    """GiB by a line of the kernel's; 0 where there is none."""
    path = Path("/proc/meminfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 / GIB if found else 0.0


def _control_group(name: str) -> float:
    """GiB that a control group (v2) limits its processes to; infinite where there is no limit."""
    path = Path("/sys/fs/cgroup") / name
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) / GIB if text.isdecimal() else float("inf")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _resident_peak() -> int:
    """Bytes. `VmHWM` comes first because `ru_maxrss` may be inherited from the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

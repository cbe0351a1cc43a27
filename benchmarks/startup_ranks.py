"""What grows with the number of ranks when a run starts: counted on one of up to 16,384.

    python benchmarks/startup_ranks.py --output benchmarks/results/startup_ranks.md

A rank of the debug model starts as `torchtitan train` starts it, among ranks that do not exist:
collectives return at once, and what others would send is what this rank sends. Counted until the
end of the first step are files, entries of folders, process groups, objects received from other
ranks, and the operations of gloo that all ranks take part in; seconds are those of its processor.
For Llama 3.1 405B, a step is recorded on fake tensors, as for its plan. Connections and operations
of the store are those of real groups of gloo and of real rendezvous, on threads of this process.
"""

import argparse
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
SIZES = (8, 64, 512, 4096, 16384)
THREADS = (8, 16, 32, 64)
LARGE_SIZES = (512, 4096, 16384)
RECIPE, LARGE = "debug_model", ROOT / "train_configs/llama3_405b.toml"
LOCAL, SEQ_LEN = 8, 32
LINES, LANES = 20000, 16384
FLAGS = f"""--training.seq_len {SEQ_LEN} --training.local_batch_size 1
    --no-validation.enable --no-data.report_unigram_loss --data.dataset jsonl
    --metrics.log_freq 1""".split()
STAGES = ("recipe", "choice", "groups", "build", "load", "first batch", "first step")


class Counts:
    """What a rank has done so far."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.groups: list[int] = []
        self.paths: list[str] = []
        self.marks: list[tuple[str, float, float, int]] = []
        self._is_ours = False

    def watch_files(self) -> None:
        """Count the files and folders that are opened from now on."""

        def see(event: str, args: tuple[Any, ...]) -> None:
            if self._is_ours:
                return
            if event == "open" and isinstance(args[0], str):
                self.paths.append(args[0])
            elif event in ("os.listdir", "os.scandir") and isinstance(args[0], str):
                self._is_ours = True
                if os.path.isdir(args[0]) and str(ROOT / "torchtitan") not in args[0]:
                    self.found["entries of folders"] += len(os.listdir(args[0]))
                self._is_ours = False

        sys.addaudithook(see)

    def mark(self, stage: str) -> None:
        """Note the end of a stage."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        self.marks.append((stage, time.perf_counter(), time.process_time(), size))

    def result(self) -> dict[str, Any]:
        """Return the numbers, by name."""
        code = {str(getattr(m, "__file__", "")) for m in list(sys.modules.values())}
        paths = [p for p in self.paths if p not in code and not p.endswith((".pyc", ".so"))]
        apart = ("/proc", "/sys", "/dev", "__editable__", sys.prefix, sys.base_prefix)
        paths = [p for p in paths if not p.startswith(apart) and not p.endswith(".sent")]
        stages = {}
        for (_, wall, busy, _), (name, later, busier, size) in zip(
            self.marks, self.marks[1:], strict=False
        ):
            stages[name] = {"wall": later - wall, "processor": busier - busy, "resident": size}
        return {
            **self.found,
            "files opened": len(paths),
            "groups": len(self.groups),
            "ranks in groups": sum(self.groups),
            "stages": stages,
        }


@contextmanager
def among_others(counts: Counts, ranks: int, sent: Path) -> Iterator[None]:
    """Be a rank of many that do not exist; rank 0 keeps what it broadcasts for a later one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, found, replace = int(os.environ["RANK"]), counts.found, mock.patch.object
    start, group_of, reduce = dist.init_process_group, dist.new_group, dist.all_reduce
    kept: list[bytes] = [] if rank == 0 else pickle.loads(sent.read_bytes())

    def join(*args: Any, **settings: Any) -> None:
        counts.groups.append(ranks)
        start("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def make(members: Any = None, *args: Any, **settings: Any) -> Any:
        counts.groups.append(len(members) if members is not None else ranks)
        settings |= {"backend": None}
        return group_of(members, *args, **settings)

    def received(kind: str, data: bytes, times: int) -> list[Any]:
        found[kind] += 1
        found["objects received"] += times
        found["bytes of objects"] += times * len(data)
        return [pickle.loads(data) for _ in range(times)]

    def all_gather(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = received("gathers on all ranks", pickle.dumps(value), len(values))

    def gather(value: Any, values: list[Any] | None, **_: Any) -> None:
        if values is not None:
            values[:] = received("gathers on rank 0", pickle.dumps(value), len(values))
            for other, state in enumerate(values):
                if isinstance(state, dict) and "lanes" in state:  # each rank has lanes of its own
                    own = state["lanes"].items()
                    lanes = {(int(lane) + other) % LANES: record for lane, record in own}
                    state["lanes"] = {str(lane): record for lane, record in lanes.items()}

    def broadcast(values: list[Any], **_: Any) -> None:
        if rank == 0:
            kept.append(pickle.dumps(values))
            sent.write_bytes(pickle.dumps(kept))
        values[:] = received("broadcasts", kept[0] if rank else kept[-1], 1)[0]
        if rank:
            del kept[0]

    def all_reduce(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        group = settings.get("group")
        if group is not None and group.group_desc == "slow":
            found["reductions of flags"] += 1
            found["their bytes"] += tensor.nbytes
        elif tensor.nbytes >= 8 * ranks and tensor.ndim == 2 and len(tensor) == ranks:
            found["bytes of tables"] += tensor.nbytes
        return reduce(tensor, *args, **settings)

    with ExitStack() as opened:
        opened.enter_context(replace(dist, "init_process_group", join))
        opened.enter_context(replace(dist, "new_group", make))
        opened.enter_context(replace(dist, "all_reduce", all_reduce))
        opened.enter_context(replace(dist, "all_gather_object", all_gather))
        opened.enter_context(replace(dist, "gather_object", gather))
        opened.enter_context(replace(dist, "broadcast_object_list", broadcast))
        yield


def take_part(words: Sequence[str]) -> None:
    """Start as one rank, print what it has done by the end of the first step, and exit."""
    from torchtitan import train
    from torchtitan.checkpoint import Checkpointer
    from torchtitan.metrics.startup import Startup

    counts, dump = Counts(), Path(words[words.index("--job.dump_folder") + 1])
    sent = dump.with_name(f"{dump.name}.sent")

    def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            result = function(*args, **settings)
            counts.mark(name)
            return result

        return call

    def end(*_: Any) -> None:
        counts.mark("first step")
        print(json.dumps(counts.result()), flush=True)
        os._exit(0)

    with ExitStack() as opened:
        replace = mock.patch.object
        opened.enter_context(among_others(counts, int(os.environ["WORLD_SIZE"]), sent))
        for owner, name, stage in (
            *((train, "read", "recipe"), (train, "choose", "choice"), (train, "build", "build")),
            *((train, "observe", "groups"), (Checkpointer, "load", "load")),
        ):
            opened.enter_context(replace(owner, name, marked(stage, getattr(owner, name))))
        begin = marked("first batch", Startup.before_step)
        opened.enter_context(replace(Startup, "before_step", begin))
        opened.enter_context(replace(Startup, "after_step", end))
        counts.mark("imports")
        counts.watch_files()
        raise RuntimeError(f"the rank ended with status {train.main([RECIPE, *words])}")


def record_large(ranks: int, rank: int) -> dict[str, Any]:
    """Record a step of a rank of the large recipe on fake tensors."""
    from torchtitan.checks import load_job
    from torchtitan.config import CannotRun
    from torchtitan.estimate.fake_rank import record

    groups: list[int] = []
    make = dist.new_group

    def count(members: Any, *args: Any, **settings: Any) -> Any:
        groups.append(len(members))
        return make(members, *args, **settings)

    try:
        job = load_job(LARGE, [], ranks, "cuda").config
    except CannotRun as error:  # for want of its files
        job = error.config
    began, busy = time.perf_counter(), time.process_time()
    with mock.patch.object(dist, "new_group", count):
        record(job, ranks, rank)
    groups.append(ranks)
    return {
        "groups": sorted(groups),
        "wall": time.perf_counter() - began,
        "processor": time.process_time() - busy,
    }


class CountingStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store that counts operations, and the bytes that they bring."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.found = inner, Counter[str]()

    def _ask(self, name: str, *args: Any) -> Any:
        self.found["operations"] += 1
        value = getattr(self.inner, name)(*args)
        if name == "compare_set":
            self.found["writes"] += 1
        if isinstance(value, bytes):
            self.found["bytes read"] += len(value)
        return value

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._ask("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._ask("wait", keys, *timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._ask("compare_set", key, expected, desired)
        return found


def on_threads(ranks: int, call: Callable[[int], object]) -> None:
    """Call a function with each rank, at the same time."""
    threads = [threading.Thread(target=call, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def connect(ranks: int, lazily: bool) -> dict[str, float]:
    """Make a real group of gloo, and reduce a flag in it; return the means of a rank."""
    inner, files = dist.HashStore(), lambda: len(os.listdir("/proc/self/fd"))
    stores, groups = [CountingStore(inner) for _ in range(ranks)], {}
    before = files()

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=lazily)]
        options._threads, options._timeout = 1, timedelta(seconds=300)
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, ranks, options)

    on_threads(ranks, make)
    on_threads(ranks, lambda rank: groups[rank].allreduce([torch.zeros(1)]).wait())
    found = sum((store.found for store in stores), Counter[str]())
    means = {name: number / ranks for name, number in found.items()}
    return {**means, "open sockets": (files() - before) / ranks}


def meet(nodes: int) -> dict[str, float]:
    """Let agents of nodes meet in a real rendezvous; return the means of a node."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    from torchtitan.resilience.rendezvous import Backend, Rendezvous

    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(nodes)]
    made = [
        Rendezvous.from_backend(
            *("run", store, Backend(store, "run"), nodes, nodes, "localhost"),
            RendezvousTimeout(timedelta(seconds=300), timedelta(seconds=30)),
        )
        for store in stores
    ]
    began = time.perf_counter()
    on_threads(nodes, lambda number: made[number].next_rendezvous())
    seconds = time.perf_counter() - began
    found = sum((store.found for store in stores), Counter[str]())
    state = stores[0].get("torchtitan.rendezvous.run")
    for each in made:
        each._stop_heartbeats()
    return {name: n / nodes for name, n in found.items()} | {"state": len(state), "wall": seconds}


def write_data(folder: Path) -> None:
    """Write documents, as JSON Lines."""
    folder.mkdir()
    lines = (json.dumps({"text": f"{n} " + "words " * 20}) for n in range(LINES))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def child(*words: str, **variables: str) -> Any:
    """Run this script in a process of its own, and return what it found."""
    command = [sys.executable, __file__, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def words(ranks: int, dump: Path, resume: str) -> list[str]:
    """Return the flags of a run."""
    shards = min(ranks, LOCAL)
    degrees = {"shard": shards, "replicate": ranks // shards}
    return [
        *(*FLAGS, "--data.dataset_path", str(dump.parent / "data"), "--data.lanes", str(LANES)),
        *("--training.global_batch_size", str(ranks), "--job.dump_folder", str(dump)),
        *("--checkpoint.resume", resume),
        *(
            w
            for k, n in degrees.items()
            for w in (f"--parallelism.data_parallel_{k}_degree", str(n))
        ),
    ]


def count(
    sizes: Sequence[int], package: Path = ROOT, resumes: Sequence[str] = ("auto", "must")
) -> list[dict[str, Any]]:
    """Count what rank 0 and a middle rank do when they start a new run and resume one."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        first = [*words(1, folder / "saved", "auto"), "--training.steps", "1"]
        run = [sys.executable, "-m", "torchtitan.train", RECIPE, *first]
        environment = os.environ | {"PYTHONPATH": str(package)}
        subprocess.run(run, check=True, capture_output=True, env=environment)
        for resume in resumes:
            for ranks in sizes:
                dump = folder / f"{resume}-{ranks}"
                if resume == "must":
                    leave_run(folder / "saved", dump, ranks)
                part = ["--part", *words(ranks, dump, resume), "--training.steps", "3"]
                for rank in (0, ranks // 2):
                    place = {"RANK": rank, "WORLD_SIZE": ranks, "PYTHONPATH": package}
                    place |= {"LOCAL_RANK": rank % LOCAL, "LOCAL_WORLD_SIZE": LOCAL}
                    one = child(*part, **{name: str(value) for name, value in place.items()})
                    found.append({"ranks": ranks, "rank": rank, "resume": resume, **one})
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def leave_run(saved: Path, dump: Path, ranks: int) -> None:
    """Leave what an earlier run of as many ranks leaves: a checkpoint, and a note of each rank."""
    shutil.copytree(saved, dump)
    (dump / "comm_traces").mkdir(exist_ok=True)
    for rank in range(ranks):
        (dump / "comm_traces" / f"{rank}.step").write_text("{}")


def sizes_of_index(ranks: Sequence[int]) -> dict[int, dict[str, float]]:
    """Save a checkpoint of real ranks; return the bytes that each rank reads whole to load it."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name) / "data")
        for size in ranks:
            dump = Path(name) / str(size)
            command = [
                sys.executable,
                "-m",
                "torchtitan",
                "train",
                RECIPE,
                "--processes",
                str(size),
            ]
            command += [*words(size, dump, "auto"), "--training.steps", "1"]
            subprocess.run(command, check=True, capture_output=True)
            (saved,) = (dump / "checkpoint").iterdir()
            files = ("manifest.json", "tensors.json", "train_state.json")
            found[size] = {file: float((saved / file).stat().st_size) for file in files}
    return found


def read_many_traces(ranks: int) -> float:
    """Return the processor seconds to read the notes of many ranks, as after a failure."""
    from torchtitan.flight_recorder import read_traces

    with tempfile.TemporaryDirectory() as name:
        for rank in range(ranks):
            (Path(name) / f"{rank}.step").write_text("{}")
        began = time.process_time()
        read_traces(Path(name))
        return time.process_time() - began


def earlier(sizes: Sequence[int], package: Path) -> dict[str, Any]:
    """Count the starts of an earlier version, and let it read few traces, as it is slow."""
    few, place = [n for n in sizes if n <= 1000], {"PYTHONPATH": str(package)}
    return {
        "starts": count(sizes, package),
        "traces": {n: child("--traces", str(n), **place) for n in few},
    }


def gather_seconds(ranks: int) -> float:
    """Return the processor seconds of a rank to gather None of many ranks, without the network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gathered(tensors: list[torch.Tensor], value: torch.Tensor, group: Any = None) -> None:
        for tensor in tensors:
            tensor.copy_(value)

    values: list[Any] = [None] * ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with mock.patch.object(dist.distributed_c10d, "all_gather", gathered):
            began = time.process_time()
            dist.all_gather_object(values, None)
            return time.process_time() - began
    finally:
        dist.destroy_process_group()


def measure(sizes: Sequence[int], threads: Sequence[int], large: Sequence[int]) -> dict[str, Any]:
    """Measure everything."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%d %B %Y"),
        "load": os.getloadavg()[0],
        "starts": count(sizes),
        "gloo": {n: {way: connect(n, way == "lazy") for way in ("full", "lazy")} for n in threads},
        "rendezvous": {n: meet(n) for n in threads},
        "large": {n: [child("--large", str(n), str(rank)) for rank in (0, n // 2)] for n in large},
        "index": sizes_of_index((1, 2, 4)),
        "traces": {n: child("--traces", str(n)) for n in sizes},
        "gather": {n: gather_seconds(n) for n in sizes},
    }


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *([shown(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def shown(value: object) -> str:
    """Return a number with few digits, and other values as they are."""
    if isinstance(value, float) and value < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


COUNTED = (
    *("files opened", "entries of folders", "broadcasts", "gathers on rank 0"),
    *("gathers on all ranks", "objects received", "bytes of objects", "reductions of flags"),
    *("their bytes", "bytes of tables", "groups", "ranks in groups"),
)


def starts_table(starts: Sequence[dict[str, Any]], resume: str, is_first: bool) -> list[str]:
    """Return the counts and the seconds of one rank's starts, by number of ranks."""
    chosen = [s for s in starts if s["resume"] == resume and (s["rank"] == 0) == is_first]
    rows: list[list[object]] = [[name, *(s.get(name, 0) for s in chosen)] for name in COUNTED]
    for stage in chosen[0]["stages"]:
        rows.append([f"{stage}, s", *(s["stages"][stage]["processor"] for s in chosen)])
    resident = [s["stages"]["first step"]["resident"] / 2**20 for s in chosen]
    rows.append(["memory of the process, MiB", *resident])
    return table(["ranks", *(f"{s['ranks']:,}" for s in chosen)], rows)


def page(found: dict[str, Any]) -> str:
    """Return the page of the numbers."""
    about = ("device", "torch", "python", "date")
    lines = [
        "# What grows with ranks at start",
        "",
        f"`{found['command']}` wrote this page and the numbers next to it ([scale]"
        "(../../docs/scale.md) says what they mean). Counts are exact; seconds are those of the "
        "processor, of one start each. "
        + ", ".join(f"{name} {found[name]}" for name in about)
        + f", load {found['load']:.0f}: other work ran beside it.",
        "",
    ]
    for title, starts in (("", found["starts"]), (", before", found["before"]["starts"])):
        for resume, kind in (("auto", "of a new run"), ("must", "of a resumed run")):
            for is_first, which in ((True, "rank 0"), (False, "a middle rank")):
                lines += [f"## Start {kind}, {which}{title}", ""]
                lines += starts_table(starts, resume, is_first)
    lines += ["## A group of gloo, and a reduction in it, on each rank", ""]
    keys = ("operations", "bytes read", "open sockets")
    head = ["ranks", *(f"{key}, {way}" for way in ("full", "lazy") for key in keys)]
    rows = [[int(n), *(g[way][k] for way in g for k in keys)] for n, g in found["gloo"].items()]
    lines += table(head, rows)
    lines += ["## A rendezvous, on each node", ""]
    head = ["nodes", "operations", "bytes read", "attempts to write", "bytes of the state"]
    keys = ("operations", "bytes read", "writes", "state")
    lines += table(head, [[int(n), *(m[k] for k in keys)] for n, m in found["rendezvous"].items()])
    lines += ["## Llama 3.1 405B: the groups of a rank, and its recording", ""]
    head = ["ranks", "rank", "groups", "their sizes", "processor seconds"]
    large = [
        [int(n), rank, len(one["groups"]), ", ".join(map(str, one["groups"])), one["processor"]]
        for n, ones in found["large"].items()
        for rank, one in zip((0, int(n) // 2), ones, strict=True)
    ]
    lines += table(head, large)
    lines += ["## Bytes of a checkpoint that each rank reads to load it", ""]
    files = list(next(iter(found["index"].values())))
    index = [[int(n), *(sizes[f] for f in files)] for n, sizes in found["index"].items()]
    lines += table(["ranks that saved", *files], index)
    lines += ["## Processor seconds", ""]
    before = found["before"]["traces"]
    head = ["ranks", "to read their notes", "before", "a gather of None on all ranks"]
    traces = found["traces"].items()
    rows = [[int(n), s, before.get(n, "-"), found["gather"][n]] for n, s in traces]
    return "\n".join([*lines, *table(head, rows)])


def main() -> None:
    """Measure, and write the numbers and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ranks of a start")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="ranks of gloo")
    parser.add_argument("--large", type=int, nargs="*", default=LARGE_SIZES)
    parser.add_argument("--before", type=Path, help="folder of an earlier version")
    parser.add_argument("--again", action="store_true", help="write the page from its numbers")
    help_text = "page; the numbers are next to it, as JSON"
    parser.add_argument("--output", type=Path, required=True, help=help_text)
    options = parser.parse_args()
    numbers = options.output.with_suffix(".json")
    if not options.again:
        found = measure(options.sizes, options.threads, options.large)
        if options.before:
            found["before"] = earlier(options.sizes[::2], options.before)
        numbers.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    options.output.write_text(page(json.loads(numbers.read_text())), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        take_part(sys.argv[2:])
    elif sys.argv[1:2] == ["--large"] and len(sys.argv) == 4:
        print(json.dumps(record_large(*map(int, sys.argv[2:]))))
    elif sys.argv[1:2] == ["--traces"]:
        print(json.dumps(read_many_traces(int(sys.argv[2]))))
    else:
        main()

"""What a save and a load cost a rank among thousands, on one machine and without them.

    python -m benchmarks.save_at_scale --ranks 1024 --model llama3_8b --json
    python -m benchmarks.save_at_scale --ranks 16384 --model llama3_405b --json
    python -m benchmarks.save_at_scale --page FOUND.jsonl

The writer, the commit and the reader of a rank run as in training. The model is laid out on tensors
without values (`plan.fake_rank` does the same), for one rank of each kind: those of a stage of the
pipeline hold the same in the same way, which is checked on the last one. What others send to rank 0
is made by the code that sends it, from what these hold. Files have their headers, and no data.
"""

import argparse
import datetime
import json
import math
import os
import pickle
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import trainer
from torchtitan.checkpoint import layout, saver
from torchtitan.checkpoint.layout import PlacedTensor, RankGroup, WritePlan, hash_of, items_of
from torchtitan.checkpoint.manifest import MANIFEST, STATE_FILE, File
from torchtitan.checkpoint.placement import Nodes
from torchtitan.checkpoint.ranges import Files, MappedFiles, Piece
from torchtitan.checkpoint.saver import Retention, Saver
from torchtitan.checkpoint.storage import SavedTensors, Written, arrange
from torchtitan.checks import load_job
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.local_ranks import run_ranks
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.parallel import World, allocate, build_on_meta, build_optimizers
from torchtitan.parallel.world import make_world
from torchtitan.timeline import Timeline
from torchtitan.torch_private.dtensor import is_dtensor, local_extent
from torchtitan.torch_private.fake_ranks import fake_process_group, hidden_shape_propagation
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from svg import INK, LINE, MUTED, Picture  # noqa: E402

RECIPES, RESULTS = ROOT / "train_configs", ROOT / "benchmarks/results"
COLORS = ("#0969da", "#cf222e", "#1a7f37")
DEGREES = {
    "llama3_8b": {},
    "llama3_405b": {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 16},
}
"""WritePlan by recipe; the other ranks are shards of FSDP."""
GROWTH = (64, 256, 1024, 4096, 16384)
RNG_BYTES = 5056
"""Bytes of the state of torch's generator on a CPU."""


def recipe(model: str, ranks: int) -> JobConfig:
    """Return the recipe of a model on so many ranks."""
    degrees = DEGREES[model]
    flags = [f"--parallelism.{key}={value}" for key, value in degrees.items()]
    stages = degrees.get("pipeline_parallel_degree", 1)
    flags += [f"--training.local_batch_size={stages}", "--training.global_batch_size=-1"]
    flags += ["--parallelism.pipeline_parallel_schedule=1F1B"] * (stages > 1)
    flags += ["--model.tokenizer_path=none", "--checkpoint.async_mode=async"]
    return load_job(RECIPES / f"{model}.toml", flags, ranks, "cpu").config


@contextmanager
def among(ranks: int, rank: int, job: JobConfig) -> Iterator[tuple[World, dict[str, Tensor]]]:
    """Be a rank among others that do not exist; yield its world, and the tensors that it saves."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as opened:
        opened.enter_context(fake_process_group(rank, ranks))
        opened.enter_context(hidden_shape_propagation())
        group: Any = dist.group.WORLD
        world = make_world(job.degrees(ranks), job.comm, Device("cpu"), group)
        args, planned = job.model_args(), job.layout(world.degrees)
        model = build_on_meta(job.model, args, planned, world, Timeline(world.device))
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, planned, world)
            spec = MODELS[job.model.name]
            optimizers = build_optimizers(job.optimizer, model, spec, args, job.compile)
            states = optimizers.state_dict()
            weights = {n: p for part in model.parts for n, p in part.state_dict().items()}
            own = torch.empty(RNG_BYTES, dtype=torch.uint8)
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in states.items()}
        yield world, tensors | {f"rng.{rank}.cpu": own}


class Kind(NamedTuple):
    """Ranks that hold the same in the same way."""

    ranks: range
    items: Mapping[str, PlacedTensor]


def kinds_of(job: JobConfig, ranks: int) -> list[Kind]:
    """Return the kinds of ranks of a layout, found on the first and the last rank of each stage."""
    of_stage = ranks // job.degrees(ranks).pp
    found = []
    for first in range(0, ranks, of_stage):
        with among(ranks, first, job) as (_, tensors):
            items = items_of(tensors, first)
        if first == 0:
            with among(ranks, of_stage - 1, job) as (_, tensors):
                assert hash_of(items_of(tensors, of_stage - 1)) == hash_of(items)
        found.append(Kind(range(first, first + of_stage), items))
    return found


class Inbox:
    """Messages of the other ranks to rank 0, in order, and how many bytes they are."""

    def __init__(self, kinds: list[Kind], size: int) -> None:
        self.kinds, self.size, self.bytes = kinds, size, 0
        self.rounds: Iterator[list[bytes]] = iter(())

    def first_save(self) -> None:
        """Expect what a first save gathers: hashes, the items of each kind, files."""
        hashes = [hash_of(kind.items) for kind in self.kinds for _ in kind.ranks]
        leaders = {kind.ranks[0]: kind.items for kind in self.kinds}
        items = [leaders.get(rank) for rank in range(self.size)]
        self.rounds = iter([*map(_pickled, (hashes, items)), self._files()])

    def next_save(self) -> None:
        """Expect what any other save gathers: files."""
        self.rounds = iter([self._files()])

    def _files(self) -> list[bytes]:
        rows = [
            Written(f"rank-{rank}.safetensors", File(2**30, f"{rank:032x}"), {"rng.*.cpu": rank})
            for rank in range(self.size)
        ]
        return _pickled(rows)

    def gather(self, value: Any) -> list[Any]:
        """Receive the messages of a round beside this rank's own."""
        _, *others = next(self.rounds)
        self.bytes += sum(map(len, others))
        return [value, *map(pickle.loads, others)]

    def reduce(self, tensor: Tensor, **_: Any) -> None:
        """Receive, in a ring, the sums so far and the whole sums."""
        self.bytes += 2 * tensor.nbytes


def _pickled(values: list[Any]) -> list[bytes]:
    return [pickle.dumps(value) for value in values]


def header_alone(file: Path, pieces: list[tuple[Piece, Tensor]]) -> Written:
    """Write a file that has its header and its size."""
    found = [piece for piece, _ in sorted(pieces, key=lambda pair: -pair[0].dtype.itemsize)]
    header = arrange(found)
    size = len(header) + sum(math.prod(p.sizes) * p.dtype.itemsize for p in found)
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(size)
    return Written(file.name, File(size, "0" * 32), {piece.name: 1 for piece in found})


@contextmanager
def alone(inbox: Inbox) -> Iterator[None]:
    """Have collectives of saves answered by what others would send."""
    with ExitStack() as opened:

        def replace(owner: Any, name: str, value: Any) -> None:
            opened.enter_context(mock.patch.object(owner, name, value))

        replace(dist, "new_group", lambda **_: dist.group.WORLD)
        replace(dist, "monitored_barrier", lambda *_: None)
        replace(dist, "all_reduce", inbox.reduce)
        for owner in (World, saver.SavingWorld):
            replace(owner, "gather_object", lambda _, value: inbox.gather(value))
            replace(owner, "broadcast_object", lambda _, value, source=0: value)
            replace(owner, "any", lambda _, flags: list(flags))
        replace(saver, "write_file", header_alone)
        replace(saver, "_read_back", lambda *_: ([], None))
        replace(saver.Staging, "begin", lambda _, pieces: lambda: pieces)
        yield


def save(
    job: JobConfig, kinds: list[Kind], ranks: int, folder: Path
) -> tuple[dict[str, Any], list[RankGroup]]:
    """Save twice as rank 0, and measure the second; the first also agrees on the groups."""
    found: dict[str, Any] = {}
    with among(ranks, 0, job) as (world, tensors):
        inbox = Inbox(kinds, ranks)
        with alone(inbox):
            made = Saver(job.checkpoint, folder, world, Retention(0))
            for step, (prefix, expect) in enumerate(
                {"first_": inbox.first_save, "": inbox.next_save}.items()
            ):
                expect()
                inbox.bytes = 0
                processor, began = time.process_time(), time.perf_counter()
                made.save(step, tensors, {"train_state": {"step": step}}, False)
                found[f"{prefix}rank0_stall_s"] = round(time.perf_counter() - began, 3)
                made.wait_until_idle()
                found[f"{prefix}rank0_cpu_s"] = round(time.process_time() - processor, 3)
                found[f"{prefix}gathered_bytes"] = inbox.bytes
            assert made.saved_step == 1, "the save failed"
            groups = made.layouts["all"].groups
    return found, groups


def load(
    job: JobConfig, groups: list[RankGroup], ranks: int, rank: int, folder: Path
) -> dict[str, Any]:
    """Find all that a rank loads on the same layout, in files that have headers alone."""

    def as_saved(*_: Any) -> list[RankGroup]:
        return groups

    def write(writer: int) -> list[tuple[str, Any, Any]]:
        """Write the file of a rank; return what it holds."""
        with (
            among(ranks, writer, job) as (world, tensors),
            mock.patch.object(layout, "agree_on_groups", as_saved),
        ):
            made = WritePlan(Nodes(world, [range(ranks)]), tensors)
            header_alone(folder / f"rank-{writer}.safetensors", made.pieces(tensors))
            return [
                (name, *(reversed(local_extent(t)) if is_dtensor(t) else (None, None)))
                for name, t in tensors.items()
            ]

    held = write(rank)
    opened: set[str] = set()
    read = 0

    def bytes_read(files: MappedFiles, name: str, begin: int, end: int) -> memoryview:
        nonlocal read
        read += end - begin
        opened.add(name)
        return files._map(name)[begin:end]

    def nothing(files: Files, place: Any, dtype: Any, strides: Any, at: Any, sizes: Any) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def find() -> None:
        saved = SavedTensors(folder)
        saved.shapes()
        for name, offsets, sizes in held:
            saved.read(name, offsets, sizes)

    with ExitStack() as opened_patches:
        for owner, name, value in ((MappedFiles, "read", bytes_read), (Files, "block", nothing)):
            opened_patches.enter_context(mock.patch.object(owner, name, value))
        while True:  # until all files are there that it reads
            try:
                find()
                break
            except Exception as error:
                missing = next((w for w in error.args if "rank-" in str(w)), None)
                if missing is None:
                    raise
                write(int(str(missing).partition("rank-")[2].partition(".")[0]))
        opened.clear()
        read, began = 0, time.process_time()
        find()
        seconds = time.process_time() - began
    small = sum((folder / name).stat().st_size for name in (MANIFEST, STATE_FILE))
    return {
        "load_cpu_s_per_rank": round(seconds, 3),
        "load_bytes_per_rank": read + small,
        "files_opened_per_rank": len(opened) + 2,
    }


SMALL = 64
"""Maximum number of values of a collective that is about numbers, and not about tensors."""


def count_step(folder: Path) -> dict[str, int]:
    """Train as one of two ranks; count the collectives of few values, and the files that change."""
    counts: Counter[str] = Counter()
    healthy, step_number = Trainer.step, 4

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            tensors = [each for each in arguments if isinstance(each, Tensor)]
            counts["scalar_collectives"] += all(each.numel() <= SMALL for each in tensors)
            return function(*arguments, **named)

        return counted

    def step(trainer: Trainer) -> None:
        if trainer.run.state.step + 1 != step_number:
            healthy(trainer)
            return
        before = files()
        with ExitStack() as opened:
            for name in ("all_reduce", "all_gather_object", "gather_object", "broadcast"):
                patch = mock.patch.object(dist, name, counting(getattr(dist, name)))
                opened.enter_context(patch)
            healthy(trainer)
        after = files()
        counts["step_shared_writes"] = sum(before.get(path) != at for path, at in after.items())

    words = [f"--job.dump_folder={folder}", "--training.steps=5", "--metrics.log_freq=100"]
    words += ["--parallelism.data_parallel_shard_degree=2", "--checkpoint.enable=false"]
    with mock.patch.object(Trainer, "step", step):
        status = trainer.main(["--job.config_file", str(RECIPES / "debug_model.toml"), *words])
    assert status == 0, "the run failed"
    return {name: counts[name] for name in ("step_shared_writes", "scalar_collectives")}


def measure(model: str, ranks: int) -> dict[str, Any]:
    """Return the figures of a model on so many ranks."""
    logger.setLevel("ERROR")
    began, job = time.monotonic(), recipe(model, ranks)
    kinds = kinds_of(job, ranks)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found, groups = save(job, kinds, ranks, folder)
        found |= load(job, groups, ranks, ranks // 2 + 1, folder / "step-1")
        found |= run_ranks(count_step, 2, folder / "run")[0]
    return {
        "ranks": ranks,
        "model": model,
        **found,
        "manifest_items": sum(len(group.items) for group in groups),
        "seconds": round(time.monotonic() - began, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


COLUMNS = {
    "rank0_cpu_s": "rank 0, processor s",
    "rank0_stall_s": "its main thread, s",
    "gathered_bytes": "it receives, bytes",
    "load_cpu_s_per_rank": "a load, processor s per rank",
    "load_bytes_per_rank": "index and headers, bytes per rank",
    "files_opened_per_rank": "files opened per rank",
}
PAGE = """# A save and a load among thousands of ranks

<!-- Written by benchmarks/save_at_scale.py. -->

The writer, the commit and the reader of one rank run as in training; the messages of the other
ranks are made by the code that sends them, and no data of tensors is written. Llama 3 8B under
FSDP on all ranks; 405B under TP 8, PP 16 and FSDP. *Rank 0*: all that it does for a save beyond
its own data, over both threads. *Its main thread*: how long training waits for it, without the
copy of its weights. *A load*: to find all that a rank holds, on the layout of the save, without
the data. The first save of a run also agrees on who holds what: at 1,024 ranks it receives {first}
bytes. Rows *with an index* are of the writer before, which gathered the pieces of all ranks, and
merged them into one index on the main thread.

`{command}`: {cores} cores, torch {torch}, {date}; the machine was shared, so that seconds are
upper bounds.

{table}

In a step of plain FSDP a rank changes {step_shared_writes} files of the run's folder, and takes
part in {scalar_collectives} collectives of at most {small} values.

![Bytes that rank 0 receives, and that a rank reads, by the number of ranks](save_at_scale.svg)
"""


def page(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the page of results, and its picture."""
    lines = [f"| model | ranks | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * 7]
    for row in rows:
        cells = (f"{row[key]:,}" for key in COLUMNS)
        lines.append(f"| {row['model']} | {row['ranks']:,} | {' | '.join(cells)} |")
    ours = [row for row in rows if "index" not in row["model"]]
    told = {key: ours[0][key] for key in ("step_shared_writes", "scalar_collectives")}
    text = PAGE.format(
        first=next(f"{r['first_gathered_bytes']:,}" for r in ours if r["ranks"] == 1024),
        command="python -m benchmarks.save_at_scale --ranks RANKS --model MODEL --json",
        cores=os.cpu_count(),
        torch=torch.__version__,
        date=datetime.date.today(),
        table="\n".join(lines),
        small=SMALL,
        **told,
    )
    return text, str(draw(rows))


def draw(rows: list[dict[str, Any]]) -> Picture:
    """Draw bytes by ranks, on logarithmic axes."""
    left, right, top, bottom = 70, 560, 20, 300
    about = "Bytes by ranks: received by rank 0, solid; read by each rank that loads, dashed."
    picture = Picture("Messages and reads of checkpoints", about, 780, bottom + 50)

    def place(ranks: int, count: int) -> tuple[float, float]:
        x = left + (right - left) * (math.log2(ranks) - 6) / 8
        return x, bottom - (bottom - top) * (math.log10(count) - 4) / 5

    for power in range(4, 10):
        _, y = place(64, 10**power)
        picture.line([(left, y), (right, y)], LINE, width=0.5)
        picture.text(left - 8, y + 4, f"10^{power}", "end", MUTED)
    for ranks in GROWTH:
        picture.text(place(ranks, 10**4)[0], bottom + 18, f"{ranks:,}", "middle", MUTED)
    picture.text((left + right) / 2, bottom + 38, "ranks", "middle", MUTED)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for number, (model, color) in enumerate(zip(models, COLORS, strict=False)):
        own = [row for row in rows if row["model"] == model]
        for key, dash in (("gathered_bytes", ""), ("load_bytes_per_rank", "4 3")):
            picture.line([place(row["ranks"], row[key]) for row in own], color, 2, dash)
            for row in own if len(own) == 1 else ():
                x, y = place(row["ranks"], row[key])
                picture.rect(x - 3, y - 3, 6, 6, color)
        y = top + 44 * number + 10
        picture.line([(right + 20, y), (right + 44, y)], color, width=2)
        picture.text(right + 50, y + 4, f"{model}: received", color=INK)
        picture.line([(right + 20, y + 20), (right + 44, y + 20)], color, dash="4 3")
        picture.text(right + 50, y + 24, "read", color=MUTED)
    return picture


def main() -> None:
    """Print the figures, or write the page of those that were printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--model", choices=DEGREES, default="llama3_8b")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--page", type=Path, help="write the page from a file of such objects")
    words = parser.parse_args()
    if words.page:
        rows = [json.loads(line) for line in words.page.read_text().splitlines()]
        text, picture = page(rows)
        (RESULTS / "save_at_scale.md").write_text(text)
        (RESULTS / "save_at_scale.svg").write_text(picture)
        return
    found = measure(words.model, words.ranks)
    if words.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()

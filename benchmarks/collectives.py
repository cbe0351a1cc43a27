"""What each layout sends in an optimizer step: counted, beside what the formulas say.

    python benchmarks/collectives.py --output benchmarks/results/collectives.md

Trains the debug model in each layout for two steps on gloo ranks of this machine, and counts what
the second one sends: collectives as torch's Flight Recorder remembers them, and messages where they
are handed to a process group, since gloo's recorder does not know those. The formulas are in
`torchtitan.estimate.traffic`; `tests/parallel/test_collectives.py` compares them with more layouts.
"""

import argparse
import importlib
import logging
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan.checks import load_job
from torchtitan.device import Device, pick
from torchtitan.estimate.traffic import of_step
from torchtitan.flight_recorder import Collective, recorded
from torchtitan.job import JobConfig
from torchtitan.local_ranks import run_ranks
from torchtitan.logging import logger
from torchtitan.parallel.work import Traffic
from torchtitan.tools.verify.measure import training

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
BATCH, SEQ_LEN = 8, 256
# Elements of the largest all-reduce that is about single numbers: losses, counts and the like.
SINGLE_NUMBERS = 6
SHARD, REPLICATE, TENSOR, CONTEXT, PIPELINE = (
    f"parallelism.{axis}_degree"
    for axis in (
        *("data_parallel_shard", "data_parallel_replicate"),
        *("tensor_parallel", "context_parallel", "pipeline_parallel"),
    )
)
RING = {"parallelism.context_parallel_rotate_method": "ring"}
INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}


def few_bits(bits: int, **ways: str) -> dict[str, Any]:
    """The keys of `[communication]` that send weights or gradients in few bits."""
    settings = {"bits": bits, "bucket": 256}
    return {
        f"communication.{what}.{key}": value
        for what, name in ways.items()
        for key, value in {"name": name, **settings}.items()
    }


def decoupled(name: str) -> dict[str, Any]:
    """The keys by which copies agree on a part of their momentum."""
    return {"communication.replicas.name": name, "training.max_norm": 0.0}


LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP 2": {REPLICATE: 2},
    "DDP 4": {REPLICATE: 4},
    "FSDP 2": {SHARD: 2},
    "FSDP 4": {SHARD: 4},
    "HSDP 2 x 2": {REPLICATE: 2, SHARD: 2},
    "TP 2": {TENSOR: 2},
    "TP 4": {TENSOR: 4},
    "CP 2": {CONTEXT: 2},
    "CP 4": {CONTEXT: 4},
    "CP 4, ring": {CONTEXT: 4, **RING},
    "PP 2": {PIPELINE: 2},
    "PP 4": {PIPELINE: 4},
    "PP 2, Interleaved1F1B": {PIPELINE: 2, **INTERLEAVED},
    "FSDP 2 x TP 2": {SHARD: 2, TENSOR: 2},
    "FSDP 2 x CP 2": {SHARD: 2, CONTEXT: 2},
    "FSDP 2 x PP 2": {SHARD: 2, PIPELINE: 2},
    "FSDP 2 x TP 2 x PP 2": {SHARD: 2, TENSOR: 2, PIPELINE: 2},
    "SimpleFSDP 4": {SHARD: 4, "sharding.name": "simple_fsdp"},
    "RTP 4": {SHARD: 4, "sharding.name": "rotated"},
    "LoCo 4, 8 bits": {SHARD: 4, **few_bits(8, gradients="loco")},
    "LoCo 4, 4 bits": {SHARD: 4, **few_bits(4, gradients="loco")},
    "QSDP 4, 8 bits": {SHARD: 4, **few_bits(8, weights="qsdp", gradients="qsdp")},
    "QSDP 4, 4 bits": {SHARD: 4, **few_bits(4, weights="qsdp", gradients="qsdp")},
    **{
        f"HSDP 2 x 2, {name}": {REPLICATE: 2, SHARD: 2, **decoupled(name)}
        for name in ("demo", "random", "striding", "slicing")
    },
    "HSDP 2 x 2, demo, LoCo, 4 bits": {
        REPLICATE: 2,
        SHARD: 2,
        **decoupled("demo"),
        **few_bits(4, gradients="loco"),
    },
}
"""Keys of a recipe that differ from one rank's."""


class Message(NamedTuple):
    """A collective, or a message that this rank sends."""

    ranks: tuple[int, ...]
    operation: str
    bytes: int
    """Of the whole, as in `Traffic`."""


class Counted(NamedTuple):
    """What one rank took part in during a step."""

    messages: Counter[Message]
    single_numbers: int
    """All-reduces of a few numbers, which are not in `messages`."""
    axes: dict[str, tuple[int, ...]]
    """The ranks of each axis."""
    expected: Counter[Message]
    """What the formulas say."""

    def exchanges_of_experts(self, messages: Counter[Message]) -> Counter[Message]:
        """The all-to-alls between ranks with different experts, among some messages."""
        group = self.axes.get("ep")
        is_one = {m: m.ranks == group and m.operation == "all_to_all" for m in messages}
        return Counter({m: count for m, count in messages.items() if is_one[m]})


def count(job: JobConfig) -> Counted:
    """On this rank, what the last step of `job` sends; TORCH_FR_BUFFER_SIZE was set before."""
    logger.setLevel(logging.ERROR)
    sends: list[Message] = []
    last, before = -1, 0
    with counting_sends(sends):
        for run, row in training(job, Device("cpu"), uneven=False):
            world = run.agree.world
            if row["step"] == job.training.steps - 1:
                last, before = recorded()[-1].number, len(sends)
    found = [collective for collective in recorded() if collective.number > last]
    is_single = [is_about_numbers(collective) for collective in found]
    groups = world.groups
    axes = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    expected: Counter[Message] = Counter()
    stage, mesh = dist.get_rank(groups["pp"]), world.parameter_mesh.mesh
    copy = dist.get_rank(groups["dp_replicate"])
    for name, ranks in {"sharing": mesh[stage], "shards": mesh[stage, copy], "all": mesh}.items():
        axes[name] = tuple(sorted(ranks.flatten().tolist()))
    in_backward = job.communication.replicas.in_backward
    place = axes["sharing" if in_backward else "shards"].index(dist.get_rank())
    for one in formulas(job, dist.get_world_size(), stage, place):
        expected[Message(members(one, axes, dist.get_rank()), one.operation, one.bytes)] += (
            one.count
        )
    counted = [message(c) for c, single in zip(found, is_single, strict=True) if not single]
    return Counted(Counter(counted + sends[before:]), sum(is_single), axes, expected)


def members(one: Traffic, axes: dict[str, tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """The ranks that take part in a collective with `rank`."""
    ranks = axes[one.axis]
    size = one.ranks or len(ranks)
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]


@contextmanager
def counting_sends(sends: list[Message]) -> Iterator[None]:
    """Note every message that this process sends meanwhile."""
    send = dist.ProcessGroup.send

    def noted(group: dist.ProcessGroup, tensors: list[torch.Tensor], *rest: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        sends.append(Message(ranks, "send", sum(tensor.nbytes for tensor in tensors)))
        return send(group, tensors, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", noted):
        yield


def is_about_numbers(collective: Collective) -> bool:
    """Whether it is of losses, counts and the like, or of a report, which is not of every step."""
    if collective.operation != "all_reduce":
        return False
    elements = sum(math.prod(shape.sizes) for shape in collective.inputs)
    return elements <= SINGLE_NUMBERS or collective.caller.endswith(("(table)", "(sum)"))


def message(collective: Collective) -> Message:
    """Gloo's records of what an all-gather ends with differ, so that follows from what it takes."""
    ranks = collective.group.ranks
    parts = len(ranks) if collective.operation == "all_gather" else 1
    return Message(ranks, collective.operation, collective.bytes_in * parts)


def formulas(job: JobConfig, ranks: int, stage_rank: int = 0, rank: int = 0) -> list[Traffic]:
    """What a step sends according to `torchtitan.estimate.traffic`."""
    return of_step(job.layout(job.degrees(ranks)), job.work(ranks), job.optimizer, stage_rank, rank)


def recipe(layout: dict[str, Any]) -> tuple[JobConfig, int]:
    """The debug recipe in a layout, with the same batch for all; and the number of ranks."""
    degrees = [layout.get(key, 1) for key in (REPLICATE, SHARD, TENSOR, CONTEXT, PIPELINE)]
    keys = {
        "training.local_batch_size": BATCH // math.prod(degrees[:2]),
        "training.global_batch_size": BATCH,
        "training.seq_len": SEQ_LEN,
        "training.steps": 2,
        "metrics.log_freq": 1,
        **layout,
    }
    flags = [f"--{key}={value}" for key, value in keys.items()]
    ranks = math.prod(degrees)
    return load_job(RECIPE, flags, ranks, "cpu").config, ranks


def rows(layout: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row of the table for each kind and size of message of rank 0."""
    job, ranks = recipe(layout)
    counted = run_ranks(count, ranks, job)[0]
    same: dict[Message, list[Traffic]] = {}
    for one in formulas(job, ranks):
        key = Message(members(one, counted.axes, 0), one.operation, one.bytes)
        same.setdefault(key, []).append(one)
    for message in same.keys() | counted.messages.keys():
        said = same.get(message, [])
        once = Traffic("", "", message.operation, message.bytes, counted.messages[message])
        yield (
            ", ".join(dict.fromkeys(one.axis for one in said)) or "?",
            ", ".join(dict.fromkeys(one.what for one in said)) or "?",
            message.operation.replace("_", "-"),
            f"{message.bytes:,}",
            str(sum(one.count for one in said)),
            str(counted.messages[message]),
            f"{once.sent(len(message.ranks)) / 1e6:.2f}",
        )


PAGE = """\
# What each layout sends in a step

<!-- Written by benchmarks/collectives.py. -->

Collectives of rank 0 in one optimizer step of the debug model, and the messages it sends: {batch}
sequences of {seq_len} tokens, float32, no recomputation. *Bytes* is the size of the whole of each,
*formula* and *counted* how many there are, *MB sent* what the rank sends for all of them around a
ring. In a pipeline rank 0 has the first stage. A dozen all-reduces of single numbers are left out.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

| layout | axis | what | operation | bytes | formula | counted | MB sent |
|---|---|---|---|---:|---:|---:|---:|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    # Torch reads it when a process group is made; the forked ranks have it from here.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    torch.set_num_threads(1)
    for module in ("tensor", "fsdp", "pipelining"):
        importlib.import_module(f"torch.distributed.{module}")
    lines = [
        f"| {' | '.join([name, *row])} |"
        for name in arguments.layouts
        for row in sorted(rows(LAYOUTS[name]))
    ]
    page = PAGE.format(
        batch=BATCH,
        seq_len=SEQ_LEN,
        command=" ".join(["python", "benchmarks/collectives.py", *sys.argv[1:]]),
        device=pick().name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        rows="\n".join(lines),
    )
    print(page)
    if arguments.output:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()

"""Tokens a second by every way to send, over a link slowed on purpose: where each begins to pay.

    python benchmarks/bandwidth.py --output benchmarks/results/bandwidth.md

The variants of `train_configs/studies/communication_debug.toml`, with a larger model, on four ranks
of this machine that stand for two nodes of two: what nodes send each other goes over `slow_link`,
and waits for its bytes; what ranks of a node send each other does not. All live in the same four
processes and take turns, a step each, and every other round goes backwards, so that a machine that
slows down slows all. Ratios are taken within a round.

A step takes about a + 8 b / bandwidth seconds, where a is what it takes without the link, and b the
bytes that a rank sends to the other node. So of two, the one that sends less and computes longer
begins to pay below 8 (b - b') / (a' - a) bits a second. The same formula says where that would be
on GPUs, for Llama 3 8B.
"""

import argparse
import importlib
import itertools
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from collectives import ROOT, formulas
from slow_link import NAME, Link, slowed

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.device import Device, peak_flops, pick
from torchtitan.job import JobConfig
from torchtitan.local_ranks import run_ranks
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import open_world
from torchtitan.tools.compare.prepare import prepare
from torchtitan.tools.compare.study import read_study
from torchtitan.trainer import Trainer

sys.path.insert(0, str(ROOT / "scripts"))

from svg import INK, LINE, MUTED, Picture

STUDY = ROOT / "train_configs/studies/communication_debug.toml"
LARGER = ("--model.dim=128", "--model.n_layers=2", "--model.ffn_dim=384", "--model.vocab_size=2048")
NODES, RANKS_PER_NODE = 2, 2
GIGABITS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
AGAINST = {"DeMo 2 x 2": "HSDP 2 x 2", "slicing 2 x 2": "HSDP 2 x 2"}
"""What a variant is compared with; the others with FSDP2."""
COLORS = ("#24292f", "#8c959f", "#8250df", "#9a6700", "#d1570a", "#1f6feb", "#0a3069", "#57606a")
COLORS += ("#1a7f37", "#bf3989")


class Measured(NamedTuple):
    """Of a variant."""

    tokens: int
    """Of a step, over all ranks."""
    bytes: float
    """That a rank sends to the other node in a step, of the rank that sends the most."""
    seconds: dict[str, list[float]]
    """Of a step in each round, by gigabits a second; "" without a link."""
    processor: list[float]
    """Seconds of processor time of the ranks in those steps, which others that use the machine do
    not change."""

    @property
    def computing(self) -> float:
        """Seconds of a step without the link, if the cores had nothing else to do."""
        return statistics.median(self.processor) / (os.cpu_count() or 1)


def train(jobs: Mapping[str, JobConfig], rounds: int, store: str) -> dict[str, Measured]:
    """One of the ranks."""
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.destroy_process_group()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Measured] = {}
    with slowed(Link(math.inf, ranks_per_node=RANKS_PER_NODE)) as link, ExitStack() as stack:
        files = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
        dist.init_process_group(NAME, store=files, rank=rank, world_size=ranks)
        sides: dict[str, Trainer] = {}
        for name, job in jobs.items():
            world = stack.enter_context(open_world(job.degrees(ranks), job.comm, Device("cpu")))
            run = build(job, world)
            stack.enter_context(closing(run.batches))
            stack.enter_context(run.meter)
            sides[name] = Trainer(run)
            sides[name].step()
            before = link.sent
            sides[name].step()
            sent = torch.tensor(link.sent - before)
            dist.all_reduce(sent, op=dist.ReduceOp.MAX)
            tokens = job.global_batch(job.degrees(ranks)) * job.training.seq_len
            found[name] = Measured(tokens, float(sent), {}, [])
        speeds = {"": math.inf} | {f"{gigabits:g}": 1e9 * gigabits for gigabits in GIGABITS}
        for number in range(rounds):
            order = 1 if number % 2 else -1
            for speed, bandwidth in list(speeds.items())[::order]:
                for name in list(sides)[::order]:
                    link.bandwidth = math.inf
                    dist.barrier()
                    link.bandwidth = bandwidth
                    begin, before = time.perf_counter(), time.process_time()
                    sides[name].step()
                    found[name].processor.append(time.process_time() - before)
                    dist.barrier()
                    seconds = time.perf_counter() - begin
                    found[name].seconds.setdefault(speed, []).append(seconds)
            if rank == 0:
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    # One for `run_ranks` to leave.
    alone = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Measured]:
    """All variants, on all ranks of this machine."""
    for module in ("tensor", "fsdp"):
        importlib.import_module(f"torch.distributed.{module}")
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for ready in prepare(read_study(STUDY, LARGER)):
            if arguments.only and ready.name not in arguments.only:
                continue
            job = ready.job
            changes: dict[str, Any] = {
                "job": job.job.model_copy(update={"dump_folder": f"{folder}/{len(jobs)}"}),
                "training": job.training.model_copy(update={"steps": 100_000}),
                "metrics": job.metrics.model_copy(update={"log_freq": 100_000}),
            }
            jobs[ready.name] = job.model_copy(update=changes)
        ranks = NODES * RANKS_PER_NODE
        found = run_ranks(train, ranks, jobs, arguments.rounds, f"{folder}/store")
    return {
        name: each._replace(
            processor=[
                sum(of_step) for of_step in zip(*(o[name].processor for o in found), strict=True)
            ]
        )
        for name, each in found[0].items()
    }


class Crossing(NamedTuple):
    """Gigabits a second below which a variant is the faster of two; None: at none, inf: at all."""

    measured: float | None
    formula: float | None


def crossing(mine: Measured, other: Measured) -> Crossing:
    """Measured: where the median ratio passes 1, between two bandwidths on a logarithmic scale."""
    ratios = [
        (math.log(float(speed)), math.log(ratio(mine, other, speed)))
        for speed in map("{:g}".format, GIGABITS)
    ]
    found: float | None = math.inf if ratios[-1][1] > 0 else None
    for (x, y), (next_x, next_y) in itertools.pairwise(ratios):
        if y > 0 >= next_y:
            found = math.exp(x + (next_x - x) * y / (y - next_y))
    return Crossing(found, begins(other.bytes - mine.bytes, mine.computing - other.computing))


def begins(saved: float, longer: float) -> float | None:
    """Gigabits a second below which sending `saved` bytes less pays for computing longer."""
    if saved <= 0:
        return None
    return math.inf if longer <= 0 else 8 * saved / longer / 1e9


def ratio(mine: Measured, other: Measured, speed: str) -> float:
    """Return the ratio of tokens/s: the median over the rounds."""
    pairs = zip(mine.seconds[speed], other.seconds[speed], strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


PAGE = """\
# Communication methods by bandwidth

<!-- Written by benchmarks/bandwidth.py. -->

Four ranks on gloo stand for two nodes of two. What nodes send each other goes over a link that
is slowed on purpose (`benchmarks/slow_link.py`): it waits for its bytes, and for nothing else. The
model has {parameters:.2f} million parameters, and a rank 2 sequences of 64 tokens. All four compute
on {cores} cores of a CPU, so steps and codes are far slower than a GPU's: **the bandwidths at which
a technique begins to pay are those of this machine.**

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.
The load average was {load}, and the ranks are four processes.

![Tokens a second by bandwidth]({plot})

*MB* is what a rank sends to the other node in a step, counted by the link. *Processor* is the
processor time of a step, of all ranks, in milliseconds; what others do on the machine hardly
changes it. The rest are tokens/s of all ranks, the median of {rounds} rounds, by bandwidth
in Gb/s; the last column is without a link.

| | MB | processor | {speeds} | none |
|---|---:|---:|{rules}
{rows}

## Break-even bandwidth

Below how many Gb/s it is faster than the other method. *Measured*: where the median ratio of
both in the same round passes 1 on this machine, where four ranks share {cores} cores; above 1 Gb/s
the link hardly matters, and a ratio near 1 passes it by chance. *By formula*:
8 (b - b') / (a' - a), with the bytes b of the table, and for the seconds a its processor time,
shared by {cores} cores that have nothing else to do. *Ratio*: that of the tokens/s at {slowest}
Gb/s, median and range over the rounds.

{crossings}
{predicted}"""
CROSSINGS = """\
| | against | measured | by formula | ratio at {slowest} Gb/s |
|---|---|---:|---:|---:|
{rows}
"""


def page(found: Mapping[str, Measured], about: Mapping[str, Any], plot: str) -> str:
    speeds = [f"{gigabits:g}" for gigabits in GIGABITS]
    rows = []
    for name, each in found.items():
        cells = [
            *(name, f"{each.bytes / 1e6:.3f}", f"{1000 * statistics.median(each.processor):,.0f}"),
            *(f"{each.tokens / statistics.median(each.seconds[s]):,.0f}" for s in (*speeds, "")),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return PAGE.format(
        **about,
        plot=plot,
        speeds=" | ".join(speeds),
        rules="---:|" * (len(speeds) + 1),
        slowest=speeds[0],
        rows="\n".join(rows),
        crossings=crossings(found),
        predicted=prediction(),
    )


def crossings(found: Mapping[str, Measured]) -> str:
    """The table of where each begins to pay."""
    rows, slowest = [], f"{GIGABITS[0]:g}"
    for name, each in found.items():
        against = AGAINST.get(name, "FSDP2")
        if name == against or against not in found:
            continue
        where, other = crossing(each, found[against]), found[against]
        pairs = zip(each.seconds[slowest], other.seconds[slowest], strict=True)
        ratios = sorted(theirs / ours for ours, theirs in pairs)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        cells = [name, against, in_gigabits(where.measured), in_gigabits(where.formula), spread]
        rows.append(f"| {' | '.join(cells)} |")
    return CROSSINGS.format(slowest=slowest, rows="\n".join(rows))


def in_gigabits(value: float | None) -> str:
    if value is None:
        return "nowhere"
    if value == math.inf:
        return "everywhere"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- what GPUs would do ---

RECIPE = ROOT / "train_configs/llama3_8b.toml"
ON_GPU = {"nodes": 2, "gpus": 8, "sequences": 1}
RANKS = ON_GPU["nodes"] * ON_GPU["gpus"]
GPU, MFU = "NVIDIA H100 80GB HBM3", 0.4
MEMORY, FLOAT32 = 3.35e12, 67e12
"""Of its data sheet: bytes, and operations in float32, a second."""
SHARDED = {"--parallelism.data_parallel_shard_degree": 16}
COPIED = {
    "--parallelism.data_parallel_replicate_degree": 2,
    "--parallelism.data_parallel_shard_degree": 8,
}


def few_bits(bits: int, **ways: str) -> dict[str, Any]:
    return SHARDED | {
        f"--communication.{what}.{key}": value
        for what, name in ways.items()
        for key, value in {"name": name, "bits": bits, "bucket": 256}.items()
    }


def decoupled(name: str) -> dict[str, Any]:
    signs = {"--training.max_norm": 0.0, "--optimizer.name": "SGD"}
    return COPIED | {"--communication.replicas.name": name} | signs


def loco(bits: int) -> float:
    """Seconds a number: the gradient is read, the error read and written; codes both ways."""
    return (4 + 1 + 1 + 2 * bits / 8 + 4 / RANKS) / MEMORY


def qsdp(bits: int) -> float:
    """Seconds a number: gradients as codes and back, and weights twice, in bfloat16."""
    gradients = 4 + 2 * bits / 8 + 4 / RANKS
    weights = bits / 8 + 2 + (4 + bits / 8) / RANKS
    return (gradients + 2 * weights) / MEMORY


def demo() -> float:
    """Seconds a number: three transforms of tiles of 64 x 64, each read and written."""
    return (3 * (2 * 2 * 64) / FLOAT32 + (12 + 3 * 8) / MEMORY) / ON_GPU["gpus"]


class OnGPUs(NamedTuple):
    keys: dict[str, Any]
    longer: float
    """Seconds that it computes longer for each parameter of the model, at the least."""


GPU_VARIANTS = {
    "FSDP2": OnGPUs(SHARDED, 0.0),
    "LoCo, 8 bits": OnGPUs(few_bits(8, gradients="loco"), loco(8)),
    "LoCo, 4 bits": OnGPUs(few_bits(4, gradients="loco"), loco(4)),
    "QSDP, 8 bits": OnGPUs(few_bits(8, weights="qsdp", gradients="qsdp"), qsdp(8)),
    "QSDP, 4 bits": OnGPUs(few_bits(4, weights="qsdp", gradients="qsdp"), qsdp(4)),
    "HSDP 2 x 8": OnGPUs(COPIED, 0.0),
    "DeMo 2 x 8": OnGPUs(decoupled("demo"), demo()),
    "slicing 2 x 8": OnGPUs(decoupled("slicing"), 16 / MEMORY / ON_GPU["gpus"]),
}
PREDICTED = """\
## On GPUs, by the formula

{nodes} nodes of {gpus} GPUs train Llama 3 8B, {tokens:,} tokens per GPU and step: weights are
gathered in bfloat16, gradients reduced in float32. **Nothing of that was measured.** *GB* is what a
GPU sends in a step on the axis that joins the nodes, by the formulas, around a ring, with a network
card of its own. Computing takes {compute:.2f} s, if 6 x {numbers:.2f} billion parameters x tokens
run at {mfu:.0%} of the {peak:.0f} TFLOP/s of an {gpu}. *Longer* is what writing and reading codes
adds at least: in one kernel that reads and writes everything once, at {memory:.2f} TB/s (DeMo's
transforms at {float32:.0f} TFLOP/s). Eager PyTorch makes many passes and takes a multiple of that,
which divides the next column by as much. It pays below 8 (b - b') / (a' - a) Gb/s if nothing is
sent while something is computed, and below 8 b / a' if as much as possible is.

| | against | GB | longer, ms | pays below, nothing overlaps | pays below, all overlaps |
|---|---|---:|---:|---:|---:|
{rows}
"""


def prediction() -> str:
    """The same formula for GPUs."""
    job = job_on_gpus(SHARDED)
    model = build_empty(MODELS[job.model.name].build, job.model_args(), job.training.seq_len)
    numbers = float(sum(parameter.numel() for parameter in model.parameters()))
    tokens, peak = ON_GPU["sequences"] * job.training.seq_len, peak_flops(GPU)
    assert peak is not None
    compute = 6 * numbers * tokens / (MFU * peak)
    sent = {name: between_nodes(job_on_gpus(each.keys)) for name, each in GPU_VARIANTS.items()}
    rows = []
    for name, each in GPU_VARIANTS.items():
        against = "FSDP2" if each.keys.items() >= SHARDED.items() else "HSDP 2 x 8"
        cells = [name, "", f"{sent[name] / 1e9:.3f}", "", "", ""]
        if against != name:
            more = each.longer * numbers
            alone = begins(sent[against] - sent[name], more)
            hidden = 8 * sent[against] / (compute + more) / 1e9
            cells[1:] = [
                against,
                cells[2],
                f"{1000 * more:.0f}",
                in_gigabits(alone),
                in_gigabits(hidden),
            ]
        rows.append(f"| {' | '.join(cells)} |")
    return PREDICTED.format(
        **ON_GPU,
        gpu=GPU,
        mfu=MFU,
        peak=peak / 1e12,
        memory=MEMORY / 1e12,
        float32=FLOAT32 / 1e12,
        tokens=tokens,
        compute=compute,
        numbers=numbers / 1e9,
        rows="\n".join(rows),
    )


def between_nodes(job: JobConfig) -> float:
    """Bytes that a GPU sends along the axis whose ranks are on both nodes."""
    degrees = job.degrees(RANKS)
    axis = "dp_replicate" if degrees.dp_replicate > 1 else "fsdp"
    ranks = degrees.dp_replicate if degrees.dp_replicate > 1 else degrees.fsdp
    return sum(one.sent(ranks) for one in formulas(job, RANKS) if one.axis == axis)


def small_model() -> torch.nn.Module:
    """What is trained here, on the meta device."""
    job = prepare(read_study(STUDY, LARGER))[0].job
    return build_empty(MODELS[job.model.name].build, job.model_args(), job.training.seq_len)


def job_on_gpus(keys: Mapping[str, Any]) -> JobConfig:
    flags = [f"{key}={value}" for key, value in keys.items()]
    batches = {"local": ON_GPU["sequences"], "global": RANKS * ON_GPU["sequences"]}
    flags += [f"--training.{scope}_batch_size={size}" for scope, size in batches.items()]
    return load_job(RECIPE, flags, RANKS, "cuda", exempt=("model.tokenizer_path",)).config


def draw(found: Mapping[str, Measured]) -> Picture:
    """Tokens a second by bandwidth, both on logarithmic scales."""
    width, height, left, right, top, bottom = 760, 440, 64, 560, 40, 390
    about = "Tokens a second against the bandwidth between nodes, a line for each way to send."
    picture = Picture("Tokens a second by bandwidth between nodes", about, width, height)
    speeds = [f"{gigabits:g}" for gigabits in GIGABITS]
    lines = {
        name: [each.tokens / statistics.median(each.seconds[speed]) for speed in speeds]
        for name, each in found.items()
    }
    low = 10 ** math.floor(math.log10(min(map(min, lines.values()))) * 1.0)
    high = 10 ** math.ceil(math.log10(max(map(max, lines.values()))))

    def x(speed: float) -> float:
        return left + (right - left) * math.log10(speed / GIGABITS[0]) / math.log10(
            GIGABITS[-1] / GIGABITS[0]
        )

    def y(value: float) -> float:
        return bottom - (bottom - top) * math.log10(value / low) / math.log10(high / low)

    for speed in GIGABITS:
        picture.line([(x(speed), top), (x(speed), bottom)], LINE, width=0.5)
        picture.text(x(speed), bottom + 18, f"{speed:g}", "middle")
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        for times in (1, 2, 5):
            if (value := times * 10**power) <= high:
                picture.line([(left, y(value)), (right, y(value))], LINE, width=0.5)
                picture.text(left - 8, y(value) + 4, f"{value:,}", "end")
    picture.text((left + right) / 2, bottom + 38, "Gb/s between nodes", "middle", MUTED)
    picture.text(left, 24, "tokens/s, all ranks", color=MUTED)
    for number, (name, values) in enumerate(lines.items()):
        color, dash = COLORS[number % len(COLORS)], ("", "6 3", "2 2")[number % 3]
        points = [(x(speed), y(value)) for speed, value in zip(GIGABITS, values, strict=True)]
        picture.line(points, color, width=2, dash=dash)
        at = top + 14 + 22 * number
        picture.line([(right + 20, at - 4), (right + 56, at - 4)], color, width=2, dash=dash)
        picture.text(right + 64, at, name, color=INK)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="steps of each at each bandwidth")
    parser.add_argument("--only", nargs="+", help="names of variants; absent: all")
    parser.add_argument("--output", type=Path, help="file for the page; beside it numbers and plot")
    parser.add_argument("--again", action="store_true", help="from the numbers that are kept there")
    arguments = parser.parse_args()
    if arguments.again:
        kept = json.loads(arguments.output.with_suffix(".json").read_text())
        found = {name: Measured(**each) for name, each in kept["measured"].items()}
        write(found, kept["about"], arguments.output)
        return
    begin = time.time()
    found = measure(arguments)
    about = {
        "command": " ".join(["python", "benchmarks/bandwidth.py", *sys.argv[1:]]),
        "parameters": sum(p.numel() for p in small_model().parameters()) / 1e6,
        "device": pick().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": f"{os.getloadavg()[0]:.0f}",
        "rounds": arguments.rounds,
    }
    print(f"{time.time() - begin:.0f} s", file=sys.stderr)
    write(found, about, arguments.output)


def write(found: Mapping[str, Measured], about: Mapping[str, Any], output: Path | None) -> None:
    """Write the page, its plot and its numbers."""
    plot = output.with_suffix(".svg").name if output else "bandwidth.svg"
    text = page(found, about, plot)
    print(text)
    if output:
        output.write_text(text)
        output.with_suffix(".svg").write_text(str(draw(found)))
        kept = {"about": about, "measured": {k: v._asdict() for k, v in found.items()}}
        output.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What our trainer costs over the shortest hand-written PyTorch loop of the same mathematics.

    python benchmarks/overhead.py            # one process
    python benchmarks/overhead.py --ranks 2  # FSDP2 on two
    python benchmarks/overhead.py --metrics  # what reporting costs, with every sink
    python benchmarks/overhead.py --wait --ranks 2  # what the host waits before the optimizer

Both sides train the debug model from the same first weights on the same batches, 2,048 tokens a
step, with clipping, fused AdamW and a learning rate schedule, without activation checkpointing.
Ours reads, packs and prefetches the text, and does all that a run does in a step: sums token
counts and losses over ranks, checks that they are finite, listens for signals, measures, writes
metrics.jsonl. The hand-written loop (by_hand.py) has its batches in memory and prints a loss every
ten steps.

Speed: both live in one process and take turns, a block of steps each; the ratio is taken block by
block, so that a machine that slows down slows both. Start and memory, on one process: each side in
fresh processes of its own, in turns; ours is the command a user types.

Reporting: the same trainer twice, with every sink (metrics.jsonl, the event log, TensorBoard,
Weights & Biases offline, the console) and with a meter that does nothing. They take turns as above,
but what is asked for is smaller than the noise of most machines. So the processor time is counted
too, of the calls themselves and of the threads and processes that the sinks started.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from by_hand import BATCH, SEQ_LEN, make_step
from processor_time import NoMeter, Spent, processor_of_children, processor_of_threads

from torchtitan.build import Run, build
from torchtitan.checks import load_job
from torchtitan.device import pick
from torchtitan.logging import configure
from torchtitan.parallel import open_world
from torchtitan.step import StepStatus
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
Step = Callable[[], None]


def flags(folder: str, ranks: int, steps: int) -> list[str]:
    """The debug recipe without saving and validating; the same tokens a step on any ranks."""
    text = f"""--job.dump_folder {folder} --no-checkpoint.enable --no-validation.enable
        --no-data.report_unigram_loss --training.seq_len {SEQ_LEN} --training.steps {steps}
        --training.local_batch_size {BATCH // ranks} --training.global_batch_size {BATCH}"""
    return text.split()


@contextmanager
def ours(run: Run) -> Iterator[Step]:
    """A step of the trainer, with everything around it that is live in a run."""
    with closing(run.batches), run.session():
        trainer = Trainer(run)

        def step() -> None:
            trainer.step()
            run.after_step()

        yield step


def read_batches(run: Run, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first batches of a run, in memory; its position is put back."""
    batches = [batch for _ in range(count) for batch in next(run.batches)[0]]
    return [(batch.tokens, batch.targets) for batch in batches]


def take_turns(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step of each side, block by block."""
    seconds: dict[str, list[float]] = {"ours": [], "by hand": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        words = flags(folder, arguments.ranks, 100_000)
        job = load_job(RECIPE, words, arguments.ranks, pick().type).config
        world = stack.enter_context(open_world(job.degrees(arguments.ranks), job.comm))
        reader = build(job, world)
        with closing(reader.batches):
            batches = read_batches(reader, 64)
        steps = {
            "ours": stack.enter_context(ours(build(job, world))),
            "by hand": make_step(batches, arguments.ranks, world.device.type),
        }
        for _ in range(arguments.warmup):
            for step in steps.values():
                step()
        for block in range(arguments.blocks):
            # Who goes first alternates, so that a trend favours neither.
            for name in list(steps)[:: 1 if block % 2 else -1]:
                dist.barrier()
                world.device.synchronize()
                begin = time.perf_counter()
                for _ in range(arguments.steps):
                    steps[name]()
                world.device.synchronize()
                dist.barrier()
                seconds[name].append((time.perf_counter() - begin) / arguments.steps)
    return seconds


def profile_step(steps: int = 20) -> dict[str, float]:
    """Milliseconds of a step of ours, and of the mathematics in it, under Python's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(RECIPE, flags(folder, 1, 100_000), 1, pick().type).config
        with open_world(job.degrees(1), job.comm) as world, ours(build(job, world)) as step:
            for _ in range(5):
                step()
            with cProfile.Profile() as profile:
                for _ in range(steps):
                    step()
    seconds: dict[str, float] = {}
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        seconds["/".join([*Path(file).parts[-2:], name])] = cumulative
    total = seconds["torchtitan/trainer.py/step"]
    parts = {
        "forward and backward": seconds["parallel/parallel_model.py/forward_backward"],
        "clipping and optimizer": seconds["optim/optimizer_group.py/clip"]
        + seconds["optim/optimizer_group.py/step"],
    }
    parts["everything else"] = total - sum(parts.values())
    return {name: round(1000 * value / steps, 2) for name, value in parts.items()}


def reporting(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the metrics path costs: the ratio of both sides, and its own processor time."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    seconds: dict[str, list[float]] = {"all sinks": [], "no meter": []}
    costs: dict[str, list[float]] = {"calls": [], "calls, wall": [], "threads": [], "processes": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        words = [
            *flags(folder, 1, 100_000),
            "--metrics.enable_tensorboard",
            "--metrics.enable_wandb",
        ]
        # A block holds one report.
        words += ["--metrics.log_freq", str(arguments.steps)]
        job = load_job(RECIPE, words, 1, pick().type).config
        configure()
        world = stack.enter_context(open_world(job.degrees(1), job.comm))
        watched = build(job, world)
        # Two runs cannot have one event log and one metrics.jsonl, and this one has none of them.
        silent: Any = SimpleNamespace(before_step=lambda: None, after_step=lambda step: None)
        with (
            mock.patch("torchtitan.build.Meter", return_value=NoMeter()),
            mock.patch("torchtitan.build.Startup", return_value=silent),
        ):
            bare = build(job, world)
        bare.timeline._note = lambda: None  # type: ignore[method-assign]
        spent, before = Spent(), set(threading.enumerate())
        spent.watch(watched.meter, "end_step")
        spent.watch(watched.timeline, "_note")
        steps = {
            "no meter": stack.enter_context(ours(bare)),
            "all sinks": stack.enter_context(ours(watched)),
        }
        threads = set(threading.enumerate()) - before

        def now() -> list[float]:
            others = processor_of_threads(threads), processor_of_children()
            return [spent.processor, spent.wall, *others]

        for block in range(-1, arguments.blocks):
            for name in list(steps)[:: 1 if block % 2 else -1]:
                costs_before, begin = now(), time.perf_counter()
                for _ in range(arguments.steps):
                    steps[name]()
                taken = (time.perf_counter() - begin) / arguments.steps
                if block >= 0:  # the first of each warms up
                    seconds[name].append(taken)
                if block >= 0 and name == "all sinks":
                    for kind, then, at in zip(costs, costs_before, now(), strict=True):
                        costs[kind].append(1000 * (at - then) / arguments.steps)
    # The shortest, as a busy machine makes steps longer, but not the processor time in them.
    shortest = 1000 * min(min(values) for values in seconds.values())
    pairs = zip(seconds["no meter"], seconds["all sinks"], strict=True)
    in_process = [a + b for a, b in zip(costs["calls"], costs["threads"], strict=True)]
    return {
        "what": "ratio: steps per second, all sinks / no meter, block by block; "
        "percent: processor time of calls and threads, of the time of a step in the fastest block",
        "ratio": spread([none / every for none, every in pairs]),
        "percent_of_step": spread([100 * cost / shortest for cost in in_process]),
        "milliseconds_of_step": {
            "fastest block": round(shortest, 1),
            **{name: spread([1000 * v for v in values]) for name, values in seconds.items()},
        },
        "milliseconds_a_step": {name: spread(values) for name, values in costs.items()},
        "blocks": arguments.blocks,
        "steps_per_block": arguments.steps,
        "load_average": os.getloadavg(),
    }


def wait_for_status(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step, and of it from the end of the backward to the decision on the update.

    Of the host, which waits for the device and the other ranks; on CUDA also of the device, which
    does nothing until the host has read the status.
    """
    seconds: dict[str, list[float]] = {"step": [], "host": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        words = flags(folder, arguments.ranks, 100_000)
        job = load_job(RECIPE, words, arguments.ranks, pick().type).config
        world = stack.enter_context(open_world(job.degrees(arguments.ranks), job.comm))
        run = build(job, world)
        agree, is_cuda = run.agree, world.device.type == "cuda"

        def timed(*given: Any) -> StepStatus:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_cuda)]
            for mark in marks[:1]:
                mark.record()
            begin = time.perf_counter()
            status = agree(*given)
            seconds["host"].append(time.perf_counter() - begin)
            for mark in marks[1:]:
                mark.record()
                mark.synchronize()
                seconds.setdefault("device", []).append(marks[0].elapsed_time(mark) / 1000)
            return status

        stack.enter_context(mock.patch.object(run, "agree", timed))
        step = stack.enter_context(ours(run))
        for _ in range(arguments.warmup + arguments.blocks * arguments.steps):
            begin = time.perf_counter()
            step()
            seconds["step"].append(time.perf_counter() - begin)
    return {name: values[arguments.warmup :] for name, values in seconds.items()}


def run_ranks(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """`take_turns` or `wait_for_status` on every rank, each in a process; what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, __file__, "--report", str(report), *sys.argv[1:]]
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        processes = []
        for rank in range(arguments.ranks):
            environment = dict(os.environ)
            if arguments.ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                environment |= {"WORLD_SIZE": str(arguments.ranks), "MASTER_PORT": port}
                environment |= {"MASTER_ADDR": "localhost"}
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        for process in processes:
            assert process.wait() == 0, f"a rank ended with status {process.returncode}"
        return json.loads(report.read_text())  # type: ignore[no-any-return]


def start_ours() -> dict[str, float]:
    """Launch the command a user types; when its first step was done, and its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", str(RECIPE)]
        subprocess.run([*command, *flags(folder, 1, 11)], check=True, stderr=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        return {"first_step_s": rows[0]["time"] - begin, "memory_gib": rows[-1]["memory_gib"]}


def start_by_hand() -> dict[str, float]:
    """Launch the hand-written loop."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(Path(__file__).with_name("by_hand.py")), str(report)]
        begin = time.time()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        found = json.loads(report.read_text())
        return {"first_step_s": found["first_step"] - begin, "memory_gib": found["memory_gib"]}


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="1, or FSDP2 on this many")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each side")
    parser.add_argument("--steps", type=int, help="steps in a block; absent: 5, --metrics: 10")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each side, not counted")
    parser.add_argument("--starts", type=int, default=5, help="fresh starts of each side")
    parser.add_argument("--profile", action="store_true", help="where our step's time goes")
    parser.add_argument("--metrics", action="store_true", help="what reporting costs")
    parser.add_argument("--wait", action="store_true", help="the wait before the optimizer")
    parser.add_argument("--output", type=Path, help="file for the result")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (10 if arguments.metrics else 5)
    if arguments.report:
        measured = wait_for_status(arguments) if arguments.wait else take_turns(arguments)
        if os.environ.get("RANK", "0") == "0":
            arguments.report.write_text(json.dumps(measured))
        return

    if arguments.profile:
        result = {"milliseconds_of_our_step": profile_step(), **about(arguments)}
    elif arguments.metrics:
        result = {**reporting(arguments), **about(arguments)}
    elif arguments.wait:
        waits = {name: [1000 * v for v in each] for name, each in run_ranks(arguments).items()}
        result = {"milliseconds": {name: spread(each) for name, each in waits.items()}}
        result |= about(arguments)
    else:
        result = compare(arguments)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Speed of both sides and, on one rank, their start and memory."""
    seconds = run_ranks(arguments)
    tokens = BATCH * SEQ_LEN
    pairs = zip(seconds["ours"], seconds["by hand"], strict=True)
    result: dict[str, Any] = {
        "what": "ratio: tokens per second, ours / by hand, block by block",
        "ratio": spread([hand / our for our, hand in pairs]),
        "tokens_per_second": {
            name: spread([tokens / value for value in values]) for name, values in seconds.items()
        },
    }
    if arguments.ranks == 1:
        starts: dict[str, list[dict[str, float]]] = {"ours": [], "by hand": []}
        for _ in range(arguments.starts):
            starts["ours"].append(start_ours())
            starts["by hand"].append(start_by_hand())
        for key in ("first_step_s", "memory_gib"):
            result[key] = {
                name: spread([one[key] for one in found]) for name, found in starts.items()
            }
    sizes = {"blocks": arguments.blocks, "steps_per_block": arguments.steps}
    return {**result, **sizes, **about(arguments)}


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on."""
    return {
        "tokens_per_step": BATCH * SEQ_LEN,
        "ranks": arguments.ranks,
        "command": " ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]]),
        "device": pick().name,
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads() if arguments.ranks == 1 else 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()

"""Saving and loading, beside what the same disk does with the same bytes.

    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint.md

One process trains a model whose state, weights and Adam's two moments in float32, is about a
gigabyte. Saves of that state take turns with `dcp.save`, `torch.save`, and a plain `write` of the
same bytes, each with an `fsync`; loads likewise, from files that the kernel was told to forget. The
ratio is to the plain write or read, round by round, so that a disk that slows down slows all.

Then blocks of steps with an asynchronous save at their begin take turns with blocks without.
"""

import argparse
import dataclasses
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from quoted import write_section
from torch import Tensor

from torchtitan.build import Run, build
from torchtitan.checkpoint.folder import saved_steps
from torchtitan.checkpoint.manifest import problems_of_files, read_manifest
from torchtitan.checkpoint.placement import load_into
from torchtitan.checkpoint.start import ResumePoint
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.device import Device, pick
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.models.llama3 import LLAMA3
from torchtitan.parallel import open_world
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
SIZES = {"small": (2, 64), "middle": (8, 384), "large": (12, 768)}
"""Layers and dim."""
FLAVORS = {
    size: dataclasses.replace(
        LLAMA3.flavors["debugmodel"], n_layers=layers, dim=dim, ffn_dim=4 * dim
    )
    for size, (layers, dim) in SIZES.items()
}
# Known to every process that imports this, by `job.imports`.
MODELS["measured"] = dataclasses.replace(LLAMA3, name="measured", flavors=FLAVORS)
Times = dict[str, list[float]]
RAW_WRITE, RAW_READ = "write and fsync", "read"


def recipe(size: str, folder: Path) -> list[str]:
    """Flags of the runs here."""
    words = f"""--model.name=measured --model.flavor={size} --job.dump_folder={folder}
        --training.local_batch_size=2 --training.global_batch_size=2 --training.seq_len=256
        --checkpoint.keep_latest_k=0 --no-validation.enable --no-data.report_unigram_loss
        --metrics.log_freq=1000000"""
    return words.split()


@contextmanager
def running(size: str, folder: Path, mode: str) -> Iterator[Run]:
    """A run whose state has been made by a step."""
    flags = [*recipe(size, folder), f"--checkpoint.async_mode={mode}", "--training.steps=1000000"]
    flags.append("--checkpoint.enable")
    job = load_job(RECIPE, flags, 1, "cpu").config
    with open_world(job.degrees(1), job.comm, Device("cpu")) as world:
        run = build(job, world)
        with closing(run.batches), run.meter:
            Trainer(run).step()
            yield run


def tensors_of(run: Run) -> dict[str, Tensor]:
    """What a checkpoint of the run holds, by the names that it has there."""
    weights = {n: p for part in run.model.parts for n, p in part.state_dict().items()}
    states = {f"optimizer.{name}": t for name, t in run.optimizers.inner.state_dict().items()}
    return {f"model.{name}": weight for name, weight in weights.items()} | states


def raw_write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())


def torch_save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(dict(tensors), file)
        file.flush()
        os.fsync(file.fileno())


def our_save(run: Run) -> None:
    run.state.step += 1
    run.checkpoint.save(finished=False)


def raw_read(path: Path) -> None:
    block = bytearray(8 * 2**20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def torch_load(path: Path, tensors: Mapping[str, Tensor]) -> None:
    found = torch.load(path)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def our_load(path: Path, tensors: Mapping[str, Tensor]) -> None:
    load_into(tensors, SavedTensors(path))


def verification(path: Path) -> None:
    assert not list(problems_of_files(path, read_manifest(path)))


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def forget(path: Path) -> None:
    """Have the kernel drop what it keeps of the files in memory."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def saves_and_loads(run: Run, folder: Path, rounds: int) -> tuple[Times, Times, int]:
    """Seconds of each way, in turns; and the bytes."""
    tensors = tensors_of(run)
    raw, pickled, planned = folder / "raw", folder / "pickled", folder / "planned"

    def ours() -> Path:
        steps = saved_steps(folder / "checkpoint")
        return steps[max(steps)]

    def dcp_save() -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(planned, overwrite=True))

    def dcp_load() -> None:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(planned))

    def whole_load() -> None:
        run.checkpoint.load(ResumePoint(ours(), is_resume=True))

    saving: dict[str, Callable[[], None]] = {
        RAW_WRITE: lambda: raw_write(raw, tensors),
        "torch.save and fsync": lambda: torch_save(pickled, tensors),
        "dcp.save": dcp_save,
        "ours, with hashes": lambda: our_save(run),
    }
    loading: dict[str, tuple[Callable[[], Path], Callable[[], None]]] = {
        RAW_READ: (lambda: raw, lambda: raw_read(raw)),
        "torch.load": (lambda: pickled, lambda: torch_load(pickled, tensors)),
        "dcp.load": (lambda: planned, dcp_load),
        "ours, without verification": (ours, lambda: our_load(ours(), tensors)),
        "ours, verification alone": (ours, lambda: verification(ours())),
        "ours, verified": (ours, whole_load),
    }
    saved: Times = {name: [] for name in saving}
    loaded: Times = {name: [] for name in loading}
    for number in range(rounds):
        turn = 1 if number % 2 else -1
        for name in list(saving)[::turn]:
            saved[name].append(timed(saving[name]))
            run.checkpoint.finish()  # reads back what was written, outside of the clock
        for name in list(loading)[::turn]:
            path, action = loading[name]
            # A virtual disk may have in its host's memory what was read lately: give all the same.
            for file in files_of(path()):
                raw_read(file)
            forget(path())
            loaded[name].append(timed(action))
        for step, path in list(saved_steps(folder / "checkpoint").items())[:-1]:
            assert step
            shutil.rmtree(path)
    return saved, loaded, sum(tensor.nbytes for tensor in tensors.values())


def stalls(run: Run, folder: Path, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """For each round: what a save takes from training, in steps: by waiting, and in all.

    A step is that of the round's block without a save.
    """
    trainer = Trainer(run)
    waited, slowed = [], []
    for number in range(rounds):
        seconds = {}
        for with_save in (True, False)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            waits = 0.0
            if with_save:
                run.checkpoint.save(finished=False)
                waits = time.perf_counter() - begin
            for _ in range(steps):
                before = staged(run)
                trainer.step()
                waits += staged(run) - before
            seconds[with_save] = time.perf_counter() - begin
            if with_save:
                waited.append(waits)
            run.checkpoint.finish()
            for path in saved_steps(folder / "checkpoint").values():
                shutil.rmtree(path)
        a_step = seconds[False] / steps
        waited[-1] /= a_step
        slowed.append((seconds[True] - seconds[False]) / a_step)
    return waited, slowed


def staged(run: Run) -> float:
    """Seconds that updates have waited for copies."""
    return run.checkpoint.saver.staging.waited


def starts(size: str, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a launch that trains one step: afresh, and resumed from a checkpoint."""

    def launch(name: str, steps: int, *more: str) -> float:
        words = [*recipe(size, folder / name), f"--training.steps={steps}", *more]
        command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", str(RECIPE)]
        # Of the measuring checkout: the measured one may know other sizes.
        imports = ["--job.imports", Path(__file__).stem]
        path = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, *words, *imports], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return time.perf_counter() - begin

    launch("resumed", 1, "--checkpoint.enable")
    fresh, resumed = [], []
    for number in range(rounds):
        for is_resumed in (True, False)[:: 1 if number % 2 else -1]:
            if is_resumed:
                resumed.append(
                    launch("resumed", 2, "--checkpoint.enable", "--checkpoint.load_only")
                )
            else:
                fresh.append(launch(f"fresh-{number}", 1))
    return fresh, resumed


def spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


PAGE = """\
## Saving and loading

<!-- Written by benchmarks/checkpoint.py. -->

{megabytes:,.0f} MB: weights and Adam's moments, float32, one process, one thread. *MB/s* and
*ratio* to a plain write or read of as many bytes, round by round: median (quartiles) of {rounds}
rounds. All saves end with an fsync. Before each load its files were read once, and then dropped
from the kernel's memory.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

| save | MB/s | ratio |
|---|---:|---:|
{saves}

| load | MB/s | ratio |
|---|---:|---:|
{loads}

Of the loads only those of ours can be compared with each other, as they read the same files: on a
virtual disk one file may be read twice as fast as another of as many bytes, and a ratio above 1 is
a sign of that.
"""
STALLS = """
An asynchronous save, in steps of {step:.2f} s, median (quartiles) of {blocks} blocks of {steps}
steps:

| what it takes from training | steps |
|---|---:|
| waiting: the call, and updates that wait for the copy | {waited} |
| in all, with the thread that copies, hashes and writes beside it on a core of its own | {slowed} |
"""
STARTS = """
A launch that trains one step, seconds, median (quartiles) of {starts} each, in turns:

| | seconds |
|---|---:|
| from first weights | {fresh} |
| resumed: verify and load {megabytes:,.0f} MB | {resumed} |
"""


def table(times: Times, first: str, size: int) -> str:
    rows = []
    for name, seconds in times.items():
        speed = [size / 1e6 / second for second in seconds]
        ratio = [raw / second for raw, second in zip(times[first], seconds, strict=True)]
        rows.append(f"| {name} | {spread(speed, 0)} | {spread(ratio)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rounds", type=int, default=9, help="of each way to save and load")
    parser.add_argument(
        "--blocks", type=int, default=9, help="with an asynchronous save each; or 0"
    )
    parser.add_argument("--steps", type=int, default=4, help="in a block")
    parser.add_argument(
        "--starts", type=int, default=5, help="launches afresh, and as many resumed; or 0"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; absent: temporary")
    parser.add_argument("--quick", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--output", type=Path, help="file for the tables")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.blocks, arguments.steps = "small", 2, 2, 1
        arguments.starts = 2
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        with running(arguments.size, Path(name) / "sync", "disabled") as run:
            saved, loaded, size = saves_and_loads(run, Path(name) / "sync", arguments.rounds)
        saves, loads = table(saved, RAW_WRITE, size), table(loaded, RAW_READ, size)
        counts = {"megabytes": size / 1e6, "rounds": arguments.rounds}
        page = PAGE.format(saves=saves, loads=loads, **counts, **facts())
        if (blocks := arguments.blocks) and (steps := arguments.steps):
            with running(arguments.size, Path(name) / "async", "async") as run:
                times = [timed(lambda: Trainer(run).step() and None) for _ in range(3)]
                found = map(spread, stalls(run, Path(name) / "async", blocks, steps))
            took = dict(zip(("waited", "slowed"), found, strict=True))
            step = statistics.median(times)
            page += STALLS.format(step=step, blocks=blocks, steps=steps, **took)
        if count := arguments.starts:
            fresh, resumed = map(spread, starts(arguments.size, Path(name), count))
            page += STARTS.format(fresh=fresh, resumed=resumed, starts=count, **counts)
    print(page)
    if arguments.output:
        write_section(arguments.output, page)


def facts() -> dict[str, Any]:
    """What the numbers were measured with."""
    return {
        "command": " ".join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
        "device": pick().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()

"""What each precision, the compiler, and a loss in chunks buy: in speed, in memory, and in MFU.

    python benchmarks/precision.py --output benchmarks/results/precision.md

One table for each model, on whatever device is there: on a CPU the debug model; on a GPU 1B, 3B and
as many layers of 8B as fit twice, at 8,192 tokens a sequence, recomputed by operator. A row is a
few lines of a recipe (`TABLES`), so what a recipe can say can be a row; one that is refused here is
left out, and the page says why.

A row lives in processes of its own beside those of the first row of its table, which live
throughout. The two take turns, a block of steps each, while the other sleeps with nothing but its
weights and states in memory. The ratio is taken round by round, so that a machine that slows down
slows both. `--profile FOLDER` keeps a trace of each row whose MFU is below `--goal`, and names the
longest times in which its GPU did nothing.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from parallel import resident, spread

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import Device, pick
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.parallel import open_world
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent

BASE = """\
[job]
dump_folder = "{folder}/run"
[model]
flavor = "{model}"
[training]
seq_len = {seq_len}
local_batch_size = {batch}
steps = 1000000
mixed_precision_param = "bfloat16"
[lr_scheduler]
warmup_steps = 1000
[activation_checkpoint]
mode = "{recompute}"
[metrics]
log_freq = 1000000
[compile]
backend = "{backend}"
"""

COMPILE = "[compile]\nenable = true\n"
WHOLE = COMPILE + 'granularity = "model"\n'
SIMPLE = '[sharding]\nname = "simple_fsdp"\n'
CHUNKS = "[loss]\nvocabulary_chunk = {chunk}\n"


def converted(name: str, recipe: str = "") -> str:
    """A converter's section; what the device lacks is emulated, and the page says so."""
    chosen = f'recipe = "{recipe}"\n' if recipe else ""
    return f'[[convert]]\nname = "{name}"\nemulate = true\n{chosen}'


def states(dtype: str) -> str:
    return f'[optimizer]\nstate_dtype = "{dtype}"\n'


SHARDING = "FSDP2 and SimpleFSDP"
TABLES: dict[str, dict[str, str]] = {
    "Precision": {
        "bf16": "",
        "bf16, compiled": COMPILE,
        "bf16, compiled, loss in chunks": COMPILE + CHUNKS,
        "Float8 tensorwise": COMPILE + converted("float8", "tensorwise"),
        "Float8 rowwise": COMPILE + converted("float8", "rowwise"),
        "Float8 rowwise_with_gw_hp": COMPILE + converted("float8", "rowwise_with_gw_hp"),
        "MXFP8": COMPILE + converted("mxfp8"),
        "Float8 tensorwise, loss in chunks": COMPILE + CHUNKS + converted("float8", "tensorwise"),
        "bf16, compiled, AdamW in bf16": COMPILE + states("bfloat16"),
        "bf16, compiled, AdamW in Float8": COMPILE + states("float8"),
        "bf16, compiled, AdamW in 8 bits": COMPILE + states("8bit"),
        "bf16, compiled, AdamW in 4 bits": COMPILE + states("4bit"),
    },
    SHARDING: {
        "FSDP2": "",
        "FSDP2, compiled": COMPILE,
        "SimpleFSDP, compiled whole": WHOLE + SIMPLE,
        "SimpleFSDP, a bucket a block": WHOLE + SIMPLE + 'bucketing = "block"\n',
        "SimpleFSDP, loss in chunks": WHOLE + SIMPLE + CHUNKS,
        "SimpleFSDP, CUDA graphs": WHOLE + "cuda_graphs = true\n" + SIMPLE,
    },
}


class Model(NamedTuple):
    """What is trained: a flavor, sequences of a rank, and how long they are."""

    batch: int
    seq_len: int
    chunk: int


def models_for(device: Device) -> dict[str, Model]:
    if device.type == "cpu":
        return {"debugmodel": Model(8, 256, 512)}
    large = f"8B, {fitting_layers(device.memory_capacity())} layers"
    return {"1B": Model(2, 8192, 16384), "3B": Model(1, 8192, 16384), large: Model(1, 8192, 16384)}


def fitting_layers(capacity: float) -> int:
    """Layers of 8B, at 16 bytes a parameter, that take a third of `capacity` GiB."""
    args = MODELS["llama3"].flavors["8B"]
    ends = 2 * args.vocab_size * args.dim
    heads = (2 * args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    layer = args.dim * (heads + 3 * args.ffn_dim)
    return max(2, int((capacity * 2**30 / 3 / 16 - ends) // layer))


def add_flavor(name: str) -> None:
    """Make a name like "8B, 9 layers" a flavor of llama3."""
    if found := re.fullmatch(r"(\w+), (\d+) layers", name):
        spec = MODELS["llama3"]
        args = dataclasses.replace(spec.flavors[found[1]], n_layers=int(found[2]))
        MODELS["llama3"] = dataclasses.replace(spec, flavors={**spec.flavors, name: args})


def read(path: str | Path, ranks: int, device: Device) -> JobConfig:
    """A row's recipe, known to work here."""
    return load_job(path, [], ranks, device.type, is_here=True).config


class Ranks:
    """The processes of a row, each waiting to be told what to do."""

    def __init__(self, recipe: Path, model: str, count: int, arguments: argparse.Namespace) -> None:
        given = [f"--{key}={getattr(arguments, key)}" for key in ("steps", "warmup")]
        given += [f"--recipe={recipe}", f"--models={model}", f"--ranks={count}"]
        threads = max((os.cpu_count() or 1) // count, 1)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        # Files, since what is not read would fill a pipe.
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, f"--rank={rank}", *given],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, errors in enumerate(self.errors)
        ]

    def ask(self, word: str) -> list[Any]:
        """Tell all ranks; the answer of each, when all have come."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[Any]:
        found = []
        for process, errors in zip(self.processes, self.errors, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise Failed((errors.read().strip() or "it ended").splitlines()[-1])
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Failed(RuntimeError):
    """A row that was accepted, and then did not run."""


def train(arguments: argparse.Namespace) -> None:
    """One rank of a row: does what comes in, line by line, and answers."""
    logger.setLevel(logging.ERROR)
    (model,) = arguments.models
    add_flavor(model)
    device = pick(arguments.rank)
    device.make_current()
    store = dist.FileStore(f"{arguments.recipe}.store", arguments.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        device.backend, store=store, rank=arguments.rank, world_size=arguments.ranks
    )
    job = read(arguments.recipe, arguments.ranks, device)
    before = resident() if device.type == "cpu" else 0.0
    with open_world(job.degrees(arguments.ranks), job.comm, device) as world:
        run = build(job, world)
        with closing(run.batches), run.meter:
            trainer = Trainer(run)
            steps(trainer, arguments.warmup, device)
            print(0, flush=True)
            for line in sys.stdin:
                word, _, rest = line.strip().partition(" ")
                answer: Any
                if word == "memory":
                    answer = device.memory_peak() - before
                elif word == "profile":
                    answer = profiled(trainer, device, f"{rest}.rank{arguments.rank}.json.gz")
                else:
                    steps(trainer, 1, device)  # what it freed for the others it takes again
                    answer = steps(trainer, arguments.steps, device)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def steps(trainer: Trainer, count: int, device: Device) -> float:
    """Seconds a step."""
    dist.barrier()
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        trainer.step()
    device.synchronize()
    return (time.perf_counter() - begin) / max(count, 1)


def profiled(trainer: Trainer, device: Device, path: str) -> list[str]:
    """The longest gaps of a step, whose trace is kept."""
    with torch.profiler.profile() as profiler:
        steps(trainer, 2, device)
    profiler.export_chrome_trace(path)
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        # A range that a program names is busy and idle alike.
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation
    ]
    return gaps(kernels)


def gaps(kernels: Sequence[tuple[float, float, str]], count: int = 5) -> list[str]:
    """The longest times between kernels, (begin, end, name) in microseconds each, longest first."""
    found, last, before = [], 0.0, ""
    for begin, end, name in sorted(kernels):
        if before and begin > last:
            found.append((begin - last, f"after {before[:60]}, before {name[:60]}"))
        if end > last:
            last, before = end, name
    longest = sorted(found, reverse=True)[:count]
    return [f"{length:,.0f} us {where}" for length, where in longest]


class Measured(NamedTuple):
    """Of a row: seconds a step in each round, its own and the first row's; GiB of the fullest
    rank; the longest gaps, where they were looked for."""

    seconds: list[float]
    first: list[float]
    memory: float
    gaps: list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of one model on so many ranks."""

    title: str
    model: str
    size: Model
    ranks: int
    device: Device
    arguments: argparse.Namespace

    def recipes(self, rows: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Path | str]]:
        """Each row's recipe, or why it is left out."""
        sizes = {"folder": folder, "model": self.model, **self.size._asdict()}
        (folder / "base.toml").write_text(BASE.format(**sizes, **vars(self.arguments)))
        for number, (name, text) in enumerate(rows.items()):
            path = folder / f"{number}.toml"
            path.write_text(f'extends = "base.toml"\n{text.format(**sizes)}')
            try:
                job = read(path, self.ranks, self.device)
            except RecipeError as error:
                why = "; ".join(re.sub(r"^\S+\.toml:\d+: ", "", line) for line in error.lines)
                yield name, f"left out: {why}"
                continue
            lacks = [converter.lacks(self.device.capability) for converter in job.convert]
            if not any(lacks):
                yield name, path
            elif self.device.type == "cpu":
                yield f"{name}, emulated", path
            else:
                yield name, f"left out: {next(filter(None, lacks))}"

    def measure(self, rows: Mapping[str, str], folder: Path) -> str:
        """All rows in turns with the first; the table."""
        recipes = dict(self.recipes(rows, folder))
        found: dict[str, Measured | str] = {n: r for n, r in recipes.items() if isinstance(r, str)}
        reference: Ranks | None = None
        try:
            for name, recipe in recipes.items():
                if isinstance(recipe, str):
                    continue
                row = Ranks(recipe, self.model, self.ranks, self.arguments)
                try:
                    row.answers()
                    found[name] = self._take_turns(name, row, reference)
                except (Failed, BrokenPipeError) as error:
                    found[name] = f"failed: {error}"
                    row.close()
                    continue
                if reference is None:
                    reference = row
                else:
                    row.close()
        finally:
            if reference:
                reference.close()
        return self._show({name: found[name] for name in recipes})

    def _take_turns(self, name: str, row: Ranks, reference: Ranks | None) -> Measured:
        seconds: dict[Ranks, list[float]] = {row: [], reference or row: []}
        for number in range(self.arguments.rounds):
            # Who goes first alternates, so that a trend favours nobody.
            for one in list(seconds)[:: 1 if number % 2 else -1]:
                seconds[one].append(max(one.ask("train")))
        memory, gaps_of_row = max(row.ask("memory")), []
        mfu = self._mfu(seconds[row])
        if self.arguments.profile and (mfu is None or mfu < self.arguments.goal):
            self.arguments.profile.mkdir(parents=True, exist_ok=True)
            path = self.arguments.profile / re.sub(r"\W+", "_", f"{self.model} {name}")
            gaps_of_row = row.ask(f"profile {path}")[0]
        return Measured(seconds[row], seconds[reference or row], memory, gaps_of_row)

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.size.batch * self.size.seq_len * self.ranks

    def _mfu(self, seconds: Sequence[float]) -> float | None:
        """By the median; None where the peak of the device is not known."""
        peak, spec = self.device.peak_flops(torch.bfloat16), MODELS["llama3"]
        if peak is None:
            return None
        flops = spec.flops_per_unit(spec.flavors[self.model], self.size.seq_len)
        return flops * self.tokens / statistics.median(seconds) / (peak * self.ranks)

    def _show(self, found: Mapping[str, Measured | str]) -> str:
        lines, notes = [HEAD.format(title=self.title)], []
        first = next((row.memory for row in found.values() if isinstance(row, Measured)), 0.0)
        for name, row in found.items():
            if isinstance(row, str):
                notes.append(f"{name}: {row}")
                continue
            ratios = [a / b for a, b in zip(row.first, row.seconds, strict=True)]
            mfu = self._mfu(row.seconds)
            cells = (
                *(name, spread([self.tokens / s for s in row.seconds], 0), spread(ratios, 2)),
                *(f"{row.memory:.2f}", f"{row.memory / first:.2f}"),
                "-" if mfu is None else f"{mfu:.1%}",
            )
            lines.append(f"| {' | '.join(cells)} |")
            notes += [f"{name}: idle for {gap}" for gap in row.gaps]
        return "\n".join(lines) + "".join(f"\n\n{note}" for note in notes)


PAGE = """\
# Precision

<!-- Written by benchmarks/precision.py. -->

Tokens/s of all ranks, median (quartiles) of {rounds} rounds of {steps} steps; *ratio* to the first
row of a table, round by round. GiB of the rank that has most: {memory}.
MFU is by the dense bf16 peak, whatever is multiplied in. Weights are kept in float32 and multiplied
in bfloat16, unless a row says otherwise.

`{command}`: {device}, {cores} cores, torch {torch}, torchao {torchao}, Python {python}, {date}.

{tables}
"""
HEAD = """\
## {title}

| | tokens/s | ratio | GiB | ratio | MFU |
|---|---:|---:|---:|---:|---:|"""
MEMORY = {
    "cpu": "what a process has over an empty one with torch, the compiler included",
    "cuda": "reserved by torch",
}


def page(tables: Sequence[str], device: Device, arguments: argparse.Namespace) -> str:
    """The result, and what it depends on."""
    return PAGE.format(
        rounds=arguments.rounds,
        steps=arguments.steps,
        memory=MEMORY[device.type],
        command=" ".join(["python", "benchmarks/precision.py", *sys.argv[1:]]),
        device=device.name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        torchao=importlib.metadata.version("torchao"),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        tables="\n\n".join(tables),
    )


def tables(device: Device, arguments: argparse.Namespace) -> Iterator[str]:
    models = models_for(device)
    devices = 2 if device.type == "cpu" else torch.cuda.device_count()
    for model in arguments.models or models:
        add_flavor(model)
        size = Model(1, 32, 512) if arguments.quick else models.get(model, Model(1, 8192, 16384))
        for kind, rows in TABLES.items():
            ranks = devices if kind == SHARDING else 1
            title = f"{kind}: {model}, {size.batch} x {size.seq_len} tokens a rank"
            title += f", {ranks} rank{'s' * (ranks > 1)}"
            chosen = {name: text for name, text in rows.items() if name in (arguments.rows or rows)}
            if chosen:
                with tempfile.TemporaryDirectory() as folder:
                    table = Table(title, model, size, ranks, device, arguments)
                    yield table.measure(chosen, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [name for rows in TABLES.values() for name in rows]
    parser.add_argument("--models", nargs="+", help='flavors of llama3, also "8B, 4 layers"')
    parser.add_argument("--rows", nargs="+", choices=names)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each row")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each row, not counted")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--recompute", default="selective", help="activation_checkpoint.mode")
    parser.add_argument("--profile", type=Path, help="folder for traces")
    parser.add_argument("--goal", type=float, default=1.0, help="MFU from which a trace is spared")
    parser.add_argument("--quick", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--output", type=Path, help="file for the page")
    for key, kind in (("rank", int), ("ranks", int), ("recipe", Path)):
        parser.add_argument(f"--{key}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments)
        return
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.warmup = 2, 1, 1
        arguments.backend = "aot_eager"
    device = pick()
    done = []
    for table in tables(device, arguments):
        print(table, end="\n\n", flush=True)
        done.append(table)
        if arguments.output:  # after each table: what was measured is not lost with what was not
            arguments.output.write_text(page(done, device, arguments))


if __name__ == "__main__":
    main()

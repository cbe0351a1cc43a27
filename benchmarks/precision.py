"""What each precision, the compiler, and a loss in chunks cost on a CPU: in speed and in memory.

    python benchmarks/precision.py --output benchmarks/results/precision.md

It trains the debug model. `scripts/gpu` measures the same on a GPU, with larger models. A row is a
few lines of a recipe (`TABLES`), so what a recipe can say can be a row; one that is refused here is
left out, and the page says why.

A row lives in processes of its own beside those of the first row of its table, which live
throughout. The two take turns, a block of steps each, while the other sleeps with nothing but its
weights and states in memory. The ratio is taken round by round, so that a machine that slows down
slows both.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import re
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
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.parallel import open_world
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent

BASE = """\
[job]
dump_folder = "{folder}/run"
[model]
flavor = "debugmodel"
[training]
seq_len = {seq_len}
local_batch_size = {batch}
steps = 1000000
mixed_precision_param = "bfloat16"
[lr_scheduler]
warmup_steps = 1000
[activation_checkpoint]
mode = "selective"
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
    },
}


class Size(NamedTuple):
    """Sequences of a rank, how long they are, and the vocabulary that a chunk of the loss has."""

    batch: int = 8
    seq_len: int = 256
    chunk: int = 512


def read(path: str | Path, ranks: int) -> JobConfig:
    """A row's recipe, known to work here."""
    return load_job(path, [], ranks, "cpu", is_here=True).config


class Ranks:
    """The processes of a row, each waiting to be told what to do."""

    def __init__(self, recipe: Path, count: int, arguments: argparse.Namespace) -> None:
        given = [f"--{key}={getattr(arguments, key)}" for key in ("steps", "warmup")]
        given += [f"--recipe={recipe}", f"--ranks={count}"]
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
    store = dist.FileStore(f"{arguments.recipe}.store", arguments.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks)
    job, device = read(arguments.recipe, arguments.ranks), Device("cpu")
    before = resident()
    with open_world(job.degrees(arguments.ranks), job.comm, device) as world:
        run = build(job, world)
        with closing(run.batches), run.meter:
            trainer = Trainer(run)
            steps(trainer, arguments.warmup)
            print(0, flush=True)
            for line in sys.stdin:
                if line.strip() == "memory":
                    answer = device.memory_peak() - before
                else:
                    steps(trainer, 1)  # what it freed for the others it takes again
                    answer = steps(trainer, arguments.steps)
                print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def steps(trainer: Trainer, count: int) -> float:
    """Seconds a step."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        trainer.step()
    return (time.perf_counter() - begin) / max(count, 1)


class Measured(NamedTuple):
    """Of a row: seconds a step in each round, its own and the first row's; GiB of the fullest
    rank."""

    seconds: list[float]
    first: list[float]
    memory: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows on so many ranks."""

    title: str
    size: Size
    ranks: int
    arguments: argparse.Namespace

    def recipes(self, rows: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Path | str]]:
        """Each row's recipe, or why it is left out."""
        sizes = {"folder": folder, **self.size._asdict()}
        (folder / "base.toml").write_text(BASE.format(**sizes, **vars(self.arguments)))
        for number, (name, text) in enumerate(rows.items()):
            path = folder / f"{number}.toml"
            path.write_text(f'extends = "base.toml"\n{text.format(**sizes)}')
            try:
                job = read(path, self.ranks)
            except RecipeError as error:
                why = "; ".join(re.sub(r"^\S+\.toml:\d+: ", "", line) for line in error.lines)
                yield name, f"left out: {why}"
                continue
            is_emulated = any(converter.lacks(None) for converter in job.convert)
            yield f"{name}, emulated" if is_emulated else name, path

    def measure(self, rows: Mapping[str, str], folder: Path) -> str:
        """All rows in turns with the first; the table."""
        recipes = dict(self.recipes(rows, folder))
        found: dict[str, Measured | str] = {n: r for n, r in recipes.items() if isinstance(r, str)}
        reference: Ranks | None = None
        try:
            for name, recipe in recipes.items():
                if isinstance(recipe, str):
                    continue
                row = Ranks(recipe, self.ranks, self.arguments)
                try:
                    row.answers()
                    found[name] = self._take_turns(row, reference)
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

    def _take_turns(self, row: Ranks, reference: Ranks | None) -> Measured:
        seconds: dict[Ranks, list[float]] = {row: [], reference or row: []}
        for number in range(self.arguments.rounds):
            # Who goes first alternates, so that a trend favours nobody.
            for one in list(seconds)[:: 1 if number % 2 else -1]:
                seconds[one].append(max(one.ask("train")))
        return Measured(seconds[row], seconds[reference or row], max(row.ask("memory")))

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.size.batch * self.size.seq_len * self.ranks

    def _show(self, found: Mapping[str, Measured | str]) -> str:
        lines, notes = [HEAD.format(title=self.title)], []
        first = next((row.memory for row in found.values() if isinstance(row, Measured)), 0.0)
        for name, row in found.items():
            if isinstance(row, str):
                notes.append(f"{name}: {row}")
                continue
            ratios = [a / b for a, b in zip(row.first, row.seconds, strict=True)]
            cells = (
                *(name, spread([self.tokens / s for s in row.seconds], 0), spread(ratios, 2)),
                *(f"{row.memory:.2f}", f"{row.memory / first:.2f}"),
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "".join(f"\n\n{note}" for note in notes)


PAGE = """\
# Precision

<!-- Written by benchmarks/precision.py. -->

Tokens/s of all ranks, median (quartiles) of {rounds} rounds of {steps} steps; *ratio* to the first
row of a table, round by round. GiB of the rank that has most: what a process has over an empty one
with torch, the compiler included. Weights are kept in float32 and multiplied in bfloat16, unless a
row says otherwise.

`{command}`: {device}, {cores} cores, torch {torch}, torchao {torchao}, Python {python}, {date}.

{tables}
"""
HEAD = """\
## {title}

| | tokens/s | ratio | GiB | ratio |
|---|---:|---:|---:|---:|"""


def page(tables: Sequence[str], arguments: argparse.Namespace) -> str:
    """The result, and what it depends on."""
    return PAGE.format(
        rounds=arguments.rounds,
        steps=arguments.steps,
        command=" ".join(["python", "benchmarks/precision.py", *sys.argv[1:]]),
        device=Device("cpu").name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        torchao=importlib.metadata.version("torchao"),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        tables="\n\n".join(tables),
    )


def tables(arguments: argparse.Namespace) -> Iterator[str]:
    size = Size(1, 32) if arguments.quick else Size()
    for kind, rows in TABLES.items():
        ranks = 2 if kind == SHARDING else 1
        title = f"{kind}: debugmodel, {size.batch} x {size.seq_len} tokens a rank"
        title += f", {ranks} rank{'s' * (ranks > 1)}"
        chosen = {name: text for name, text in rows.items() if name in (arguments.rows or rows)}
        if chosen:
            with tempfile.TemporaryDirectory() as folder:
                yield Table(title, size, ranks, arguments).measure(chosen, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [name for rows in TABLES.values() for name in rows]
    parser.add_argument("--rows", nargs="+", choices=names)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each row")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each row, not counted")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
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
    done = []
    for table in tables(arguments):
        print(table, end="\n\n", flush=True)
        done.append(table)
        if arguments.output:  # after each table: what was measured is not lost with what was not
            arguments.output.write_text(page(done, arguments))


if __name__ == "__main__":
    main()

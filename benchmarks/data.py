"""Speed, start and memory of data: loading tokens, tokenization, opening, resuming.

    python benchmarks/data.py --output benchmarks/results/data.md

Speeds are tokens for a second of processor time, of a process and its workers, so that other work
on the machine counts less.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processor_time import processor_of_children

from torchtitan.data import load_tokenizer, open_source
from torchtitan.data.order import SinglePass
from torchtitan.data.settings import DataConfig
from torchtitan.data.stream import merge_states
from torchtitan.data.tokens.index import ShardTable, ShardWriter, write_index
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.data.tokens.tokenizing import tokenize
from torchtitan.device import pick
from torchtitan.tasks.next_token import PackedTokens
from torchtitan.tools import cli

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
BATCH = 8
VOCABULARY = 258
"""Of the tokenizer of bytes. Tokens are stored in 4 bytes, as those of a large vocabulary."""
SMALL_VOCABULARY = 2048
SHARD_TOKENS = 20_000
"""Tokens of each shard in the test of starts."""
FAR = 10_000_000
"""Sample to resume at."""
Spreads = dict[str, list[float]]

PAGE = """\
# Data: speed, start and memory

<!-- Written by benchmarks/data.py. -->

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.
{load:.0f} processes wanted to run at the end. *Median (quartiles)* of {rounds} rounds, in which all
take turns; ratios are taken round by round.

{parts}"""
LOADING_PAGE = """\
## Loading

{tokens} million tokens of documents with a mean of {mean:.0f} tokens, 4 bytes each, in the kernel's
memory; batches of {batch} sequences of {seq_len:,} tokens. Millions of tokens per second of
processor time of one core: without a worker {alone}, with one thread as a worker {one}.
"""
TOKENIZATION_PAGE = """\
## Tokenization

{text}, {megabytes:.1f} MB, with a BPE tokenizer of {vocabulary:,} tokens.
*Bare* is `tokenizers` alone, document by document, on text in memory, by as many processes. *Ratio*
is the bare tokenizer's processor time to ours.

{table}
"""
STARTS_PAGE = """\
## Start

Seconds from the start of opening to the first batch, imports not counted; {tokens:,} tokens a
shard; the files are in the kernel's memory. Of 1 shard: {one}; of {shards:,} shards: {many}.
"""
RESUME_PAGE = """\
## Resume

Milliseconds from the state of a run to its first batch, on the tokens of the first part (over
many epochs): sample 0: {first}; sample {number:,}: {far}.
"""
SHARE_PAGE = """\
## Share of a step

The debug model on tokens, {steps} steps of {step:.0f} ms: `data_pct`, the share of a step in which
training waits for data, is {waited} %. A batch takes {batch:.2f} ms of processor time, {own:.2f} %
of a step.
"""
MEMORY_PAGE = """\
## Memory

Anonymous memory (RssAnon) of a process that opens a corpus of 5,000 tokens a document in one sparse
file, and reads {batches} batches; less that of the same process before.

{table}
"""


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process."""
    os.environ["PYTHONWARNINGS"] = "ignore"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def spread(values: Sequence[float], digits: int = 1) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, others, strict=True)]


def rows(cells: Iterator[Sequence[object]] | Sequence[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def processor_time() -> float:
    """Processor seconds of this process, its workers, and those that have ended."""
    ended = os.times()
    workers = processor_of_children() + ended.children_user + ended.children_system
    return time.process_time() + workers


def documents(tokens: int) -> Iterator[np.ndarray]:
    """Documents of random tokens; half are shorter than 550, and the mean is about 900."""
    draw = np.random.default_rng(0)
    while tokens > 0:
        count = min(tokens, max(16, int(draw.lognormal(6.3, 1.0))))
        tokens -= count
        yield draw.integers(0, VOCABULARY, count, dtype=np.int32)


def corpus(folder: Path, arguments: argparse.Namespace) -> Path:
    """Return the folder of the tokens, which are written once."""
    path = folder / "corpus"
    if not path.is_dir():
        path.mkdir()
        writer = ShardWriter(path / "00000.tokens", "uint32")
        for document in documents(int(1e6 * arguments.tokens)):
            writer.add(document)
        write_index(path, "torchtitan", [writer.close()])
    return path


def speed(path: Path, seq_len: int, workers: int, seconds: float) -> float:
    """Return the millions of tokens of a second of processor time, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of its workers too
    stream, batches = stream_of(path, seq_len, workers=workers), 0
    for _ in range(20):
        next(stream)
    end, begin = time.perf_counter() + seconds, processor_time()
    while time.perf_counter() < end:
        next(stream)
        batches += 1
    found = batches * BATCH * seq_len / 1e6 / (processor_time() - begin)
    stream.close()
    return found


def loading(folder: Path, arguments: argparse.Namespace) -> str:
    """Measure the speed without and with a worker."""
    path, seq_len = corpus(folder, arguments), 256 if arguments.quick else 4096
    seconds = 0.05 if arguments.quick else 1.0
    found: list[list[float]] = [[], []]
    for _ in range(arguments.rounds):
        for workers, speeds in enumerate(found):
            speeds.append(fresh(speed, path, seq_len, workers, seconds))
    index = json.loads((path / "index.json").read_text())
    alone, one = map(spread, found)
    return LOADING_PAGE.format(
        tokens=f"{arguments.tokens:g}",
        mean=index["tokens"] / index["documents"],
        batch=BATCH,
        seq_len=seq_len,
        alone=alone,
        one=one,
    )


def texts(config: DataConfig) -> list[str]:
    """Return all documents."""
    source = open_source(config, None, seed=0)
    return [document.content for document in SinglePass(source).read({0: None}, 1)[0]]


def bare(tokenizer: Path, config: DataConfig, processes: int) -> float:
    """Return the processor seconds of the tokenizer alone."""
    from tokenizers import Tokenizer

    encoder, found = Tokenizer.from_file(str(tokenizer)), texts(config)

    def encode(part: Sequence[str]) -> None:
        for text in part:
            np.array(encoder.encode(text, add_special_tokens=False).ids, np.uint16)

    begin = processor_time()
    fork = multiprocessing.get_context("fork")
    parts = [found[number::processes] for number in range(processes)]
    children = [fork.Process(target=encode, args=(part,)) for part in parts[1:]]
    for child in children:
        child.start()
    encode(parts[0])
    for child in children:
        child.join()
    return processor_time() - begin


def ours(tokenizer: Path, config: DataConfig, processes: int, folder: Path) -> float:
    """Return the processor seconds of `torchtitan data tokenize`, after its imports."""
    loaded, begin = load_tokenizer(str(tokenizer)), processor_time()
    tokenize(config, loaded, folder, processes=processes)
    found = processor_time() - begin
    shutil.rmtree(folder)
    return found


def online(tokenizer: Path, config: DataConfig) -> float:
    """Return the processor seconds of an epoch that is tokenized while training."""
    from torchtitan.data.stream import build_stream

    loaded, begin = load_tokenizer(str(tokenizer)), processor_time()
    packing = PackedTokens(loaded, 2048, True, True, has_documents=False)
    source = open_source(config, loaded, seed=0)
    stream = build_stream(
        config, source, packing, local_batch_size=1, accumulation=1, rank=0, ranks=1
    )
    while not stream.epoch:
        next(stream)
    found = processor_time() - begin
    stream.close()
    return found


def tokenizer_file(folder: Path) -> Path:
    """Return a tokenizer with the vocabulary of the debug model, which is trained once."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        words = f"--dataset python_stdlib --documents 300 --vocab-size {SMALL_VOCABULARY}"
        assert cli.main(["tokenizer", "train", *words.split(), "--output", str(file)]) == 0
    return file


def tokenization(folder: Path, arguments: argparse.Namespace) -> str:
    """Compare ways to tokenize a text."""
    tokenizer, config = tokenizer_file(folder), DataConfig(dataset="python_stdlib")
    if arguments.quick:
        config = DataConfig(dataset=str(ROOT / "README.md"), document_bytes=1024)
    found: dict[str, list[float]] = {}

    def take(name: str, function: Callable[..., float], *rest: Any) -> None:
        found.setdefault(name, []).append(fresh(function, tokenizer, config, *rest))

    for _ in range(arguments.rounds):
        for processes in (1, 2):
            take(f"bare {processes}", bare, processes)
            take(f"{processes}", ours, processes, folder / "tokenized")
        take("online", online)
    written = tokenize(config, load_tokenizer(str(tokenizer)), folder / "tokens")
    lines = ["| | thousand tokens per second of processor time | ratio |", "|---|---:|---:|"]
    for name, key, base in (
        ("bare, 1 process", "bare 1", "bare 1"),
        ("`data tokenize`, 1 process", "1", "bare 1"),
        ("bare, 2 processes", "bare 2", "bare 2"),
        ("`data tokenize`, 2 processes", "2", "bare 2"),
        ("while training, 1 thread", "online", "bare 1"),
    ):
        speed = spread([written.tokens / 1e3 / seconds for seconds in found[key]], 0)
        lines.append(rows([(name, speed, spread(ratios(found[base], found[key]), 2))]))
    return TOKENIZATION_PAGE.format(
        text="This project's README" if arguments.quick else "The Python standard library",
        megabytes=sum(len(text.encode()) for text in texts(config)) / 1e6,
        vocabulary=SMALL_VOCABULARY,
        table="\n".join(lines),
    )


def stream_of(
    path: Path, seq_len: int = 512, tokenizer_path: str | None = None, workers: int = 0
) -> TokenStream:
    config = DataConfig(dataset=str(path), num_workers=workers)
    tokenizer = load_tokenizer(tokenizer_path)
    sources = open_token_sources(config, tokenizer, tokenizer.vocab_size)
    assert sources is not None
    packing = PackedTokens(tokenizer, seq_len, True, True, has_documents=False)
    part = {"local_batch_size": BATCH, "accumulation": 1, "rank": 0, "ranks": 1}
    return TokenStream(config, sources, packing, seq_len=seq_len, seed=0, **part)


def start(path: Path) -> float:
    begin = time.perf_counter()
    next(stream_of(path))
    return time.perf_counter() - begin


def starts(folder: Path, arguments: argparse.Namespace) -> str:
    """Compare the opening of one and of many shards."""
    found: dict[int, list[float]] = {}
    for count in (1, arguments.shards):
        path = folder / f"shards-{count}"
        write_small_shards(path, count)
        found[count] = [fresh(start, path) for _ in range(arguments.rounds)]
        shutil.rmtree(path)
    one, many = (spread(seconds, 2) for seconds in found.values())
    return STARTS_PAGE.format(tokens=SHARD_TOKENS, one=one, shards=arguments.shards, many=many)


def small_documents() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return np.split(draw.integers(0, VOCABULARY, SHARD_TOKENS, dtype=np.int32), 20)


def write_small_shards(folder: Path, shards: int) -> None:
    folder.mkdir()
    tables = []
    for number in range(shards):
        writer = ShardWriter(folder / f"{number:05d}.tokens", "uint32")
        for document in small_documents():
            writer.add(document)
        tables.append(writer.close())
    write_index(folder, "torchtitan", tables)


def resume(path: Path, state: str) -> float:
    """Return the seconds from the state of a run to its next batch."""
    stream = stream_of(path)
    begin = time.perf_counter()
    stream.load_state_dict(json.loads(state))
    next(stream)
    return time.perf_counter() - begin


def resuming(folder: Path, arguments: argparse.Namespace) -> str:
    """Compare resuming at the first and at a late sample."""
    path = corpus(folder, arguments)
    stream = stream_of(path)
    states = [merge_states([stream.state_dict()])]
    number = 1000 if arguments.quick else FAR
    stream.skip(number)
    states.append(merge_states([stream.state_dict()]))
    assert [state["samples"] for state in states] == [0, number]
    times: list[list[float]] = [[], []]
    for _ in range(arguments.rounds):
        for state, found in zip(states, times, strict=True):
            found.append(1e3 * fresh(resume, path, json.dumps(state)))
    first, far = map(spread, times)
    return RESUME_PAGE.format(number=number, first=first, far=far)


def share(folder: Path, arguments: argparse.Namespace) -> str:
    """Train the debug model on tokens."""
    output, tokens, tokenizer = folder / "run", folder / "stdlib", tokenizer_file(folder)
    steps = 8 if arguments.quick else 30
    tokenize(DataConfig(), load_tokenizer(str(tokenizer)), tokens)
    flags = f"""--data.dataset {tokens} --model.tokenizer_path {tokenizer}
        --training.steps {steps} --metrics.log_freq 1 --job.dump_folder {output}
        --no-validation.enable --no-checkpoint.enable --lr_scheduler.warmup_steps 1""".split()
    words = [sys.executable, "-m", "torchtitan", "train", str(RECIPE), *flags]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    lines = [json.loads(line) for line in next(output.rglob("metrics.jsonl")).open()]
    steady = [line for line in lines if line.get("step", 0) > 3 and "data_pct" in line]
    waited = [line["data_pct"] for line in steady]
    seconds = statistics.median(line["step_time"] for line in steady)
    recipe, seq_len = RECIPE.read_text(), 256
    for key, value in (("global_batch_size", BATCH), ("seq_len", seq_len)):
        assert re.search(rf"^{key} = {value}$", recipe, re.MULTILINE), key
    stream = stream_of(tokens, seq_len, str(tokenizer))
    for _ in range(10):
        next(stream)
    begin = time.process_time()
    for _ in range(100):
        next(stream)
    own = (time.process_time() - begin) / 100
    return SHARE_PAGE.format(
        steps=len(steady),
        step=1e3 * seconds,
        waited=spread(waited, 2),
        batch=1e3 * own,
        own=100 * own / seconds,
    )


def anonymous() -> float:
    """Return the anonymous memory of this process, MiB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def memory(path: Path, batches: int) -> float:
    """Return the memory that reading a corpus takes, MiB."""
    list(map(torch.zeros, range(8)))
    before = anonymous()
    stream = stream_of(path)
    for _ in range(batches):
        next(stream)
    return anonymous() - before


def memories(folder: Path, arguments: argparse.Namespace) -> str:
    """Return the memory of reading by the number of documents."""
    batches = 5 if arguments.quick else 200
    lines = ["| documents | bytes | MiB |", "|---:|---:|---:|"]
    for count in (1000, 10_000) if arguments.quick else (10**power for power in range(3, 8)):
        path = folder / f"sparse-{count}"
        path.mkdir()
        size = 2 * 5000 * count
        with (path / "0.tokens").open("wb") as file:
            file.truncate(size)
        starts = np.arange(0, size, size // count, dtype=np.uint64)
        lengths = np.full(count, 5000, np.uint32)
        write_index(path, "torchtitan", [ShardTable("0.tokens", size, "uint16", starts, lengths)])
        lines.append(rows([(f"{count:,}", f"{size:,}", f"{fresh(memory, path, batches):.1f}")]))
        shutil.rmtree(path)
    return MEMORY_PAGE.format(batches=batches, table="\n".join(lines))


PARTS: dict[str, Callable[[Path, argparse.Namespace], str]] = {
    "loading": loading,
    "tokenization": tokenization,
    "starts": starts,
    "resume": resuming,
    "share": share,
    "memory": memories,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")
    parser.add_argument("--tokens", type=float, default=100, help="millions, to load")
    parser.add_argument("--shards", type=int, default=2500, help="of the test of starts")
    parser.add_argument("--quick", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; absent: temporary")
    parser.add_argument("--output", type=Path, help="file for the page")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.shards = 2, 0.3, 3
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        found = {part: PARTS[part](Path(name), arguments) for part in arguments.parts}
    page = PAGE.format(
        command=" ".join(["python", "benchmarks/data.py", *sys.argv[1:]]),
        device=pick().name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        load=os.getloadavg()[0],
        rounds=arguments.rounds,
        parts="\n".join(found.values()),
    )
    print(page)
    if arguments.output:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()

"""Loaders of tokenized data, for data.py: each reads the same tokens, as its own software wrote
them, and yields pairs of int64 tensors, inputs and targets, of BATCH sequences.

    python benchmarks/loaders.py NAME FOLDER SEQ_LEN WORKERS

is one loader in a process of its own. It reads seconds from standard input, loads for that long,
and prints tokens, seconds and seconds of processor time as JSON; `python benchmarks/loaders.py
prepare FOLDER SEQ_LEN` writes the files of all.
"""

import importlib.util
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from processor_time import processor_of_children
from torch import Tensor
from torch.utils.data import Dataset

BATCH = 8
VOCABULARY = 258
"""Of the tokenizer of bytes. Tokens are stored in 4 bytes, as those of a large vocabulary."""
TOKENS = "tokens.int32"
Pairs = Iterator[tuple[Tensor, Tensor]]


def documents(tokens: int) -> Iterator[np.ndarray]:
    """Documents of random tokens; half are shorter than 550, and the mean is about 900."""
    draw = np.random.default_rng(0)
    while tokens > 0:
        count = min(tokens, max(16, int(draw.lognormal(6.3, 1.0))))
        tokens -= count
        yield draw.integers(0, VOCABULARY, count, dtype=np.int32)


def has(module: str) -> bool:
    """Whether a module is installed."""
    parent = module.partition(".")[0]
    return all(importlib.util.find_spec(name) for name in (parent, module))


def prepare(folder: Path, seq_len: int, tokens: int) -> None:
    """Write the same documents in every format whose software is installed."""
    from torchtitan.data.tokens.index import ShardWriter, write_index

    (folder / "torchtitan").mkdir(parents=True)
    writer = ShardWriter(folder / "torchtitan/00000.tokens", "uint32")
    with (folder / TOKENS).open("wb") as file:
        for document in documents(tokens):
            writer.add(document)
            file.write(document.tobytes())
    write_index(folder / "torchtitan", "torchtitan", [writer.close()])
    if has("megatron.core"):
        write_megatron(folder / "megatron/data", documents(tokens))
    joined = np.memmap(folder / TOKENS, np.int32, "r")
    starts = range(0, len(joined) - seq_len, seq_len)
    if has("streaming"):
        from streaming import MDSWriter

        columns = {"tokens": "ndarray:int32"}
        with MDSWriter(out=str(folder / "mds"), columns=columns) as mds:
            for start in starts:
                mds.write({"tokens": np.asarray(joined[start : start + seq_len + 1])})
    if has("litdata"):
        from litdata import TokensLoader, optimize

        optimize(
            fn=tensors_of,
            inputs=[(str(folder / TOKENS), tokens)],
            output_dir=str(folder / "litdata"),
            chunk_bytes="64MB",
            item_loader=TokensLoader(block_size=seq_len + 1),
            num_workers=1,
            verbose=False,
        )


def tensors_of(source: tuple[str, int]) -> Iterator[Tensor]:
    """Yield documents for litdata's `optimize`."""
    for document in documents(source[1]):
        yield torch.from_numpy(document)


def write_megatron(prefix: Path, found: Iterator[np.ndarray]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in found:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


def pair(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Join rows of seq_len + 1 tokens: inputs and targets are views."""
    joined = torch.from_numpy(np.stack([np.asarray(row) for row in rows], dtype=np.int64))
    return joined[:, :-1], joined[:, 1:]


def pair_of_column(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return pair([row["tokens"] for row in rows])


def again(loader: Any) -> Iterator[Any]:
    """Iterate for any number of epochs."""
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def torchtitan(folder: Path, seq_len: int, workers: int, name: str = "torchtitan") -> Pairs:
    from torchtitan.data.settings import DataConfig
    from torchtitan.data.tokenizer import ByteTokenizer
    from torchtitan.data.tokens.mixed_sources import open_token_sources
    from torchtitan.data.tokens.token_stream import TokenStream
    from torchtitan.tasks.next_token import PackedTokens

    tokenizer = ByteTokenizer()
    config = DataConfig(dataset=str(folder / name), num_workers=workers)
    sources = open_token_sources(config, tokenizer, VOCABULARY)
    assert sources is not None
    packing = PackedTokens(tokenizer, seq_len, True, True, has_documents=False)
    stream = TokenStream(
        *(config, sources, packing),
        seq_len=seq_len,
        seed=0,
        local_batch_size=BATCH,
        accumulation=1,
        rank=0,
        ranks=1,
    )
    return ((batch.tokens, batch.targets) for batch in stream)


def torchtitan_on_megatron(folder: Path, seq_len: int, workers: int) -> Pairs:
    return torchtitan(folder, seq_len, workers, "megatron")


class EndOfDocument:
    """Stand-in for a tokenizer: GPTDataset asks for the tokens that end and pad documents."""

    vocab_size, eod, pad = VOCABULARY, 0, 0
    unique_identifiers: ClassVar = {"class": "none"}


def megatron_config(seq_len: int, prefixes: list[str], cache: Path) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return GPTDatasetConfig(
        random_seed=0,
        sequence_length=seq_len,
        blend=(prefixes, None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=EndOfDocument(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def open_megatron(seq_len: int, prefixes: list[str], cache: Path, samples: int) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset

    config = megatron_config(seq_len, prefixes, cache)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    return builder.build()[0]


def megatron(folder: Path, seq_len: int, workers: int) -> Pairs:
    tokens = (folder / TOKENS).stat().st_size // 4
    cache = folder / "megatron-cache"
    dataset = open_megatron(seq_len, [str(folder / "megatron/data")], cache, tokens // seq_len - 1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=workers)
    return ((batch["tokens"], batch["labels"]) for batch in again(loader))


def mds(folder: Path, seq_len: int, workers: int) -> Pairs:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return again(
        torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=pair_of_column
        )
    )


def litdata(folder: Path, seq_len: int, workers: int) -> Pairs:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        str(folder / "litdata"),
        item_loader=TokensLoader(block_size=seq_len + 1),
        shuffle=True,
        drop_last=True,
    )
    return again(
        StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=pair)
    )


class Windows(Dataset[np.ndarray]):
    """The shortest data set: windows of a memory-mapped file."""

    def __init__(self, file: Path, seq_len: int) -> None:
        self._tokens, self._seq_len = np.memmap(file, np.int32, "r"), seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, number: int) -> np.ndarray:
        start = number * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]


def by_hand(folder: Path, seq_len: int, workers: int) -> Pairs:
    from torchdata.stateful_dataloader import StatefulDataLoader

    windows = Windows(folder / TOKENS, seq_len)
    return again(
        StatefulDataLoader(
            windows, batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=pair
        )
    )


LOADERS: dict[str, tuple[Callable[[Path, int, int], Pairs], str]] = {
    "torchtitan": (torchtitan, "torchtitan"),
    "torchtitan, Megatron's files": (torchtitan_on_megatron, "megatron.core"),
    "megatron-core": (megatron, "megatron.core"),
    "MosaicML streaming": (mds, "streaming"),
    "litdata": (litdata, "litdata"),
    "torchdata, memmap": (by_hand, "torchdata"),
}
"""Loaders, and the module that each needs."""


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    name, folder, *rest = sys.argv[1:]
    if name == "prepare":
        prepare(Path(folder), *map(int, rest))
        return
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # of its workers too
    seq_len, workers = map(int, rest)
    pairs = LOADERS[name][0](Path(folder), seq_len, workers)
    for _ in range(20):
        check(*next(pairs), seq_len)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, batches = float(line), 0
        wall, processor = time.perf_counter(), processor_time()
        while (passed := time.perf_counter() - wall) < seconds:
            next(pairs)
            batches += 1
        processor = processor_time() - processor
        tokens = batches * BATCH * seq_len
        print(json.dumps({"tokens": tokens, "wall": passed, "processor": processor}), flush=True)
    os._exit(0)  # without the threads of others


def processor_time() -> float:
    """Processor seconds of this process, its workers, and those that have ended."""
    ended = os.times()
    workers = processor_of_children() + ended.children_user + ended.children_system
    return time.process_time() + workers


def check(inputs: Tensor, targets: Tensor, seq_len: int) -> None:
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (BATCH, seq_len)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


if __name__ == "__main__":
    main()

"""Small shards of tokens, and streams of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.settings import DataConfig
from torchtitan.data.stream import merge_states
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens.index import ShardWriter, write_index
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.tasks.next_token import PackedTokens


def drawn_documents(count: int, seed: int = 0, most: int = 60) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(256, size=int(draw.integers(1, most))) for _ in range(count)]


def write_shards(folder: Path, documents: Sequence[np.ndarray], shards: int = 3) -> Path:
    """Write documents to shards of about the same number, in their order."""
    folder.mkdir(parents=True)
    tables = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
        writer = ShardWriter(folder / f"shard-{number:05d}.tokens", "uint16")
        for document in part:
            writer.add(documents[document])
        tables.append(writer.close())
    write_index(folder, "torchtitan", tables, tokenizer="bytes", vocab_size=258)
    return folder


def token_streams(
    config: DataConfig,
    ranks: int,
    *,
    batch: int = 4,
    seq_len: int = 16,
    steps: int | None = None,
    once: bool = False,
    groups: int = 1,
    accumulation: int = 1,
) -> list[TokenStream]:
    """Open the stream of each of `ranks` ranks; a step has `batch` samples."""
    tokenizer = ByteTokenizer()
    sources = open_token_sources(config, tokenizer, 258)
    assert sources is not None
    packing = PackedTokens(tokenizer, seq_len, True, True, has_documents=True)
    return [
        TokenStream(
            *(config, sources, packing),
            seq_len=seq_len,
            seed=0,
            steps=steps,
            once=once,
            local_batch_size=batch // ranks // accumulation,
            accumulation=accumulation,
            rank=rank,
            ranks=ranks,
            groups=groups,
        )
        for rank in range(ranks)
    ]


def rows(streams: Sequence[TokenStream], steps: int) -> list[list[int]]:
    """Take steps from all ranks; return the samples, inputs and last target, in their order."""
    found: list[Any] = []
    for _ in range(steps):
        for stream in streams:
            batch = next(stream)
            found += np.concatenate([batch.tokens, batch.targets[:, -1:]], 1).tolist()
    return found


def saved(streams: Sequence[TokenStream]) -> Any:
    return merge_states([stream.state_dict() for stream in streams])

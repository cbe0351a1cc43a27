"""Streams of text, as a next-token task opens them."""

from typing import Any

from torchtitan import data
from torchtitan.data import DataConfig, DataStream, Tokenizer, open_source
from torchtitan.data.order import Source
from torchtitan.tasks.next_token import PackedTokens


def stream_of(
    config: DataConfig, source: Source, tokenizer: Tokenizer, *, seq_len: int, **part: Any
) -> DataStream:
    packing = PackedTokens(tokenizer, seq_len, config.add_bos, config.add_eos, has_documents=True)
    return data.build_stream(config, source, packing, **part)


def build_stream(
    config: DataConfig, tokenizer: Tokenizer, *, seed: int, seq_len: int, **part: Any
) -> DataStream:
    source = open_source(config, tokenizer, seed=seed)
    return stream_of(config, source, tokenizer, seq_len=seq_len, **part)

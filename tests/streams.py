"""Streams of text, as a next-token task opens them."""

from torchtitan import data
from torchtitan.data import open_source
from torchtitan.tasks.next_token import PackedTokens


def stream_of(config, source, tokenizer, *, seq_len, **part):
    packing = PackedTokens(tokenizer, seq_len, config.add_bos, config.add_eos, has_documents=True)
    return data.build_stream(config, source, packing, **part)


def build_stream(config, tokenizer, *, seed, seq_len, **part):
    source = open_source(config, tokenizer, seed=seed)
    return stream_of(config, source, tokenizer, seq_len=seq_len, **part)

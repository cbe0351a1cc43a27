"""Small shards of tokens in all formats, and streams of them and of text."""

import gzip
import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import xxhash

from torchtitan import data
from torchtitan.data import open_source
from torchtitan.data.stream import merge_states
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens.index import ShardWriter, write_index
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.tasks.next_token import PackedTokens


def drawn_documents(count, seed=0, most=60):
    draw = np.random.default_rng(seed)
    return [draw.integers(256, size=int(draw.integers(1, most))) for _ in range(count)]


def write_texts(file, texts, group=None):
    """Write documents of text as the suffix of the file says; `group`: rows of a group."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if file.suffix == ".parquet":
        table = pyarrow.table({"text": pyarrow.array(texts, "string")})
        pyarrow.parquet.write_table(table, file, row_group_size=group)
    elif file.suffix == ".txt":
        file.write_text("".join(texts))
    else:
        file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


def write_shards(folder, documents, shards=3):
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


def mds_shard(file, dtype, documents):
    """Write a shard of MDS; return its entry in the index."""
    about = {"column_encodings": [f"ndarray:{dtype}"], "column_names": ["tokens"]}
    about |= {"column_sizes": [None], "compression": None, "format": "mds", "hashes": ["xxh3_64"]}
    about |= {"size_limit": 2**26, "version": 2}
    samples = []
    for tokens in documents:
        code = 0 if len(tokens) < 2**8 else 1
        shape = struct.pack("<BH" if code else "<BB", 4 + code, len(tokens))
        encoded = shape + tokens.tobytes()
        samples.append(struct.pack("<I", len(encoded)) + encoded)
    header = json.dumps(about).encode()
    content = with_offsets(samples, header)
    file.write_bytes(content)
    digest = {"xxh3_64": xxhash.xxh3_64_hexdigest(content)}
    raw = {"basename": file.name, "bytes": len(content), "hashes": digest}
    return about | {"raw_data": raw, "samples": len(samples), "zip_data": None}


def with_offsets(items, header=b""):
    """Items as in a shard of MDS and of litdata: after their number and offsets, and a header."""
    begin = 4 * (len(items) + 2) + len(header)
    offsets = np.cumsum([begin, *map(len, items)]).astype("<u4").tobytes()
    return b"".join([struct.pack("<I", len(items)), offsets, header, *items])


def write_format(folder, name, parts, dtype):
    """Write shards in any of the formats that we read, without its library."""
    folder.mkdir(parents=True)
    entries = []
    parts = [[tokens.astype(dtype) for tokens in part] for part in parts]
    for number, part in enumerate(parts):
        stem, content = folder / f"{number:05d}", b"".join(tokens.tobytes() for tokens in part)
        lengths = [len(tokens) for tokens in part]
        ends = np.cumsum([0, *lengths], dtype="<i8")
        if name == "megatron":
            stem.with_suffix(".bin").write_bytes(content)
            code = {"uint8": 1, "int32": 4, "uint16": 8}[dtype]
            header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(part), len(ends))
            places = ends[:-1] * np.dtype(dtype).itemsize, np.arange(len(ends), dtype="<i8")
            arrays = b"".join(each.tobytes() for each in (np.array(lengths, "<i4"), *places))
            stem.with_suffix(".idx").write_bytes(header + arrays)
        elif name == "mds":
            entries.append(mds_shard(folder / f"shard.{number:05d}.mds", dtype, part))
        elif name == "datatrove":
            Path(f"{stem}.ds").write_bytes(content)
            Path(f"{stem}.ds.index").write_bytes(ends[1:].tobytes())
            about = f"Unknown|{np.dtype(dtype).itemsize}\n{ends[-1]}\n"
            Path(f"{stem}.ds.metadata").write_text(about)
        elif name == "litdata":
            file = folder / f"chunk-0-{number}.bin"
            file.write_bytes(with_offsets([tokens.tobytes() for tokens in part]))
            sizes = {"chunk_bytes": file.stat().st_size, "chunk_size": len(part)}
            entries.append(sizes | {"dim": int(ends[-1]), "filename": file.name})
        elif name == "raw":
            stem.with_suffix(".npy").write_bytes(content)
            spans = "".join(f"{first},{end}\n" for first, end in itertools.pairwise(ends))
            stem.with_suffix(".csv.gz").write_bytes(gzip.compress(spans.encode()))
        else:
            with ShardWriter(stem.with_suffix(".tokens"), dtype) as writer:
                for tokens in part:
                    writer.add(tokens)
                entries.append(writer.close())
    if name == "mds":
        (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    elif name == "litdata":
        code = {"uint8": 11, "int32": 16, "uint16": 20}[dtype]
        config = {"compression": None, "data_format": [f"no_header_tensor:{code}"]}
        (folder / "index.json").write_text(json.dumps({"chunks": entries, "config": config}))
    elif name == "torchtitan":
        write_index(folder, name, entries)
    return folder


def token_streams(
    config, ranks, *, batch=4, seq_len=16, steps=None, once=False, groups=1, accumulation=1
):
    """Open the stream of each of `ranks` ranks; a step has `batch` samples."""
    tokenizer = ByteTokenizer()
    sources = open_token_sources(config, tokenizer, 258)
    packing = PackedTokens(tokenizer, seq_len, True, True, has_documents=True)
    of = {"seq_len": seq_len, "seed": 0, "steps": steps, "once": once, "accumulation": accumulation}
    of |= {"local_batch_size": batch // ranks // accumulation, "ranks": ranks, "groups": groups}
    return [TokenStream(config, sources, packing, rank=rank, **of) for rank in range(ranks)]


def rows(streams, steps):
    """Take steps from all ranks; return the samples, inputs and last target, in their order."""
    found = []
    for _ in range(steps):
        for stream in streams:
            batch = next(stream)
            found += np.concatenate([batch.tokens, batch.targets[:, -1:]], 1).tolist()
    return found


def saved(streams):
    """The merged state, through JSON."""
    return json.loads(json.dumps(merge_states([stream.state_dict() for stream in streams])))


def resume(streams, state):
    for stream in streams:
        stream.load_state_dict(state)
    return streams


def stream_of(config, source, tokenizer, *, seq_len, **part):
    """A stream of one rank without accumulation, unless `part` says otherwise."""
    packing = PackedTokens(tokenizer, seq_len, config.add_bos, config.add_eos, has_documents=True)
    part = {"accumulation": 1, "rank": 0, "ranks": 1, **part}
    return data.build_stream(config, source, packing, **part)


def build_stream(config, tokenizer, *, seq_len, seed=0, **part):
    source = open_source(config, tokenizer, seed=seed)
    return stream_of(config, source, tokenizer, seq_len=seq_len, **part)

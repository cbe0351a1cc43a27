"""Shards of tokens written by the libraries whose formats we read.

    python -m tests.foreign_shards FORMAT        writes its files in tests/data/tokens again
    python -m tests.foreign_shards FORMAT N TO   writes N documents in every case into TO

It needs megatron-core, mosaicml-streaming, datatrove and litdata, each only for its own cases.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

SAVED = Path(__file__).parent / "data/tokens"
SAVED_DOCUMENTS = 40
VOCABULARY = 50257


def documents(count):
    """Some documents, the same on every machine; every tenth has more than 256 tokens."""
    lengths = [1 + number * 37 % 61 + 300 * (number % 10 == 7) for number in range(count)]
    return [
        (np.arange(length, dtype=np.int64) ** 2 * 17 + number * 31) % VOCABULARY
        for number, length in enumerate(lengths)
    ]


def pieces(tokens):
    """Divide a document into sequences of at most 20 tokens."""
    return (tokens[begin : begin + 20] for begin in range(0, len(tokens), 20))


def megatron(folder, count, dtype, *, in_pieces=False):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for half in range(2):
        builder = IndexedDatasetBuilder(str(folder / f"part-{half}.bin"), dtype=dtype)
        for tokens in documents(count)[half * count // 2 : (half + 1) * count // 2]:
            if in_pieces:
                for piece in pieces(tokens):
                    builder.add_item(torch.from_numpy(piece))
                builder.end_document()
            else:
                builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        builder.finalize(str(folder / f"part-{half}.idx"))


def mds(folder, count, encoding, dtype, *, others=False):
    from streaming import MDSWriter

    columns = {"tokens": encoding} | ({"id": "str", "number": "int"} if others else {})
    shard = {"size_limit": 3000, "hashes": ["sha1", "xxh3_64"]}
    with MDSWriter(out=str(folder), columns=columns, **shard) as writer:
        for number, tokens in enumerate(documents(count)):
            stored = tokens.astype(dtype)
            sample = {"tokens": stored.tobytes() if encoding == "bytes" else stored}
            writer.write(sample | ({"id": "x" * (number % 9), "number": number} if others else {}))


def datatrove(folder, count, token_size):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for half in range(2):
        file = TokenizedFile(
            str(folder),
            f"part_{half:05d}_00000_shuffled.ds",
            save_loss_metadata=token_size == 2,
            tokenizer_name_or_path="gpt2",
            save_final_metadata=True,
            token_size=token_size,
        )
        for tokens in documents(count)[half * count // 2 : (half + 1) * count // 2]:
            file.write(tokens.tolist(), np.ones(len(tokens), bool) if token_size == 2 else None)
        file.close()
        file.write_final_metadata()


def litdata(folder, count, dtype, kind):
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    loader = None if kind == "items" else TokensLoader(block_size=8)
    # The loader of tokens counts tokens in a chunk, and others items.
    size = 12 if kind == "items" else 500
    writer = BinaryWriter(str(folder), chunk_size=size, item_loader=loader)
    for number, tokens in enumerate(documents(count)):
        stored = tokens.astype(dtype)
        writer[number] = stored if kind == "numpy" else torch.from_numpy(stored)
    writer.done()
    writer.merge()


CASES = {
    "megatron-uint16": lambda *at: megatron(*at, np.uint16),
    "megatron-int32": lambda *at: megatron(*at, np.int32, in_pieces=True),
    "mds-int32": lambda *at: mds(*at, "ndarray:int32", "int32"),
    "mds-columns": lambda *at: mds(*at, "ndarray", "uint16", others=True),
    "mds-bytes": lambda *at: mds(*at, "bytes", "int64", others=True),
    "datatrove-uint16": lambda *at: datatrove(*at, 2),
    "datatrove-uint32": lambda *at: datatrove(*at, 4),
    "litdata-uint16": lambda *at: litdata(*at, "uint16", "tensor"),
    "litdata-numpy": lambda *at: litdata(*at, "uint32", "numpy"),
    "litdata-items": lambda *at: litdata(*at, "int64", "items"),
}
"""The writer of each case; its name starts with that of our format."""


LIBRARIES = {"megatron": "megatron", "mds": "streaming", "datatrove": "datatrove"}
LIBRARIES |= {"litdata": "litdata"}


def write(format, folder, count):
    """Write the cases of a format, each into its folder."""
    for case in CASES:
        if case.startswith(format):
            (folder / case).mkdir(parents=True)
            CASES[case](folder / case, count)


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if rest:
        count, target = rest
        write(name, Path(target), int(count))
    else:
        for folder in SAVED.glob(f"{name}-*"):
            shutil.rmtree(folder)
        write(name, SAVED, SAVED_DOCUMENTS)

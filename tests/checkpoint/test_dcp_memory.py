"""What a rank reads of a large DCP checkpoint, and how much memory it needs for that.

The checkpoint has the shapes of a Llama of 1B with Adam's moments, 15 GB that eight ranks shared.
Its files are as torch writes them, but where the numbers would be there is a hole; blocks of one
shape share a file. One process is one rank of another world, whose collectives go nowhere.
"""

import ctypes
import gc
import math
import pickle
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import skip_data
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.checkpoint.dcp.items import Item, records
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.placement import load_into
from torchtitan.checkpoint.ranges import SPAN, MappedFiles
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.optim.parameters import local

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SAVED_BY, LOADED_BY = 8, 48
NOISE = 16 * 2**20
"""Bytes that Python and the allocator may need besides."""
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h: from how many bytes on a block is mapped by itself."""


def shapes():
    spec = MODELS["llama3"]
    model = build_empty(spec.build, spec.flavors["1B"], seq_len=1)
    weights = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    moments = [f"optimizer.state.{{}}.{moment}" for moment in ("exp_avg", "exp_avg_sq")]
    return {form.format(name): weights[name] for form in ("{}", *moments) for name in weights}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    tensors, places = {}, {}
    for name, shape in shapes().items():
        chunks = []
        for rank in range(SAVED_BY):
            rows, first = Shard.local_shard_size_and_offset(shape[0], SAVED_BY, rank)
            offsets, sizes = (first, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[metadata.MetadataIndex(name, offsets)] = item(folder, sizes)
        properties = metadata.TensorProperties(torch.float32)
        tensors[name] = metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, None, places)))
    return folder


def item(folder, sizes):
    """A block, made once, behind a byte: few items of DCP's files are at a multiple of 4 bytes."""
    file = folder / f"__0_{'x'.join(map(str, sizes))}.distcp"
    whole = folder / "saved"
    if not file.exists():
        with skip_data():
            torch.save(torch.empty(sizes), whole)
        begin, size, _ = records(MappedFiles(folder), Item("saved", 0, whole.stat().st_size), "")[
            "data/0"
        ]
        with whole.open("rb") as old, file.open("wb") as new:
            new.write(b"x" + old.read(begin))
            old.seek(begin + size)
            new.seek(1 + begin + size)
            new.write(old.read())
    return _StorageInfo(file.name, 1, file.stat().st_size - 1)


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=11, world_size=LOADED_BY)
    yield init_device_mesh("cpu", (LOADED_BY,))
    dist.destroy_process_group()


def give_back():
    """What was freed before goes to the kernel, so that a tensor made later counts when written.

    From now on what is large is given back as soon as it is freed: what glibc would keep of it
    depends on the tests that this process ran before.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    libc.malloc_trim(0)


def share_of(source, names, dim, world):
    """Tensors without memory yet, of which this rank has a part; small ones are whole."""
    give_back()
    found = {}
    for name in names:
        dtype, shape = source.shapes()[name]
        if len(shape) == 1:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        local, _ = Shard.local_shard_size_and_offset(shape[dim], LOADED_BY, world.get_rank())
        part = torch.empty([*shape[:dim], local, *shape[dim + 1 :]], dtype=dtype)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        found[name] = DTensor.from_local(
            part, world, [Shard(dim)], shape=torch.Size(shape), stride=tuple(strides)
        )
    return found


def anonymous():
    """Bytes of memory that is not a part of a file, which the kernel could take back."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


class Watched:
    """A source that remembers the most memory there was, and the bytes asked of files."""

    def __init__(self, source):
        give_back()
        self.source, self.before, self.most, self.largest = source, anonymous(), 0, 0
        self.asked = []

    def shapes(self):
        return self.source.shapes()

    def read(self, name, offsets=None, sizes=None):
        block = self.source.read(name, offsets, sizes)
        self.look()
        self.largest = max(self.largest, block.nbytes)
        return block

    def look(self):
        self.most = max(self.most, anonymous() - self.before)


def load_watched(tensors, source):
    """Load them, and look at the memory before each read, after each block, and at the end."""
    watched, read = Watched(source), MappedFiles.read

    def counted(files, name, begin, end):
        watched.asked.append(end - begin)
        watched.look()
        return read(files, name, begin, end)

    with patch.object(MappedFiles, "read", counted):
        load_into(tensors, watched)
    watched.look()
    return watched


@pytest.mark.gate
def test_a_rank_reads_its_share_and_needs_memory_for_it_and_one_block(large, world):
    source = DcpCheckpoint(large)
    total = sum(math.prod(shape) for shape in shapes().values()) * 4
    assert total > 14.8e9
    tensors = share_of(source, source.shapes(), 0, world)
    share = sum(local(tensor).nbytes for tensor in tensors.values())
    assert share < 1.01 * total / LOADED_BY
    watched = load_watched(tensors, source)
    assert watched.largest < 23e6  # of the embedding: 1 GB whole, 131 MB each item
    # Some of the small tensors are in memory that was there before.
    assert share - NOISE < watched.most < share + watched.largest + NOISE
    headers = 4000 * sum(len(entry.chunks) for entry in source.contents.tensors.values())
    assert share < sum(watched.asked) < share + headers
    assert max(watched.asked) == watched.largest


@pytest.mark.gate
def test_of_long_rows_a_part_is_taken_without_memory_for_all_of_them(large, world):
    """Columns: the rows that they are in are read through, a part at a time."""
    source = DcpCheckpoint(large)
    name = "tok_embeddings.weight"
    tensors = share_of(source, [name], 1, world)
    share = local(tensors[name]).nbytes
    watched = load_watched(tensors, source)
    assert watched.largest == share < 23e6
    assert share < watched.most < share + SPAN + NOISE
    assert max(watched.asked) <= SPAN
    assert sum(watched.asked) < math.prod(shapes()[name]) * 4 + 10**6

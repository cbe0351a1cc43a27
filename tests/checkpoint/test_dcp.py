"""Checkpoints of torch's distributed checkpoint: read block by block, and never run."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.utils.serialization import config

from tests import small_weights
from tests.small_weights import SPEC
from tests.unit.metrics.test_sinks import limited
from torchtitan.checkpoint import ranges
from torchtitan.checkpoint.dcp.items import Inert
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.manifest import Damaged
from torchtitan.config import ConfigError
from torchtitan.models import MODELS

TENSORS = {
    "matrix": torch.arange(24.0).view(4, 6),
    "half": torch.randn(5).bfloat16(),
    "eighth": torch.randn(3, 2).to(torch.float8_e4m3fn),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(15).view(3, 5).t(),
    "channels_last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "complex": torch.randn(2, dtype=torch.complex64),
}
VALUES = {"step": 3, "lr": 0.1, "betas": (0.9, 0.95), "loader": b"\x80\x04N.", "nothing": None}


@pytest.fixture(autouse=True)
def one_process():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled|.*single process")
        yield


def save(path, state):
    dcp.save(state, checkpoint_id=path)
    return path


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "step-3", {"tensors": TENSORS, "values": [VALUES]})


def test_everything_is_read_by_its_name(saved):
    checkpoint = DcpCheckpoint(saved)
    assert checkpoint.shapes() == {
        f"tensors.{name}": (t.dtype, tuple(t.shape)) for name, t in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.read(f"tensors.{name}"), tensor), name
    assert {n: checkpoint.value(n) for n in checkpoint.values()} == {
        f"values.0.{name}": value for name, value in VALUES.items()
    }


def test_enums_as_early_python_3_11_pickles_them(tmp_path, monkeypatch):
    def by_name(self, protocol):
        return getattr, (type(self), self.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    saved = save(tmp_path / "step-3", {"tensors": TENSORS, "values": [VALUES]})
    assert b"getattr" in (saved / ".metadata").read_bytes()
    test_everything_is_read_by_its_name(saved)


@pytest.mark.parametrize("name", ["matrix", "transposed", "eighth"])
def test_blocks_are_read(saved, name):
    checkpoint, whole = DcpCheckpoint(saved), TENSORS[name]
    rows, columns = whole.shape
    for top in range(rows):
        for left in range(columns):
            block = checkpoint.read(f"tensors.{name}", (top, left), (rows - top, columns - left))
            assert torch.equal(block, whole[top:, left:])


OF_TORCH_2_4 = Path(__file__).parent / "dcp_of_torch_2.4"
"""Written by torch 2.4.0 on two ranks that share `rows`, its moment and `columns`."""


def test_a_checkpoint_of_the_oldest_torch_is_read():
    checkpoint = DcpCheckpoint(OF_TORCH_2_4)
    rows = torch.arange(15.0).view(5, 3)
    assert torch.equal(checkpoint.read("rows"), rows)
    assert torch.equal(checkpoint.read("columns"), rows.bfloat16())
    moment = checkpoint.read("optimizer.state.rows.exp_avg", (2, 0), (2, 2))
    assert torch.equal(moment, 2 * rows[2:4, :2])
    assert checkpoint.value("optimizer.param_groups.0.betas") == (0.9, 0.95)
    assert checkpoint.value("dataloader.dp_rank_1") == b"private"


@pytest.mark.parametrize("folder", ["whole", "whole/sharded"])
def test_safetensors_that_dcp_wrote_are_read(tmp_path, folder):
    path, named = tmp_path / "whole", {name: TENSORS[name] for name in ("matrix", "half")}
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    dcp.save(named, storage_writer=writer)
    checkpoint = DcpCheckpoint(tmp_path / folder)
    for name, tensor in named.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert torch.equal(checkpoint.read("matrix", (1, 2), (2, 3)), TENSORS["matrix"][1:3, 2:5])


def shard(path, blocks):
    info = {name: {"saved_offsets": offsets} for name, (offsets, _) in blocks.items()}
    save_file({n: t for n, (_, t) in blocks.items()}, path, {"DCP_SHARDING_INFO": json.dumps(info)})


def two_shards(folder):
    whole = torch.arange(20.0).view(5, 4)
    folder.mkdir(exist_ok=True)
    shard(folder / "shard-1.safetensors", {"matrix": ((0, 0), whole[:3].clone())})
    shard(folder / "shard-2.safetensors", {"matrix": ((3, 0), whole[3:].clone())})
    return whole


def test_blocks_in_safetensors_are_put_together(tmp_path):
    whole = two_shards(tmp_path)
    assert torch.equal(DcpCheckpoint(tmp_path).read("matrix"), whole)
    assert torch.equal(DcpCheckpoint(tmp_path).read("matrix", (2, 1), (2, 3)), whole[2:4, 1:])


def test_safetensors_of_which_a_block_is_missing_are_refused(tmp_path):
    two_shards(tmp_path)
    (tmp_path / "shard-1.safetensors").unlink()
    with pytest.raises(Damaged, match=r"a file is missing.*matrix: its blocks do not add up"):
        DcpCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:6], "cut: it has 6 bytes"),
        (lambda data: data[:40], "cut: it has 40 bytes"),
        (lambda data: data[:-1], "cut: .*matrix ends at"),
        (lambda data: b"\xff" * 8 + data[8:], "cut"),
        (lambda data: data.replace(b'{"__', b"{[__"), "its header is invalid"),
        (lambda data: data.replace(b"[3,4]", b"[9,4]"), "its header is invalid"),
        (lambda data: data.replace(b"[0,48]", b'[0,"]'), "its header is invalid"),
        (
            lambda data: (8 + 9**5).to_bytes(8, "little") + b"[" * (8 + 9**5),
            "its header is invalid",
        ),
        (lambda data: data.replace(b'"F32"', b'"F99"'), "matrix: dtype F99 is not supported"),
    ],
)
def test_safetensors_with_a_header_that_lies_are_refused(tmp_path, change, message):
    two_shards(tmp_path)
    file = tmp_path / "shard-1.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        DcpCheckpoint(tmp_path)


def test_more_files_are_read_than_may_be_open(tmp_path, monkeypatch):
    """One of a thousand ranks has a file of each other."""
    for number in range(40):
        shard(tmp_path / f"shard-{number}.safetensors", {f"t{number}": ((0,), torch.ones(2))})
    monkeypatch.setattr(ranges, "MAPPED", 8)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, used + 20):
        checkpoint = DcpCheckpoint(tmp_path)
        assert all(checkpoint.read(name).sum() == 2 for name in checkpoint.shapes())


# --- attacks ---


class Attack:
    """Calls a function where it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Kept:
    """An object with an attack in its state, which torch's class of this name takes over."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return StorageMeta, (), self.state


def leaves(marker):
    text = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return [Attack(os.system, f"touch {marker}"), Attack(eval, text), Attack(exec, text)]


def metadata_of(saved):
    return pickle.loads((saved / ".metadata").read_bytes())


def with_attack(saved, attack, where):
    metadata = metadata_of(saved)
    if where == "whole":
        return attack
    if where == "planner_data":
        metadata.planner_data = {"tensors.matrix": ("tensors", [attack])}
    elif where == "a key":
        metadata.state_dict_metadata = [(attack, 1)]
    elif where == "a class's state":
        metadata.storage_meta = Kept({"checkpoint_id": attack})
    elif where == "an argument":
        metadata.storage_meta = Attack(torch.Size, (attack,))
    else:
        metadata.state_dict_metadata["tensors.matrix"].chunks[0].sizes = attack
    return metadata


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "where", ["whole", "planner_data", "a key", "a class's state", "an argument", "sizes"]
)
def test_metadata_that_attacks_is_refused_by_name(saved, number, where):
    marker = saved / "run"
    pickled = pickle.dumps(with_attack(saved, leaves(marker)[number], where))
    (saved / ".metadata").write_bytes(pickled)
    named = ["posix.system", "builtins.eval", "builtins.exec"][number]
    with pytest.raises(ConfigError, match=rf"\.metadata: refused: it names {named}, which"):
        DcpCheckpoint(saved)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # that this is an attack: who trusts it is its victim
        pickle.loads(pickled)
    assert marker.exists()


METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    "pickled",
    [
        METADATA + b"(N}Vx\nK\x01stb.",  # attributes for a class
        METADATA + b")\x81}V__setstate__\n" + METADATA + b"sb}b.",  # a class as __setstate__
        METADATA + b")\x81(N}V__class__\n" + METADATA + b"stb.",
        METADATA + b"(K\x01K\x02tR.",
        b"\x82\x01.",  # an extension of copyreg
        b"V1\nQ.",  # a persistent id
        b"ctorch\nfloat32\n(K\x01tR.",  # a dtype as a function
        b"ctorch\nfloat32\n}V__class__\nNsb.",
        b"",
        b"\x80\x04.",
        pickle.dumps({"state_dict_metadata": {}}),
    ],
)
def test_a_pickle_that_makes_no_sense_is_refused_and_leaves_no_trace(saved, pickled):
    before = dict(vars(Inert)), dict(vars(Metadata))
    (saved / ".metadata").write_bytes(pickled)
    with pytest.raises(Damaged, match=r"\.metadata: damaged"):
        DcpCheckpoint(saved)
    assert (dict(vars(Inert)), dict(vars(Metadata))) == before


def append_item(saved, name, content):
    """Have another content for a tensor or a value."""
    written = io.BytesIO()
    torch.save(content, written)
    metadata = metadata_of(saved)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    file = saved / metadata.storage_data[index].relative_path
    info = _StorageInfo(file.name, file.stat().st_size, len(written.getvalue()))
    metadata.storage_data[index] = info
    with file.open("ab") as opened:
        opened.write(written.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("nested", [False, True])
def test_items_that_attack_are_refused_by_name(saved, nested):
    marker = saved / "run"
    attack = leaves(marker)[0]
    content = {"state": [attack]} if nested else attack
    append_item(saved, "tensors.matrix", content)
    append_item(saved, "values.0.lr", content)
    checkpoint = DcpCheckpoint(saved)
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: tensors\.matrix: .*posix\.system"):
        checkpoint.read("tensors.matrix")
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: values\.0\.lr: refused"):
        checkpoint.value("values.0.lr")
    assert not marker.exists()


@pytest.mark.parametrize("outside", ["../x.distcp", "/etc/passwd", "a/../../b", "", "."])
def test_files_outside_the_folder_are_refused(saved, outside):
    metadata = metadata_of(saved)
    for info in metadata.storage_data.values():
        info.relative_path = outside
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"\.metadata: refused: it names a file outside"):
        DcpCheckpoint(saved)


# --- damage ---


def test_a_checkpoint_that_is_being_written_is_refused(saved):
    (saved / ".metadata").rename(saved / ".metadata.tmp")
    with pytest.raises(ConfigError, match="step-3: still being written, or never finished"):
        DcpCheckpoint(saved)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"not a checkpoint: it has no \.metadata"):
        DcpCheckpoint(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        DcpCheckpoint(tmp_path / "nowhere")


def test_ranks_that_saved_each_for_itself_are_refused(tmp_path):
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(ConfigError, match="each rank has its own metadata"):
        DcpCheckpoint(tmp_path)


def test_a_file_that_is_missing_or_cut_is_named_before_anything_is_read(saved):
    file = saved / "__0_0.distcp"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    with pytest.raises(Damaged, match=rf"__0_0\.distcp: cut: it has {size - 1:,} bytes; {size:,}"):
        DcpCheckpoint(saved)
    file.unlink()
    with pytest.raises(Damaged, match=r"__0_0\.distcp: No such file"):
        DcpCheckpoint(saved)


def test_compressed_items_are_refused_by_name(saved):
    metadata = metadata_of(saved)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"\.metadata: compressed or encrypted by .*stream\.zstd"):
        DcpCheckpoint(saved)


def blocks_of(metadata, *blocks):
    """Have other blocks for `tensors.matrix`, (4, 6), all of the same item."""
    name, index = "tensors.matrix", MetadataIndex("tensors.matrix", (0, 0))
    info = metadata.storage_data[index]
    metadata.state_dict_metadata[name].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in blocks
    ]
    for offsets, _ in blocks:
        metadata.storage_data[MetadataIndex(name, offsets)] = info


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "its blocks do not add up to (4, 6)"),
        ([((0, 0), (3, 6))], "its blocks do not add up to (4, 6)"),
        ([((0, 0), (5, 6))], "the block (5, 6) at (0, 0) is not within (4, 6)"),
        ([((0, 0), (24,))], "the block (24,) at (0, 0) is not within (4, 6)"),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "the blocks at (0, 0) and (1, 0) overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "the blocks at (0, 0) and (0, 2) overlap"),
    ],
)
def test_blocks_that_are_not_the_tensor_are_refused(saved, blocks, message):
    metadata = metadata_of(saved)
    blocks_of(metadata, *blocks)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match=rf"metadata: damaged: tensors.matrix: {re.escape(message)}"):
        DcpCheckpoint(saved)


def test_a_block_that_no_file_has_is_named(saved):
    metadata = metadata_of(saved)
    del metadata.storage_data[MetadataIndex("tensors.matrix", (0, 0))]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match=r"does not record where tensors\.matrix at \(0, 0\) is"):
        DcpCheckpoint(saved)


def test_exchanged_files_are_found_by_shape_and_dtype(saved, tmp_path):
    others = {name: torch.zeros(6, 4, dtype=t.dtype) for name, t in TENSORS.items()}
    other = save(tmp_path / "other", {"tensors": others, "values": [VALUES]})
    file = saved / "__0_0.distcp"
    data = (other / file.name).read_bytes()
    file.write_bytes(data + b"x" * max(0, file.stat().st_size - len(data)))
    append_item(saved, "tensors.half", TENSORS["half"].float())
    checkpoint = DcpCheckpoint(saved)
    with pytest.raises(Damaged, match=r"__0_0\.distcp: tensors\.matrix: (not the|damaged)"):
        checkpoint.read("tensors.matrix")
    with pytest.raises(
        Damaged, match=r"tensors\.half: not the saved file.*float32 \(5,\), wanted .*bf"
    ):
        checkpoint.read("tensors.half")


def read_all(path):
    checkpoint = DcpCheckpoint(path)
    for name in checkpoint.shapes():
        checkpoint.read(name)
    for name in checkpoint.values():
        checkpoint.value(name)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_whatever_bytes_are_there_an_error_is_in_words(saved, file):
    """Any other exception fails the test, and so does a file that is never found damaged."""
    path, dice, refused = saved / file, random.Random(0), 0
    data = path.read_bytes()
    for _ in range(200):
        flipped = bytearray(data)
        for _ in range(dice.choice((1, 3, 30))):
            flipped[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(flipped[: dice.choice((len(data), dice.randrange(len(data))))])
        try:
            read_all(saved)
        except ConfigError as error:
            refused += str(saved) in str(error)
    assert refused > 100


def test_flipped_bits_of_a_tensor_are_found_where_it_has_a_checksum(saved):
    assert set(DcpCheckpoint(saved).verify()) == {""}
    flip(saved / "__0_0.distcp", TENSORS["matrix"])
    found = set(DcpCheckpoint(saved).verify()) - {""}
    assert found == {
        f"{saved}/__0_0.distcp: tensors.matrix: damaged: its bytes differ from those saved"
    }


def flip(file, of):
    data = bytearray(file.read_bytes())
    at = data.index(of.numpy().tobytes())
    data[at + 1] ^= 1
    file.write_bytes(data)


def test_without_checksums_flipped_bits_cannot_be_known(tmp_path):
    with config.patch("save.compute_crc32", False):
        path = save(tmp_path / "step-3", {"tensors": TENSORS})
    flip(path / "__0_0.distcp", TENSORS["matrix"])
    assert set(DcpCheckpoint(path).verify()) == {None}
    assert not torch.equal(DcpCheckpoint(path).read("tensors.matrix"), TENSORS["matrix"])


# --- torchtitan checkpoint ls, verify, diff ---


def line_of(text, path):
    return next(" ".join(line.split()) for line in text.splitlines() if str(path) in line)


@pytest.mark.parametrize("folder", ["outputs", "a name as long as a path may well be, " * 5])
def test_ls_says_what_it_holds(folder, tmp_path, says):
    where = tmp_path / folder.strip()
    counters = {"step": torch.tensor(3), "ntokens_seen": torch.tensor(98_304)}
    state = {"weight": torch.ones(1000), "optimizer": {"state": {"weight": {"m": torch.ones(1)}}}}
    run = save(where / "step-3", {**state, "train_state": counters})
    weights = save(where / "step-4", {"weight": torch.ones(1000)})
    (save(where / "step-5", state) / ".metadata").unlink()
    said = says("checkpoint", "ls", where)
    assert line_of(said, run) == f"{run} 3 run 1 DCP 98,304 0.0 MB complete"
    assert line_of(said, weights) == f"{weights} weights 1 DCP 0.0 MB complete"
    assert "step-5: still being written, or never finished" in " ".join(said.split())


def test_verify_reads_every_item(saved, says):
    said = says("checkpoint", "verify", saved)
    assert f"{saved}: complete; every item matches its CRC-32. The format cannot tell" in said
    flip(saved / "__0_0.distcp", TENSORS["matrix"])
    assert "tensors.matrix: damaged: its bytes" in says("checkpoint", "verify", saved, status=1)
    (saved / ".metadata").write_bytes(pickle.dumps(Attack(os.getpid)))
    said = says("checkpoint", "verify", saved, status=1)
    assert ".metadata: refused: it names posix.getpid" in said


def test_verify_says_what_cannot_be_known(tmp_path, says):
    two_shards(tmp_path)
    said = says("checkpoint", "verify", tmp_path)
    assert "2 of 2 items were saved without checksums. The format cannot tell whether bits" in said


def test_diff_compares_tensors_and_values(saved, tmp_path, says):
    said = says("checkpoint", "diff", saved, saved)
    assert said.startswith(f"{len(TENSORS)} tensors are equal, 0 differ")
    tensors = {**TENSORS, "matrix": TENSORS["matrix"] + torch.eye(4, 6), "half": torch.ones(5)}
    values = {**VALUES, "lr": 0.2, "betas": (0.9, 0.99)}
    other = save(tmp_path / "other", {"tensors": tensors, "values": [values]})
    assert says("checkpoint", "diff", saved, other, status=1).splitlines() == [
        "tensors.matrix: off by 1 at most (4.3e-02 of the largest)",
        "tensors.half: bfloat16 (5,) -> float32 (5,)",
        "values.0.betas: (0.9, 0.95) -> (0.9, 0.99)",
        "values.0.lr: 0.1 -> 0.2",
        f"{len(TENSORS) - 2} tensors are equal, 1 differ in value, 1 of them weights",
    ]


def test_diff_compares_with_a_checkpoint_of_ours_under_our_names(tmp_path, monkeypatch, says):
    monkeypatch.setitem(MODELS, "small", SPEC)
    ours = small_weights.saved(tmp_path / "ours")
    theirs = small_weights.run(ours, tmp_path / "theirs", target_format="dcp")
    equal = len(small_weights.weights())
    said = says("checkpoint", "diff", ours, theirs)
    assert said.startswith(f"{equal} tensors are equal, 0 differ")
    weights = {name.removeprefix("model."): t for name, t in small_weights.weights().items()}
    weights["norm.weight"] = weights["norm.weight"] + 1
    other = save(tmp_path / "other", weights)
    said = says("checkpoint", "diff", other, ours, status=1)
    assert "model.norm.weight: off by 1 at most" in said

"""Where blocks of tensors are, by arithmetic; and headers of files that say otherwise."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from torchtitan.checkpoint.dcp.reader import problem_of_chunks
from torchtitan.checkpoint.layout import PlacedTensor, Placement, RankGroup, ranges_of
from torchtitan.checkpoint.manifest import Damaged, File, hash_file, read_manifest, write_manifest
from torchtitan.checkpoint.storage import Piece, SavedTensors, write_file, write_manifest_of

SHAPES = [(), (1,), (7,), (16,), (5, 3), (8, 6), (4, 0), (3, 5, 7)]


def drawn(dice, shape):
    """A placement on a mesh of up to three axes, inner ranks next to each other."""
    distance, axes = 1, []
    for _ in range(dice.randint(0, 3)):
        parts = dice.randint(2, 4)
        axes.append((parts, distance))
        distance *= parts
    is_cut = [bool(shape) and dice.random() < 0.7 for _ in axes]
    cuts = [
        (dice.randrange(len(shape)), *axis) for axis, cut in zip(axes, is_cut, strict=True) if cut
    ]
    dice.shuffle(cuts)
    copies = [axis for axis, cut in zip(axes, is_cut, strict=True) if not cut]
    return Placement(dice.randrange(3), tuple(cuts), tuple(copies)), distance


@pytest.mark.parametrize("seed", range(50))
def test_blocks_of_all_ranks_are_the_whole_tensor(seed):
    dice = random.Random(seed)
    for shape in SHAPES:
        placement, ranks = drawn(dice, shape)
        group = RankGroup(range(placement.first, placement.first + ranks), {})
        group.items = {"a": PlacedTensor(torch.float32, shape, placement)}
        found = group.find("a", tuple(map(range, shape)), None)
        if math.prod(shape):
            assert problem_of_chunks(shape, found) is None
            assert len({block.place for block in found}) == len(found)
        for block in found:
            assert block.place in group.ranks
        wanted = tuple(range(*sorted(dice.choices(range(n + 1), k=2))) for n in shape)
        overlapping = [
            block
            for block in found
            if all(
                max(want.start, at) < min(want.stop, at + size)
                for want, at, size in zip(wanted, block.offsets, block.sizes, strict=True)
            )
        ]
        assert group.find("a", wanted, None) == overlapping


def test_copies_take_turns_by_their_bytes_and_few_of_them_write():
    """Also where each node writes for itself; a node without a copy has none."""
    many = Placement(0, ((0, 2, 1),), ((16, 2),))
    items = {f"w{n}": PlacedTensor(torch.float32, (2 + n, 10_000), many) for n in range(64)}
    items |= {f"small{n}": PlacedTensor(torch.float32, (8,), many) for n in range(8)}
    group = RankGroup(range(32), items)
    load = dict.fromkeys(range(32), 0)
    for name, item in items.items():
        for block in group.find(name, tuple(map(range, item.shape)), None):
            load[block.place] += math.prod(block.sizes)
    writers = [size for size in load.values() if size]
    assert len(writers) == 16, "eight copies of two blocks"
    assert max(writers) < 1.5 * min(writers)
    assert {group.writer(f"small{n}", 0, None) for n in range(8)} == {0}
    assert group.writer("w0", 1, {3, 4, 5}) in (3, 5)
    assert group.writer("w0", 1, {2, 4}) is None
    assert group.find("w0", (range(2), range(10_000)), {2, 4}) is None


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_ranks(seed):
    dice = random.Random(seed)
    ranks = sorted(dice.sample(range(60), dice.randrange(40)))
    assert [rank for each in ranges_of(ranks) for rank in range(*each)] == ranks
    assert ranges_of(range(3, 1000, 8)) == [[3, 996, 8]]


@pytest.fixture
def halves(tmp_path):
    """A tensor in the files of two ranks."""
    items = {"a": PlacedTensor(torch.float32, (4, 2), Placement(0, ((0, 2, 1),)))}
    files, whole = {}, torch.arange(8.0).view(4, 2)
    for rank in range(2):
        piece = Piece("a", torch.float32, (4, 2), (2 * rank, 0), (2, 2))
        written = write_file(
            tmp_path / f"rank-{rank}.safetensors", [(piece, whole[2 * rank : 2 * rank + 2])]
        )
        files[written.name] = written.file
    what = {"step": 1, "model_only": True, "ranks": 2, "layout": {}}
    write_manifest_of(tmp_path, files, {}, [RankGroup([0, 1], items)], {"a": 0}, **what)
    assert torch.equal(SavedTensors(tmp_path).read("a"), whole)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ('"F32"', '"I32"', r"a is torch.int32 \(2, 2\) at \(2, 0\), and is torch.float32 \(2, 2\)"),
        ('"shape":[2,2]', '"shape":[4,1]', r"a is torch.float32 \(4, 1\) at \(2, 0\), and"),
        ("[2,0]", "[0,0]", r"a is torch.float32 \(2, 2\) at \(0, 0\), and is .* at \(2, 0\) by"),
        ("[2,0]", "null ", "it does not tell where a is"),
        ('"a"', '"b"', "it does not tell where a is"),
        ('"data_offsets":[0,16]', '"data_offsets":[0,64]', "its header is invalid"),
        ('"shape":[2,2]', '"shape":[9,9]', "its header is invalid"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(before, after, told, halves):
    """Though the manifest has the hash of the file as it is."""
    path = halves / "rank-1.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].decode().replace(before, after)
    assert len(header) == end - 8
    assert header != data[8:end].decode()
    path.write_bytes(data[:8] + header.encode() + data[end:])
    manifest = read_manifest(halves)
    files = manifest.files | {path.name: File(*hash_file(path))}
    write_manifest(halves, replace(manifest, files=files))
    saved = SavedTensors(halves)
    assert saved.read("a", (0, 0), (2, 2)).sum() == 6, "of the other file"
    with pytest.raises(Damaged, match=rf"{path}: .*{told}"):
        saved.read("a")


def test_a_row_of_a_manifest_for_a_file_that_is_not_there(halves):
    (halves / "rank-1.safetensors").unlink()
    with pytest.raises(Damaged, match=r"rank-1.safetensors: No such file"):
        SavedTensors(halves).read("a")
    content = json.loads((halves / "manifest.json").read_text())
    assert content["placements"] == [[0, [[0, 2, 1]], []]]


@pytest.mark.parametrize("name", ["rank-1.safetensors", "a"])
def test_a_row_of_a_manifest_that_is_there_twice(name, halves):
    """The last one would count, and so the manifest have its own hash."""
    path = halves / "manifest.json"
    content = path.read_text()
    assert f'"{name}": ' in content
    path.write_text(content.replace(f'"{name}": ', f'"{name}": 0, "{name}": ', 1))
    with pytest.raises(Damaged, match=rf"{path}: damaged: {name} is in it twice"):
        SavedTensors(halves)


def test_a_file_that_is_not_in_the_manifest_is_not_read(halves):
    """It may be of another save."""
    manifest = read_manifest(halves)
    files = {name: file for name, file in manifest.files.items() if name != "rank-1.safetensors"}
    write_manifest(halves, replace(manifest, files=files))
    with pytest.raises(Damaged, match=r"manifest.json: damaged: it has no rank-1.safetensors"):
        SavedTensors(halves).read("a")


def test_copies_in_different_groups_leave_no_block_without_a_writer():
    """Replicas that differ name their copies apart, and ranks of a tensor may have other states."""
    item = PlacedTensor(torch.float32, (4, 2), Placement(0, ((0, 2, 1),), ((2, 2),)))
    whole = (range(4), range(2))
    first, other = RankGroup([0, 1], {"a": item}), RankGroup([2, 3], {"copy.1.a": item})
    assert [block.place for block in first.find("a", whole, None, [first, other])] == [0, 1]
    assert [block.place for block in other.find("copy.1.a", whole, None, [first, other])] == [2, 3]
    even, odd = RankGroup([0, 2], {"a": item}), RankGroup([1, 3], {"a": item, "more": item})
    assert [block.place for block in even.find("a", whole, None, [even, odd])] == [0, 1]
    assert even.find("a", whole, None, [even]) is None

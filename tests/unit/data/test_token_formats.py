"""Shards of other software: read as it wrote them, and refused by file and byte if damaged."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.foreign_shards import CASES, LIBRARIES, SAVED, SAVED_DOCUMENTS, documents
from tests.tables import table
from tests.token_shards import write_format
from torchtitan.config import ConfigError
from torchtitan.config.node_files import POINTER
from torchtitan.data.settings import DataConfig
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens import index_cache
from torchtitan.data.tokens.formats import TOKEN_FORMATS, TokenFormat, root_of
from torchtitan.data.tokens.index import TokenDocuments
from torchtitan.data.tokens.index_cache import find_format, index_folder, open_tokens
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.remote import location
from torchtitan.tools.cli import main
from torchtitan.tools.data import differences

VOCABULARY = 50257
FORMATS = sorted(set(TOKEN_FORMATS) - {"auto"})


class Gpt2(ByteTokenizer):
    """A tokenizer of GPT-2's size, as far as formats ask."""

    vocab_size = VOCABULARY
    eos = VOCABULARY - 1


def opened(path, cache, format=None):
    found = find_format(path, format or TokenFormat())
    assert found is not None
    return open_tokens(path, found, Gpt2(), VOCABULARY, cache)


def all_tokens(found):
    return [found.read(number).tolist() for number in range(len(found))]


def expected(count):
    return [tokens.tolist() for tokens in documents(count)]


def write(folder, name, count=12, dtype="uint16"):
    """Write documents in a format, into two shards."""
    written = documents(count)
    return write_format(folder, name, (written[: count // 2], written[count // 2 :]), dtype)


def edit(file, change):
    """Change a file, but not its time: as a disk does."""
    before = file.stat()
    file.write_bytes(change(bytearray(file.read_bytes())))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(byte, bit=0):
    def change(content):
        content[byte] ^= 1 << bit
        return bytes(content)

    return change


def say(old, new):
    return lambda content: content.decode().replace(old, new, 1).encode()


CHANGES = {
    "flip": flip,
    "say": say,
    "put": lambda byte, new: lambda content: content[:byte] + bytes([new]) + content[byte + 1 :],
    "cut": lambda size: lambda content: content[:size],
    "grow": lambda size: lambda content: content + bytes(size),
    # As a file is in a clone without Git LFS.
    "point": lambda: lambda content: POINTER + b"v1\n",
}


def change_of(words):
    """The change that a row of `damage.txt` names."""
    name, *arguments = shlex.split(words)
    return CHANGES[name](*(int(each) if each.isdigit() else each for each in arguments))


# --- what other software wrote ---


@pytest.mark.parametrize("case", CASES)
def test_files_of_each_library_are_read(case, tmp_path):
    found = opened(SAVED / case, tmp_path)
    assert found.description.format == case.partition("-")[0]
    assert all_tokens(found) == expected(SAVED_DOCUMENTS)
    assert found.description.content is not None, "small shards have checksums"


@pytest.mark.gate
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_thousand_documents_of_each_library(name, tmp_path):
    python = os.environ.get("TORCHTITAN_ORACLES", sys.executable)
    if python == sys.executable and importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(
            f"{LIBRARIES[name]} is not installed; TORCHTITAN_ORACLES may name the Python of an "
            "environment that has it"
        )
    command = [python, "-W", "ignore", "-m", "tests.foreign_shards", name, "1000", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cases = [case for case in CASES if case.startswith(name)]
    assert cases
    for case in cases:
        assert all_tokens(opened(tmp_path / case, tmp_path)) == expected(1000)


# --- damage ---


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_anywhere_is_found(name, tmp_path):
    shards, saved = write(tmp_path / "shards", name), tmp_path / "saved"
    format = TOKEN_FORMATS[name]()
    open_tokens(shards, format, Gpt2(), VOCABULARY, tmp_path)
    index = index_folder(shards, format, Gpt2(), tmp_path)
    recorded = TokenDocuments(root_of(shards), index, 2**63)
    # Names and settings in text may change without harm to the tokens.
    files = [each for each in shards.iterdir() if each.suffix not in (".json", ".metadata", ".gz")]
    place = st.sampled_from(sorted(files)).flatmap(
        lambda file: st.tuples(st.just(file), st.integers(0, file.stat().st_size - 1))
    )

    def found():
        return list(differences(shards, format, Gpt2(), index, recorded, 1, lambda size: None))

    assert found() == []

    @settings(max_examples=40, suppress_health_check=[*HealthCheck])
    @given(place, st.integers(0, 7))
    def check(place, bit):
        file, byte = place
        shutil.copy2(file, saved)
        edit(file, flip(byte, bit))
        try:
            assert any(re.search(r"/[\w.-]+: .*(byte [\d,]+|xxh3_64)", line) for line in found())
        finally:
            shutil.copy2(saved, file)

    check()


PAYLOAD = {"megatron": "*.bin", "mds": "*.mds", "datatrove": "*.ds", "litdata": "*.bin"}
PAYLOAD |= {"raw": "*.npy", "torchtitan": "*.tokens"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_byte_of_tokens_is_refused(name, tmp_path):
    shards = write(tmp_path / "shards", name)
    found = opened(shards, tmp_path)
    file = sorted(shards.glob(PAYLOAD[name]))[-1]
    last = len(found) - 1
    start = file.stat().st_size - 2 * len(found.read(last))
    edit(file, flip(file.stat().st_size - 2))
    message = f"{file}: document 5, byte {start:,}: damaged"
    with pytest.raises(ConfigError, match=re.escape(message)):
        opened(shards, tmp_path).read(last)
    # The default tokenizer of the command line, of bytes, has another index of raw tokens.
    if name != "raw":
        assert main(["data", "verify", str(shards), "--cache", str(tmp_path)]) == 1


MDS, DS, BIN = "shard.00000.mds", "00000.ds", "chunk-0-0.bin"


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_refused_by_file_and_byte(format, tmp_path):
    whole, unseen = write(tmp_path / "whole", format), []
    for number, (name, file, change, message) in enumerate(table(__file__, "damage.txt")):
        if name != format:
            continue
        shards = shutil.copytree(whole, tmp_path / f"{number}/shards")
        edit(shards / file, change_of(change))
        named = "" if file == "index.json" else re.escape(f"{file}")
        try:
            opened(shards, tmp_path / f"{number}", TOKEN_FORMATS[name]())
        except ConfigError as error:
            found = str(error)
        else:
            found = "it is read"
        if not re.search(f"{named}:.*{message}", found):
            unseen.append(f"{file}, {message}: {found}")
    assert not unseen


def test_a_missing_file_is_named(tmp_path):
    for name, file in (
        *(("megatron", "00000.bin"), ("mds", MDS)),
        *(("litdata", BIN), ("datatrove", f"{DS}.index")),
    ):
        shards = write(tmp_path / name, name)
        (shards / file).unlink()
        with pytest.raises(ConfigError, match=rf"{file}: it is missing.*restore it"):
            opened(shards, tmp_path, TOKEN_FORMATS[name]())


def rewrite(file, **changes):
    """Change the entry of every shard in an `index.json` of MDS, and in the shard."""
    index = json.loads(file.read_text())
    index["shards"] = [entry | changes for entry in index["shards"]]
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("pkl", "the column tokens is pickled, which could run code"),
        ("ndarray:float", "has the encoding ndarray:float"),
        ("str", "has the encoding str; wanted bytes, or an ndarray"),
    ],
)
def test_a_column_that_has_no_tokens_is_refused(encoding, message, tmp_path):
    shards, old = write(tmp_path / "shards", "mds", dtype="int32"), json.dumps(["ndarray:int32"])
    with pytest.raises(ConfigError, match="no column input_ids; set `column` to one of tokens"):
        opened(shards, tmp_path, TOKEN_FORMATS["mds"](column="input_ids"))
    rewrite(shards / "index.json", column_encodings=[encoding])
    new = json.dumps([encoding])[:-1].ljust(len(old) - 1) + "]"
    for file in shards.glob("*.mds"):
        edit(file, lambda content: content.replace(old.encode(), new.encode()))
    with pytest.raises(ConfigError, match=message):
        opened(shards, tmp_path, TOKEN_FORMATS["mds"]())


def test_compressed_shards_are_read_once_decompressed(tmp_path):
    shards = write(tmp_path / "shards", "mds")
    rewrite(shards / "index.json", zip_data={"basename": f"{MDS}.zstd"}, compression="zstd")
    (shards / MDS).rename(tmp_path / MDS)
    with pytest.raises(ConfigError, match=rf"{MDS}.zstd: a compressed shard; decompress all"):
        opened(shards, tmp_path)
    (tmp_path / MDS).rename(shards / MDS)
    assert all_tokens(opened(shards, tmp_path)) == expected(12)


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_index_of_several_folders_counts_their_shards_once(is_merged, tmp_path):
    index = {"version": 2, "shards": []}
    for name in ("a", "b"):
        folder = write(tmp_path / "shards" / name, "mds")
        for entry in json.loads((folder / "index.json").read_text())["shards"]:
            entry["raw_data"]["basename"] = f"{name}/{entry['raw_data']['basename']}"
            index["shards"].append(entry)
    if is_merged:
        (tmp_path / "shards/index.json").write_text(json.dumps(index))
    assert all_tokens(opened(tmp_path / "shards", tmp_path)) == 2 * expected(12)


@pytest.mark.parametrize("name", ["megatron", "mds", "datatrove", "litdata", "raw"])
def test_shards_of_two_dtypes_are_refused(name, tmp_path):
    wide = {"raw": "uint32", "datatrove": "uint32"}.get(name, "int32")
    write(tmp_path / "shards/a", name)
    write(tmp_path / "shards/b", name, dtype=wide)
    if name == "raw":  # only a header says that a file has another dtype than the rest
        for file in (tmp_path / "shards/b").glob("*.npy"):
            np.save(file, np.fromfile(file, wide).astype("int32"))
    with pytest.raises(ConfigError, match=r"b/.*: its tokens are u?int32, .* of a/.* uint16"):
        opened(tmp_path / "shards", tmp_path)


def test_tokens_of_two_dtypes_in_a_shard_are_refused(tmp_path):
    shards = shutil.copytree(SAVED / "mds-columns", tmp_path / "shards")
    file = shards / MDS
    edit(file, lambda content: bytes(content.replace(b"\0\0\x10\x04&", b"\0\0\x11\x04&", 1)))
    with pytest.raises(ConfigError, match=rf"{MDS}: byte \d+: sample 1 has the dtype int16"):
        opened(shards, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_outside_the_vocabulary_are_refused(name, tmp_path):
    shards = write(tmp_path / "shards", name)
    found = open_tokens(shards, TOKEN_FORMATS[name](), Gpt2(), 1000, tmp_path)
    number = next(n for n, tokens in enumerate(expected(12)) if max(tokens) >= 1000)
    with pytest.raises(ConfigError, match=r"byte [\d,]+: token \d+ is outside of the"):
        found.read(number)


def test_tokens_that_the_tokenizer_does_not_have_are_refused(tmp_path):
    """A model may have more, but no text would have them."""
    shards = write(tmp_path / "shards", "megatron")
    config = DataConfig(dataset=str(shards), cache=str(tmp_path))
    sources = open_token_sources(config, ByteTokenizer(), VOCABULARY)
    assert sources is not None
    with pytest.raises(ConfigError, match=r"is outside of the vocabulary of 258; it was made with"):
        all_tokens(sources[0].documents)


# --- raw tokens ---


def raw(file, tokens, dtype="<u2"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(np.array(tokens, dtype).tobytes())
    return file


def test_raw_tokens_are_divided_by_the_token_that_ends_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.data.tokens.raw.BLOCK", 10)
    end = Gpt2.eos
    file = raw(tmp_path / "a/b.npy", [*range(25), end, end, *range(30, 44), end, 7])
    wanted = [[*range(25), end], [end], [*range(30, 44), end], [7]]
    assert all_tokens(opened(file, tmp_path)) == wanted
    assert all_tokens(opened(tmp_path / "a", tmp_path)) == wanted
    settings = {"dtype": "uint16", "end": 24, "suffix": ".npy"}
    by_another = opened(file, tmp_path, TOKEN_FORMATS["raw"](**settings))
    assert [len(tokens) for tokens in all_tokens(by_another)] == [25, 18]


def test_raw_tokens_of_another_tokenizer_are_refused(tmp_path):
    other = raw(tmp_path / "a.npy", [1, 2, 3] * 6)
    with pytest.raises(ConfigError, match=r"byte 0: no document ends: none of its 18 tokens \(uin"):
        opened(other, tmp_path)
    wider = raw(tmp_path / "b.npy", [1, 2, 3, Gpt2.eos] * 6, "<u4")
    with pytest.raises(ConfigError, match=r"byte 0: every second uint16 is 0, as in wider"):
        opened(wider, tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("start,end\n", ":1: wanted the start and end of a document"),
        ("0,4\n3,8\n", ":2: a document from token 3 to 8; wanted after 4"),
        ("0,4\n4,9\n", ":2: a document from token 4 to 9; wanted after 4, and within the 8"),
        ("0,4\n", ":1: the documents end at token 4, and the file has 8 of uint16; set `dtype`"),
    ],
)
def test_lines_of_documents_are_verified(lines, message, tmp_path):
    import gzip

    file = raw(tmp_path / "a.npy", range(8))
    with gzip.open(tmp_path / "a.csv.gz", "wt") as stream:
        stream.write("0,5,name,0\n5,8,name,1\n")
    assert all_tokens(opened(file, tmp_path)) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    with gzip.open(tmp_path / "a.csv.gz", "wt") as stream:
        stream.write(lines)
    os.utime(file, (1, 1))
    with pytest.raises(ConfigError, match=f"a.csv.gz{message}"):
        opened(file, tmp_path)


def test_a_real_npy_is_read_by_its_header(tmp_path, caplog):
    end = Gpt2.eos
    np.save(tmp_path / "a.npy", np.array([1, 2, end, 3, end], np.int32))
    np.save(tmp_path / "b.npy", np.arange(6, dtype=np.uint16).reshape(2, 3))
    with caplog.at_level("INFO", "torchtitan"):
        assert all_tokens(opened(tmp_path / "a.npy", tmp_path)) == [[1, 2, end], [3, end]]
    assert "a.npy: int32 (5,)" in caplog.text
    assert all_tokens(opened(tmp_path / "b.npy", tmp_path)) == [[0, 1, 2], [3, 4, 5]]


def test_other_arrays_are_refused(tmp_path):
    for array, message in (
        (np.zeros(3, np.float32), "a .npy of <f4; wanted little-endian integers"),
        (np.zeros(3, ">i4"), "a .npy of >i4; wanted little-endian integers"),
        (np.zeros((2, 3), np.uint16, order="F"), r"a .npy of shape \(2, 3\)"),
        (np.zeros((1, 2, 3), np.uint16), r"a .npy of shape \(1, 2, 3\)"),
        (np.array([{}]), "a .npy that NumPy cannot map"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ConfigError, match=f"a.npy: byte 0: {message}"):
            opened(tmp_path / "a.npy", tmp_path)


# --- indices and verbs ---


@pytest.mark.parametrize("name", FORMATS)
def test_shards_on_a_store_are_read_and_indexed(name, tmp_path):
    folder = location(f"memory://formats/{name}")
    for file in write(tmp_path / "shards", name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert all_tokens(opened(folder, tmp_path)) == expected(12)
    settings = ["--set", "dtype=uint16"] if name == "raw" else []
    assert main(["data", "index", str(folder), "--cache", str(tmp_path), *settings]) == 0
    assert name == "raw" or opened(folder, tmp_path).description.content is not None


def test_large_shards_have_no_checksums_until_they_are_recorded(tmp_path, monkeypatch, caplog):
    shards, words = write(tmp_path / "shards", "megatron"), ["--cache", str(tmp_path)]
    monkeypatch.setattr(index_cache, "LIMIT", 500)
    monkeypatch.setattr(index_cache, "PART", 100)
    assert opened(shards, tmp_path).description.content is None
    assert "have no checksums, so a changed byte in the tokens would go unnoticed" in caplog.text
    assert main(["data", "verify", str(shards), *words]) == 2
    assert main(["data", "index", str(shards), *words, "--processes", "2"]) == 0
    found = opened(shards, tmp_path)
    assert found.description.content is not None
    assert all_tokens(found) == expected(12)
    assert main(["data", "verify", str(shards), *words, "--processes", "2"]) == 0


def test_recorded_digests_of_files_are_compared(tmp_path, capsys, says):
    shards, words = shutil.copytree(SAVED / "mds-int32", tmp_path / "x"), ["--cache", str(tmp_path)]
    assert main(["data", "index", str(shards), *words]) == 0
    edit(shards / "index.json", say('"sha1": "', '"sha1": "0'))
    damage = f"{shards / MDS}: damaged: its sha1 is not what its index says"
    capsys.readouterr()
    assert damage in says("data", "verify", shards, *words, status=1)
    assert damage in says("data", "index", shards, *words, status=2)


def test_options_of_formats(tmp_path, says):
    shards = write(tmp_path / "shards", "mds")
    for words, message in (
        (["--format", "megatorn"], "--format: got megatorn\n  did you mean megatron?"),
        (["--set", "colum=x"], "--set colum: Extra inputs are not permitted"),
        (["--format", "raw"], "no tokens in the format raw"),
    ):
        assert message in says("data", "index", shards, *words, status=2)

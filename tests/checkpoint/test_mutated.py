"""Data, checkpoints and weights that something broke: refused in words, or read right."""

import gzip
import json
import random
import shutil
import warnings
from functools import partial
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.mutations import mutate
from tests.small_weights import run, saved
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.weights.opening import OPEN, find_format, open_ours
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, check_local, load_tokenizer, open_source, train_bpe

pytestmark = pytest.mark.usefixtures("small")

DOCUMENTS = 30
LINES = "".join(json.dumps({"text": f"document {n} é"}) + "\n" for n in range(DOCUMENTS))
CASES = 1000


def write_text(folder):
    (folder / "a.txt").write_text("some text\n" * 50, encoding="utf-8")
    (folder / "b.txt").write_text("é other text\n" * 50, encoding="utf-8")


def write_jsonl(folder):
    (folder / "a.jsonl").write_text(LINES, encoding="utf-8")
    (folder / "b.jsonl").write_text(LINES, encoding="utf-8")


def write_gzip(folder):
    for name in ("a", "b"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(LINES.encode(), mtime=0))


def write_zstd(folder):
    for name in ("a", "b"):
        with pyarrow.output_stream(str(folder / f"{name}.jsonl.zst"), compression="zstd") as file:
            file.write(LINES.encode())


def write_parquet(folder):
    table = pyarrow.table({"text": [f"document {n}" for n in range(DOCUMENTS)]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=10)


def write_tokenizer(folder):
    train_bpe([LINES] * 20, 300, folder / "tokenizer.json")
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def write_ours(folder):
    shutil.copytree(saved(folder.parent / "ours-of-it"), folder, dirs_exist_ok=True)


def write_foreign(folder, **options):
    made = run(saved(folder.parent / "ours-of-it"), folder.parent / "made", **options)
    shutil.copytree(made, folder, dirs_exist_ok=True)


def write_dcp(folder):
    state = {"model.a": torch.arange(40.0).view(8, 5), "model.b": torch.ones(3), "step": 7}
    with warnings.catch_warnings(action="ignore"):  # that one process saves, which is meant
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def read_data(folder):
    config = DataConfig(dataset=str(folder))
    check_local(config)
    source = open_source(config, load_tokenizer(None), seed=0)
    return [found.content for found in islice(source.read({0: None}, 1)[0], 2 * DOCUMENTS)]


def read_tokenizer(folder):
    tokenizer = load_tokenizer(str(folder))
    return tokenizer.decode(tokenizer.encode("document 7"))


def read_all(source):
    return {name: source.read(name) for name in source.shapes()}


def read_weights(folder, kind):
    return read_all(OPEN[kind](folder, None, None).source)


KINDS = {
    "text": (write_text, read_data),
    "jsonl": (write_jsonl, read_data),
    "gzip": (write_gzip, read_data),
    "zstd": (write_zstd, read_data),
    "parquet": (write_parquet, read_data),
    "tokenizer": (write_tokenizer, read_tokenizer),
    "ours": (write_ours, lambda folder: read_all(open_ours(folder, None, None).source)),
    "hf": (partial(write_foreign, max_shard_size="50KB"), partial(read_weights, kind="hf")),
    "meta": (partial(write_foreign, target_format="meta"), partial(read_weights, kind="meta")),
    "dcp": (write_dcp, lambda folder: read_all(DcpCheckpoint(folder))),
}
"""How a folder of each kind is written, and read whole."""
KEPT = {"parquet": [925]}
"""Cases beyond those of every day that were neither refused nor read, once: a row group that had
fewer rows than the file said."""
PROVED = {"ours"}
"""What has digests: it is read as it was, or refused."""


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return bool(a == b)


def break_often(kind, cases, folder):
    write, read = KINDS[kind]
    whole = folder / "whole"
    whole.mkdir()
    write(whole)
    original = read(whole)
    refused = 0
    for case in cases:
        broken = folder / "broken"
        shutil.copytree(whole, broken)
        what = mutate(broken, random.Random(case))
        try:
            found = read(broken)
        except ConfigError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {case}, {what}: {error!r}") from error
        else:
            is_moved = what.startswith(("rename", "remove", "exchange", "make_folder"))
            assert kind not in PROVED or is_moved or same(found, original), f"case {case}, {what}"
        shutil.rmtree(broken)
    assert refused > len(cases) // 10


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_broken_is_refused_or_read_right(kind, tmp_path):
    break_often(kind, [*range(30), *KEPT.get(kind, [])], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_ways_to_break_it(kind, tmp_path):
    break_often(kind, range(CASES), tmp_path)


def test_the_kinds_of_weights_are_told_apart(tmp_path):
    for kind in ("ours", "hf", "meta"):
        folder = tmp_path / kind / "whole"
        folder.mkdir(parents=True)
        KINDS[kind][0](folder)
        assert find_format(folder) == kind

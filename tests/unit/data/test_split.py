"""A part of one's own documents is held out: which ones, from what, and that it stays so."""

import itertools
from typing import ClassVar

import pytest

from tests.token_shards import write_texts
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, RecipeError
from torchtitan.data import DataConfig, load_tokenizer, open_source
from torchtitan.data.discovery import SUFFIXES, find_files
from torchtitan.data.documents import FORMATS, open_documents
from torchtitan.data.order import drawn_order
from torchtitan.data.sources import DocumentsPart, ShuffledDocuments, are_held_out
from torchtitan.provenance import to_toml
from torchtitan.trainer import main as train

TEXTS = [f"document {number}\n" for number in range(200)]
FRACTION = 0.2


every_format = pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])


def config(folder, fraction=FRACTION):
    return DataConfig(dataset=str(folder), document_bytes=14, validation_fraction=fraction)


def read(config, seed=0):
    """One epoch, in the order of a run on one lane."""
    source = open_source(config, load_tokenizer(None), seed=seed)
    documents = source.read({0: None}, 1)[0]
    count = source.identity["documents"]
    assert isinstance(count, int)
    return [next(documents).content for _ in range(count)]


def parts(folder, seed=0):
    """Documents that are trained on, and those that are held out."""
    own = config(folder)
    return read(own, seed), read(own.held_out(), seed)


@every_format
def test_parts_are_disjoint_and_complete(suffix, tmp_path):
    write_texts(tmp_path / f"a{suffix}", TEXTS[:120], 7)
    write_texts(tmp_path / f"b{suffix}", TEXTS[120:], 7)
    whole = read(config(tmp_path, None))
    trained, held_out = parts(tmp_path)
    assert len(whole) == len(set(whole))
    assert sorted(trained + held_out) == sorted(whole)
    assert not set(trained) & set(held_out)
    assert 0.1 < len(held_out) / len(whole) < 0.3


@every_format
def test_what_is_held_out_stays_when_documents_are_added(suffix, tmp_path):
    write_texts(tmp_path / f"b{suffix}", TEXTS[:100], 7)
    before = parts(tmp_path)
    write_texts(tmp_path / f"b{suffix}", TEXTS[:150], 7)
    write_texts(tmp_path / f"a{suffix}", TEXTS[150:], 7)
    after = parts(tmp_path)
    assert set(before[0]) < set(after[0])
    assert set(before[1]) < set(after[1])


@every_format
def test_the_seed_changes_the_order_alone(suffix, tmp_path):
    write_texts(tmp_path / f"a{suffix}", TEXTS, 7)
    first, other = parts(tmp_path, 0), parts(tmp_path, 1)
    assert first != other
    assert [sorted(part) for part in first] == [sorted(part) for part in other]
    (tmp_path / "a").mkdir()
    (file,) = (path for path in tmp_path.iterdir() if path.is_file())
    file.rename(tmp_path / "a" / file.name)
    assert parts(tmp_path / "a", 0) == first


def test_a_larger_fraction_holds_out_more_of_the_same():
    counts = [("a.txt", 1000), ("b/c.txt", 3000)]
    few, many = are_held_out(counts, 0.1), are_held_out(counts, 0.3)
    assert (few <= many).all()
    assert few.mean() == pytest.approx(0.1, abs=0.02)
    assert many.mean() == pytest.approx(0.3, abs=0.02)
    # The division of a run that was made before must not change.
    assert few[:20].nonzero()[0].tolist() == [3, 11, 13, 16]


def test_rows_of_parquet_are_shuffled_inside_their_windows(tmp_path, monkeypatch):
    from torchtitan.data.documents import ParquetDocuments

    monkeypatch.setattr(ParquetDocuments, "window_rows", 20)
    write_texts(tmp_path / "a.parquet", TEXTS, 7)
    files, kind = find_files(tmp_path, None)
    whole = open_documents(tmp_path, files, kind, text_key="text", document_bytes=1)
    part = DocumentsPart(whole, FRACTION, held_out=False)
    assert part.windows[0] == 0
    assert part.windows[-1] == len(part)
    numbers = [TEXTS.index(part[int(i)]) for i in drawn_order(part.windows, 0, 0, shuffle=True)]
    bounds = iter(numbers)
    windows = [[next(bounds) for _ in range(b - a)] for a, b in in_drawn_order(part.windows)]
    spans = [max(window) - min(window) for window in windows]
    assert max(spans) < 28  # of a window: a group more than 20 rows at most


def in_drawn_order(windows):
    """The windows in the order that `drawn_order` has them."""
    order = list(drawn_order(windows, 0, 0, shuffle=True))
    found = []
    while order:
        first = next(a for a, b in itertools.pairwise(windows) if a <= order[0] < b)
        last = windows[windows.index(first) + 1]
        assert sorted(order[: last - first]) == list(range(first, last))
        order = order[last - first :]
        found.append((first, last))
    return found


@pytest.mark.parametrize(
    ("count", "which"), [(1, "none of 1 document"), (3, "none of 3 documents")]
)
def test_a_part_is_never_empty(count, which, tmp_path):
    write_texts(tmp_path / "a.txt", TEXTS[:count])
    few = config(tmp_path).model_copy(update={"validation_fraction": 0.001})
    for section in (few, few.held_out()):
        with pytest.raises(ConfigError, match=rf"validation_fraction: 0.001 holds out {which}; "):
            read(section)
    most = config(tmp_path).model_copy(update={"validation_fraction": 0.999})
    with pytest.raises(ConfigError, match=r"holds out all of "):
        read(most)


def test_it_belongs_to_the_identity_of_the_data(tmp_path):
    write_texts(tmp_path / "a.txt", TEXTS)
    without, own = config(tmp_path, None), config(tmp_path)
    one, other = (open_source(each, load_tokenizer(None), seed=0) for each in (without, own))
    assert other.identity["validation_fraction"] == FRACTION
    assert "validation_fraction" not in one.identity


def test_streams_cannot_be_divided(tmp_path):
    packed = write_texts(tmp_path / "a.jsonl.gz", ["a"] * 50)
    with pytest.raises(ConfigError, match=r"^data.validation_fraction: documents of a stream"):
        read(config(packed))
    flags = ["--data.dataset", str(packed), "--data.validation_fraction=0.1"]
    assert train([*flags, "--training.steps=1", f"--job.dump_folder={tmp_path}/run"]) == 2
    assert not (tmp_path / "run").exists()


def refused(*flags):
    """What is wrong with some flags."""
    with pytest.raises(RecipeError) as error:
        load_job(None, flags, 1, "cpu")
    return error.value.lines


def test_a_format_from_elsewhere_says_how_many_documents_a_file_has(tmp_path, monkeypatch):
    class Paragraphs(list[str]):
        fingerprint = "paragraphs"
        windows = (0, 2)

    class Mapped(Paragraphs):
        counts: ClassVar = {"a.par": 2}

    monkeypatch.setitem(SUFFIXES, ".par", "paragraphs")
    monkeypatch.setitem(FORMATS, "paragraphs", lambda *_: Paragraphs(["a", "b"]))
    (tmp_path / "a.par").touch()
    with pytest.raises(ConfigError, match=r"files of kind paragraphs have no `counts`"):
        read(config(tmp_path))
    monkeypatch.setitem(FORMATS._entries, "paragraphs", lambda *_: Mapped(["a", "b"]))
    with pytest.raises(ConfigError, match=r"`counts` .*; wanted a list of pairs: the name of"):
        read(config(tmp_path))


def test_validation_reads_the_part_and_nothing_else(tmp_path):
    write_texts(tmp_path / "a.txt", TEXTS)
    flags = ["--data.dataset", str(tmp_path), "--data.validation_fraction=0.2"]
    recipe = load_job(None, [*flags, "--validation.enable"], 1, "cpu")
    assert not any("validation.dataset" in notice for notice in recipe.notices)
    (held_out,) = recipe.config.validation.data(recipe.config.data).values()
    assert held_out.is_held_out
    assert not recipe.config.data.is_held_out
    # The defaults are written out in recipe.toml, and are no other data set.
    (tmp_path / "recipe.toml").write_text(to_toml(recipe.config))
    assert load_job(tmp_path / "recipe.toml", [], 1, "cpu").config == recipe.config
    also = ["--validation.dataset", str(tmp_path / "a.txt"), "--validation.enable"]
    (line,) = refused(*flags, *also)
    assert line.endswith("; data.validation_fraction holds out documents instead; remove one")


def test_the_part_is_known_by_its_source(tmp_path):
    write_texts(tmp_path / "a.txt", TEXTS)
    source = open_source(config(tmp_path).held_out(), load_tokenizer(None), seed=0)
    assert isinstance(source, ShuffledDocuments)
    assert source.part == f"{source.identity['documents']} of 200 documents"

"""Tokenizers: equal to the reference, reversible, blind to special tokens; bytes of tokens."""

import base64
import itertools
import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from tests import tiny
from tests.tables import table
from torchtitan.config import ConfigError
from torchtitan.data import (
    DataConfig,
    check_vocabulary,
    load_tokenizer,
    separators,
    train_bpe,
    train_tokenizer,
)
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Document
from torchtitan.data.tokenizer import (
    BytesUnknown,
    TiktokenTokenizer,
    _digestible_pieces,
    alphabet,
    separator_note,
)
from torchtitan.inputs import open_task, problems_of_task
from torchtitan.models.settings import TextConfig
from torchtitan.tasks.next_token import NextToken
from torchtitan.tools import cli

SHORT = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
TRICKY = [
    *SHORT["tricky"],
    "x" * 60_001,
    " " * 25_000 + "y" + " " * 50_003 + "z" * 25_000 + "\n",
    "word and more \t" * 40_000,
    "é" * 25_001 + "\x1c" * 30_000,
]
TEXTS = [*SHORT["plain"], "x" * 1000 + " " * 1000]


def write_tiktoken(path):
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" the"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_llama_ids_equal_the_reference():
    reference = pytest.importorskip("llama_models.llama3.tokenizer")
    path = Path(reference.__file__).with_name("tokenizer.model")
    expected, tokenizer = reference.Tokenizer(path), load_tokenizer(str(path))
    assert tokenizer.vocab_size == expected.n_words == 128256
    assert (tokenizer.bos, tokenizer.eos) == (expected.bos_id, expected.eos_id) == (128000, 128001)
    for text in TRICKY:
        assert tokenizer.encode(text) == expected.encode(text, bos=False, eos=False), text[:40]
    ids = list(range(128000, 128256))
    assert tokenizer.decode(ids) == expected.decode(ids)


def test_pieces_join_to_the_text_and_bound_every_run():
    text = "a" * 7 + " " * 5 + "bc d" * 3
    pieces = list(_digestible_pieces(text, longest=20, longest_run=3))
    assert "".join(pieces) == text
    assert pieces == ["aaa", "aaa", "a   ", "  bc dbc d", "bc d"]


def tokenizer_of(kind, folder):
    if kind == "bytes":
        return load_tokenizer(None)
    if kind == "tiktoken":
        return load_tokenizer(str(write_tiktoken(folder / "tokenizer.model")))
    data = folder / "texts.txt"
    data.write_text("\n".join(TEXTS[2:]).replace("\x00", ""))
    output = folder / "tokenizer.json"
    words = ["--dataset", str(data), "--vocab-size", "400", "--output", str(output)]
    assert cli.main(["tokenizer", "train", *words]) == 0
    return load_tokenizer(str(output))


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "trained"])
def test_every_text_comes_back_and_its_tokens_have_its_bytes(kind, tmp_path):
    tokenizer = tokenizer_of(kind, tmp_path)
    counts = tokenizer.byte_counts()
    assert len(counts) == tokenizer.vocab_size
    assert tokenizer.bos is not None
    assert counts[tokenizer.bos] == counts[tokenizer.eos] == 0
    for text in (*TRICKY, *TEXTS):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert not {tokenizer.bos, tokenizer.eos}.intersection(tokens)
        assert max(tokens, default=0) < tokenizer.vocab_size
        assert sum(counts[token] for token in tokens) == len(text.encode()), repr(text[:40])
    assert kind == "bytes" or max(counts) > 1
    end = tokenizer.decode([tokenizer.bos, *tokenizer.encode("hi"), tokenizer.eos])
    assert end == "<|begin_of_text|>hi<|end_of_text|>"


def test_byte_ids_are_the_bytes():
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 0x0A]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (258, 256, 257)
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_tiktoken_merges_and_special_ids(tmp_path):
    tokenizer = load_tokenizer(str(write_tiktoken(tmp_path / "tokenizer.model")))
    assert tokenizer.encode("the the") == [257, 259]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (516, 260, 261)


def test_folders_are_searched_in_order(tmp_path):
    with pytest.raises(ConfigError, match=r"looked for tokenizer\.json, tokenizer\.model, orig"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "original").mkdir()
    write_tiktoken(tmp_path / "original" / "tokenizer.model")
    assert isinstance(load_tokenizer(str(tmp_path)), TiktokenTokenizer)
    train_bpe(["a b"], 258, tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).fingerprint.startswith("huggingface:")
    with pytest.raises(ConfigError, match=r"no tokenizer at .*missing"):
        load_tokenizer(str(tmp_path / "missing"))


def hugging_face(folder, words, **config):
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_hugging_face_special_tokens(tmp_path):
    words = ["?", "[end]", "<s>", "</s>", "[start]"]
    folder = str(hugging_face(tmp_path, words))
    assert (load_tokenizer(folder).bos, load_tokenizer(folder).eos) == (2, 3)
    hugging_face(tmp_path, words, bos_token="[start]", eos_token={"content": "[end]"})
    assert (load_tokenizer(folder).bos, load_tokenizer(folder).eos) == (4, 1)
    hugging_face(tmp_path, words, bos_token=None, eos_token="[end]")
    assert load_tokenizer(folder).bos is None
    hugging_face(tmp_path, words, eos_token="[none]")
    with pytest.raises(ConfigError, match=r"eos_token is declared as '\[none\]'"):
        load_tokenizer(folder)


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def like_qwen(folder, **config):
    """A small tokenizer.json of Qwen's kind: NFC, byte-level BPE, added tokens, no BOS."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    words = tokenizers.Regex(QWEN_PATTERN)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(words, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat and the dog in the end\n" * 9], trainer)
    assert made.get_vocab_size() == 270
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>", "</think>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(
    ("config", "eos"),
    [
        ({"bos_token": None, "eos_token": "<|endoftext|>"}, 270),  # of a base model
        ({"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, 272),
        ({"eos_token": {"content": "<|im_end|>"}}, 272),
        ({}, 270),
    ],
    ids=["base", "chat", "object", "undeclared"],
)
def test_documents_of_qwen_end_as_declared_and_have_no_bos(config, eos, tmp_path, caplog):
    like_qwen(tmp_path, **config)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos, tokenizer.lost_bos, tokenizer.eos) == (None, None, eos)
    assert ("documents end with <|im_end|>, which ends a turn" in caplog.text) == (eos == 272)
    assert tokenizer.vocab_size == 275
    check_vocabulary(tokenizer, 384)  # as in Qwen3, the embedding has more rows
    texts = ["the cat", "the dog"]
    documents = iter([Document((0, 0), text) for text in texts])
    made = tokenized(documents, tokenizer, add_bos=True, add_eos=True)
    assert [tokens.tolist() for _, tokens in made] == [[*tokenizer.encode(t), eos] for t in texts]


@pytest.mark.parametrize(
    ("declared", "recipe", "added"),
    [
        ({}, (None, None), "be"),
        ({"add_bos_token": False}, (None, None), "e"),
        ({"add_bos_token": True, "add_eos_token": False}, (None, None), "b"),
        ({"add_bos_token": False, "add_eos_token": False}, (True, True), "be"),
        ({"add_bos_token": True, "add_eos_token": True}, (False, None), "e"),
    ],
)
def test_a_document_has_the_tokens_that_the_tokenizer_or_the_recipe_asks_for(
    declared, recipe, added, tmp_path
):
    path = hugging_face(tmp_path, ["?", "b", "e"], bos_token="b", eos_token="e", **declared)
    tokenizer = load_tokenizer(str(path))
    documents = iter([Document((0, 0), "?")])
    [(_, made)] = tokenized(documents, tokenizer, add_bos=recipe[0], add_eos=recipe[1])
    assert made.tolist() == [1] * ("b" in added) + [0] + [2] * ("e" in added)


@pytest.mark.parametrize("declared", [*itertools.product((None, False, True), repeat=2)])
def test_one_token_that_starts_and_ends_documents_is_once_between_them(declared, tmp_path):
    flags = dict(zip(("add_bos_token", "add_eos_token"), declared, strict=True))
    path = hugging_face(tmp_path, ["?", "|"], bos_token="|", eos_token="|", **flags)
    tokenizer = load_tokenizer(str(path))
    for recipe in ((None, None), (False, None), (None, False), (None, True)):
        assert sum(separators(tokenizer, *recipe)) == 1
    assert separators(tokenizer, True, True) == (True, True)
    assert separators(tokenizer, True, None)[0]
    assert separators(tokenizer, False, False) == (False, False)
    assert "a separator" in separator_note(tokenizer, False, False)


@pytest.mark.parametrize(
    ("declared", "recipe", "told"),
    [
        ({}, {}, None),
        ({"add_bos_token": True, "add_eos_token": False}, {}, "each document has BOS"),
        ({"add_bos_token": False, "add_eos_token": False}, {}, "without a separator"),
        ({"add_bos_token": False, "add_eos_token": False}, {"add_eos": True}, None),
        ({}, {"add_bos": False, "add_eos": False}, "without a separator"),
        ({"bos_token": None, "add_eos_token": False}, {}, "without a separator"),
    ],
)
def test_documents_without_a_separator_are_told_of(declared, recipe, told, tmp_path, capsys):
    special = {"bos_token": "b", "eos_token": "e"}
    path = hugging_face(tmp_path, ["?", "b", "e"], **special | declared)
    (tmp_path / "text.txt").write_text("? ?")
    text, tokens = str(tmp_path / "text.txt"), str(tmp_path / "tokens")
    flags = [f"--{'' if on else 'no-'}{key.removeprefix('add_')}" for key, on in recipe.items()]
    words = ["--dataset", text, "--tokenizer", str(path), "--output", tokens, "--processes", "1"]
    assert cli.main(["data", "tokenize", *words, *flags]) == 0
    assert ("note: " in (said := capsys.readouterr().err)) == bool(told)
    assert (told or "") in said
    model = {"tokenizer_path": str(path)}
    job = tiny.job(model=model, data={"dataset": text, **recipe})
    assert (told or "") in "".join(said := list(open_task(job).notes(job.data)))
    assert len(said) == bool(told)
    job = tiny.job(model=model, data={"dataset": tokens})
    is_recorded = told == "without a separator" and "bos_token" not in declared
    assert len(list(open_task(job).notes(job.data))) == is_recorded


def test_special_tokens_of_qwen_are_text_and_its_other_added_tokens_are_not(tmp_path):
    library = like_qwen(tmp_path, eos_token="<|endoftext|>")
    library.encode_special_tokens = True
    tokenizer = load_tokenizer(str(tmp_path))
    marks = "<|im_start|>the cat<|im_end|><|endoftext|> <think>the dog</think>"
    for text in (*TRICKY[:9], marks):
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokens) == unicodedata.normalize("NFC", text)
        assert not {270, 271, 272}.intersection(tokens)
    assert {273, 274} < set(tokenizer.encode(marks))
    assert tokenizer.decode([271, 270]) == "<|im_start|><|endoftext|>"
    with pytest.raises(BytesUnknown, match=r"normalizes the text first \(NFC\)"):
        tokenizer.byte_counts()


def test_a_bos_that_there_is_not_matters_where_it_is_asked_for(tmp_path):
    path = str(hugging_face(tmp_path, ["?", "</s>"], bos_token="[none]"))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)
    task = NextToken(TextConfig(tokenizer_path=path), tiny.ARGS)
    task.packing(DataConfig(add_bos=False), 8, 0)
    with pytest.raises(
        ConfigError, match=r"bos_token is declared as '\[none\]', .*data.add_bos = false"
    ):
        task.packing(DataConfig(), 8, 0)
    for add_bos in (True, False):
        job = tiny.job(model={"tokenizer_path": path}, data={"add_bos": add_bos})
        assert bool(list(problems_of_task(job))) == add_bos


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model", b"YQ== 0\n\x0a\x0esentencepiece\n", r"model:2: not a line of a tiktoken file"),
        ("model", b"", r"tokenizer\.model: a tiktoken file without any token"),
        ("model", b"YQ== 0\nYg== 0\n", "its ranks are not 0, 1, 2"),
        ("model", b"YQ== 0\nYg== -1\n", "its ranks are not 0, 1, 2"),
        ("model", b"YQ== 0\n", "255 of the 256 bytes have no token"),
        ("json", b"[]", r"not a Hugging Face tokenizer\.json"),
        ("json", None, "cannot tell which token ends a document"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(name, content, message, tmp_path):
    hugging_face(tmp_path, ["?", "a"])
    if content is not None:
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / f"tokenizer.{name}").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


def test_vocabulary_must_fit_the_model():
    tokenizer = load_tokenizer(None)
    check_vocabulary(tokenizer, 258)
    with pytest.raises(ConfigError, match="has 258 tokens, but the model's vocabulary only 257"):
        check_vocabulary(tokenizer, 257)


def test_training_learns_words(tmp_path):
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(20):
        (documents / f"{number}.txt").write_text("hello hello world\n" * 30)
    path = train_tokenizer(str(documents), None, 266, str(tmp_path / "out"), documents=10)
    assert path == tmp_path / "out" / "tokenizer.json"
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    with pytest.raises(ConfigError, match=rf"{path}: exists already"):
        train_tokenizer(str(documents), None, 300, str(tmp_path / "out"))
    tokenizer = load_tokenizer(str(path.parent))
    assert tokenizer.vocab_size == 266
    assert len(tokenizer.encode("hello hello world")) < 8 < len(tokenizer.encode("quixotic jazz"))


def test_training_mistakes(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size: 257 is too small.*258"):
        train_bpe(["a"], 257, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="'synthetic' has no text"):
        train_tokenizer("synthetic", None, 300, str(tmp_path))
    with pytest.raises(ConfigError, match=r"--dataset: got scenes, which holds images; .*c4"):
        train_tokenizer("scenes", None, 300, str(tmp_path))
    with pytest.raises(ConfigError, match="--output: got s3://b; wanted a file on a disk"):
        train_tokenizer(str(tmp_path), None, 300, "s3://b")
    assert not list(tmp_path.iterdir())


def test_characters_of_bytes_are_those_of_the_library():
    assert sorted(alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    encoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, range(0x80))) + "é漢"
    [(written, _)] = encoder.pre_tokenize_str(text)
    assert written == "".join(alphabet()[byte] for byte in text.encode())


def test_added_tokens_that_are_text_stand_for_their_bytes(tmp_path):
    tokenizer_of("trained", tmp_path)
    path = tmp_path / "tokenizer.json"
    extended = tokenizers.Tokenizer.from_file(str(path))
    extended.add_tokens(["größer als"])
    extended.enable_truncation(2)
    extended.enable_padding(length=9)
    extended.save(str(path))
    tokenizer = load_tokenizer(str(path))
    tokens, counts = tokenizer.encode("a größer als b"), tokenizer.byte_counts()
    assert counts[tokenizer.vocab_size - 1] == len("größer als".encode())
    assert tokenizer.vocab_size - 1 in tokens
    assert len(tokens) < 9
    assert sum(counts[token] for token in tokens) == len("a größer als b".encode())


def changed(folder, **parts):
    """A trained tokenizer in which parts of the description are others."""
    tokenizer_of("trained", folder)
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    for key, value in parts.items():
        if isinstance(value, dict) and key == "model":
            description[key] |= value
        else:
            description[key] = value
    path.write_text(json.dumps(description))
    return load_tokenizer(str(path))


@pytest.mark.parametrize(("parts", "reason"), table(__file__, "odd_tokenizers.txt"))
def test_what_may_not_add_up_is_not_guessed(parts, reason, tmp_path):
    with pytest.raises(BytesUnknown) as error:
        changed(tmp_path, **json.loads(parts)).byte_counts()
    assert reason in str(error.value)


def test_bytes_without_a_token_are_said(tmp_path):
    vocabulary = {character: n for n, character in enumerate(alphabet()[:200])} | {"</s>": 200}
    tokenizer = changed(tmp_path, model={"vocab": vocabulary, "merges": []}, added_tokens=[])
    with pytest.raises(BytesUnknown, match="56 of the 256 bytes have no token"):
        tokenizer.byte_counts()


def test_other_kinds_than_byte_pairs_are_said(tmp_path):
    path = tmp_path / "tokenizer.json"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, "a"))
    words.save(str(path))
    with pytest.raises(BytesUnknown, match="it is not a BPE tokenizer"):
        load_tokenizer(str(path)).byte_counts()

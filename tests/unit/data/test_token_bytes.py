"""The bytes of a text's tokens add up to those of the text, or it is said why they would not."""

import json

import pytest
import tokenizers

from tests.unit.data.test_tokenizer import write_tiktoken
from torchtitan.data import load_tokenizer
from torchtitan.data.tokenizer import BytesUnknown, alphabet
from torchtitan.tools import cli

TEXTS = [
    "",
    " ",
    "plain words, 12345 and  two blanks\n\n\tand a tab ",
    " begins with a blank",
    "Größe, naïve, e\u0301 and \u00e9: one letter, two ways to write it",
    "漢字かな交じり文 عربي हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈 \U0010ffff \x00\x7f\u200b\u2028\ufeff",
    "\u00a0\u3000 blanks of other kinds \r\n",
    "spelled out: <|begin_of_text|><|end_of_text|><|eot_id|> and [MASK] </s>",
    "\ufb01 \uff46\uff55\uff4c\uff4c \u00bd \u212b \u210c have shorter forms",
    "x" * 1000 + " " * 1000,
]


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
def test_bytes_of_the_tokens_add_up_to_those_of_the_text(kind, tmp_path):
    tokenizer = tokenizer_of(kind, tmp_path)
    counts = tokenizer.byte_counts()
    assert len(counts) == tokenizer.vocab_size
    assert counts[tokenizer.eos] == 0
    assert tokenizer.bos is not None
    assert counts[tokenizer.bos] == 0
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert sum(counts[token] for token in tokens) == len(text.encode()), repr(text)
    if kind != "bytes":
        assert max(counts) > 1


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
    extended.save(str(path))
    tokenizer = load_tokenizer(str(path))
    tokens, counts = tokenizer.encode("a größer als b"), tokenizer.byte_counts()
    assert counts[tokenizer.vocab_size - 1] == len("größer als".encode())
    assert tokenizer.vocab_size - 1 in tokens
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


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "NFC"}}, "it normalizes the text first (NFC)"),
        (
            {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True, "use_regex": True}},
            "it adds a space to the text (add_prefix_space)",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [CUT, BYTE_LEVEL | {"use_regex": False}],
                }
            },
            "it drops what it splits at (Split)",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "WhitespaceSplit"}, BYTE_LEVEL],
                }
            },
            "its effect on whitespace is not known (WhitespaceSplit)",
        ),
        (
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}},
            "it is not byte-level (no ByteLevel in pre_tokenizer)",
        ),
        ({"model": {"end_of_word_suffix": "</w>"}}, "its tokens have markers"),
    ],
)
def test_what_may_not_add_up_is_not_guessed(parts, reason, tmp_path):
    with pytest.raises(BytesUnknown) as error:
        changed(tmp_path, **parts).byte_counts()
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

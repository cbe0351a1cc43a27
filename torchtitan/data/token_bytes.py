"""Bytes of text per token of a `tokenizer.json`, where they are known.

The loss per token depends on the length of tokens, so models with different tokenizers are compared
by their loss per byte of text. For that, the bytes of all tokens of a text must add up to those of
the text. They do in byte-level BPE, which writes every byte as one character and loses none; this
module checks, step by step, that nothing is lost. In a tokenizer that normalizes the text before
splitting it (Unicode normal forms, SentencePiece's spaces), a token represents more than one text,
so there is no such number.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEEPS_ALL = ("Split", "Digits", "Punctuation")
"""Pre-tokenizers that only split, unless their behavior removes the separators."""


class BytesUnknown(ValueError):
    """Error for tokens whose number of bytes is unknown; the message says why."""


def byte_counts(content: str, vocab_size: int) -> list[int]:
    """Count the bytes of each token id of a `tokenizer.json`; special tokens, in no text, have 0.

    Raises:
        BytesUnknown: if they do not add up to the bytes of every text.
    """
    description = json.loads(content)
    if reason := next(_reasons(description), None):
        raise BytesUnknown(reason)
    counts = [0] * vocab_size
    for token, number in description["model"]["vocab"].items():
        counts[number] = len(token)  # a character is a byte
    for added in description.get("added_tokens") or ():
        counts[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return counts


def _reasons(description: Mapping[str, Any]) -> Iterator[str]:
    """Find reasons why bytes may be lost or added, or tokens may not consist of bytes."""
    model = description["model"]
    if normalizer := description.get("normalizer"):
        yield f"it normalizes the text first ({normalizer['type']})"
    if model.get("type") != "BPE":
        yield f"it is not a BPE tokenizer ({model.get('type')})"
        return
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"its tokens have markers ({key})"
    steps = list(_steps(description.get("pre_tokenizer")))
    if [step["type"] for step in steps].count("ByteLevel") != 1:
        yield "it is not byte-level (no ByteLevel in pre_tokenizer)"
        return
    for step in steps:
        if step["type"] == "ByteLevel" and step.get("add_prefix_space", True):
            yield "it adds a space to the text (add_prefix_space)"
        elif step.get("behavior") == "Removed":
            yield f"it drops what it splits at ({step['type']})"
        elif step["type"] not in ("ByteLevel", *KEEPS_ALL):
            yield f"its effect on whitespace is not known ({step['type']})"
    if missing := sum(character not in model["vocab"] for character in alphabet()):
        yield f"{missing} of the 256 bytes have no token"
    for added in description.get("added_tokens") or ():
        if not added["special"] and (added.get("lstrip") or added.get("rstrip")):
            yield f"the token {added['content']!r} absorbs whitespace"


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _steps(step)
    else:
        yield pre_tokenizer


def alphabet() -> list[str]:
    """Return the character for each byte in byte-level encodings, as introduced by GPT-2.

    A byte that is a printable character of Latin-1 is written as that; the others start at 256.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

"""Text to token ids and back: bytes (the default), tiktoken files, Hugging Face `tokenizer.json`.

Special tokens in documents are not special: text that happens to spell one, such as
"<|end_of_text|>", is encoded letter by letter. Only the stream adds special tokens, between
documents, by their id.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan.config import (
    ConfigError,
    exists,
    hub,
    is_hub_id,
    local_path,
    read_for_node,
    shorten,
    show,
)
from torchtitan.data.file_cache import reading
from torchtitan.logging import logger
from torchtitan.remote import path_to_read, refuse_pointer

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


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    vocab_size: int
    """One more than the largest id, special tokens included."""
    bos: int | None
    """Id of the token that starts a document; None if the tokenizer has no such token."""
    lost_bos: str | None
    """Error for a declared but missing BOS token, raised on first use."""
    eos: int
    """Id of the token that ends a document."""
    adds_bos: bool
    """Whether it starts a text with BOS, by its own configuration or as usual."""
    adds_eos: bool
    """Whether it ends a text with EOS."""
    fingerprint: str
    """Digest of the vocabulary; equal only for tokenizers that encode alike."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; special tokens are written by name."""

    def byte_counts(self) -> list[int]:
        """Return the bytes of text of each id; special tokens have none.

        Raises:
            BytesUnknown: if they would not add up to the bytes of every text.
        """


def separators(
    tokenizer: Tokenizer, add_bos: bool | None, add_eos: bool | None
) -> tuple[bool, bool]:
    """Return whether a document starts with BOS, and ends with EOS.

    Where both are the same token, there is one between documents, unless the recipe asks for two.

    Args:
        add_bos: the setting `data.add_bos`; None: as the tokenizer says.
        add_eos: the setting `data.add_eos`.
    """
    bos = tokenizer.adds_bos if add_bos is None else add_bos
    eos = tokenizer.adds_eos if add_eos is None else add_eos
    if tokenizer.bos == tokenizer.eos:
        eos = eos or (add_eos is None and not bos)
        bos = not eos if add_bos is None else bos
    return bos, eos


def separator_note(tokenizer: Tokenizer, add_bos: bool | None, add_eos: bool | None) -> str | None:
    """Describe what separates documents, where it is not what one expects; see `separators`.

    Returns:
        None if both BOS and EOS do, or the recipe asks for one of them.
    """
    has_bos, has_eos = separators(tokenizer, add_bos, add_eos)
    has_bos_token = has_bos and tokenizer.bos is not None
    if not (has_bos_token or has_eos):
        return (
            "documents follow one another without a separator, as neither BOS nor EOS is added to "
            "them; set data.add_eos = true to end each with EOS"
        )
    if (has_bos and has_eos) or (add_bos, add_eos) != (None, None):
        return None
    return (
        f"of BOS and EOS each document has {'BOS' if has_bos else 'EOS'}, as its tokenizer says or "
        "both are the same token; data.add_bos and data.add_eos change that"
    )


def leading_tokens(tokenizer: Tokenizer, add_bos: bool | None, add_eos: bool | None) -> list[int]:
    """Return the tokens before each document: BOS, or none; see `separators`.

    Raises:
        ConfigError: if BOS is declared, but missing.
    """
    has_bos, _ = separators(tokenizer, add_bos, add_eos)
    if has_bos and tokenizer.lost_bos:
        raise ConfigError(tokenizer.lost_bos)
    return [tokenizer.bos] if has_bos and tokenizer.bos is not None else []


class ByteTokenizer:
    """One token per UTF-8 byte, and two special tokens: needs no file and can encode any text."""

    vocab_size = 258
    bos: int | None = 256
    lost_bos: str | None = None
    eos = 257
    adds_bos = adds_eos = True
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        names = {self.bos: b"<|begin_of_text|>", self.eos: b"<|end_of_text|>"}
        return b"".join(names.get(t) or bytes([t]) for t in tokens).decode(errors="replace")

    def byte_counts(self) -> list[int]:
        return [1] * 256 + [0, 0]


class NoTokenizer:
    """Stands for the unknown tokenizer of stored tokens: of a text it knows nothing."""

    bos: int | None = None
    lost_bos: str | None = None
    eos: Any = None
    adds_bos = adds_eos = True
    fingerprint = "none"
    needed = "the tokens of the data do not say which tokenizer made them; set model.tokenizer_path"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        raise ConfigError(f"text cannot be encoded: {self.needed}")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the ids, as their text is not known."""
        return " ".join(map(str, tokens))

    def byte_counts(self) -> list[int]:
        raise BytesUnknown(self.needed)


class TiktokenTokenizer:
    """Llama 3's `tokenizer.model`: a tiktoken file of ranked byte sequences.

    The file holds the merges only. The pattern that splits text into words and the 256 special
    tokens, whose ids follow those of the file, are facts of the Llama 3 release
    (https://github.com/meta-llama/llama-models, `models/llama3/tokenizer.py`).
    """

    pattern = "|".join(
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
    named_special_tokens = (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|image|>",
    )
    special_token_count = 256
    lost_bos: str | None = None
    adds_bos = adds_eos = True

    def __init__(self, path: Path) -> None:
        import tiktoken

        content = read_for_node(path)
        self._ranks = ranks = _tiktoken_ranks(path, content)
        reserved = self.special_token_count - len(self.named_special_tokens)
        specials = [
            *self.named_special_tokens,
            *(f"<|reserved_special_token_{2 + i}|>" for i in range(reserved)),
        ]
        ids = {name: len(ranks) + i for i, name in enumerate(specials)}
        self._encoding = tiktoken.Encoding(
            name=str(path), pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=ids
        )
        self.vocab_size = len(ranks) + len(specials)
        self.bos: int | None = ids["<|begin_of_text|>"]
        self.eos = ids["<|end_of_text|>"]
        self.fingerprint = f"tiktoken:{_digest(content)}"

    def encode(self, text: str) -> list[int]:
        if len(text) <= LONGEST_RUN:
            return self._encoding.encode_ordinary(text)
        tokens: list[int] = []
        for piece in _digestible_pieces(text):
            tokens += self._encoding.encode_ordinary(piece)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def byte_counts(self) -> list[int]:
        counts = [0] * self.vocab_size
        for token, number in self._ranks.items():
            counts[number] = len(token)
        return counts


def _tiktoken_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Read the rank of every byte sequence: one `base64 rank` pair per line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"{path}:{number}: not a line of a tiktoken file (base64 text, space, rank); "
                "use the tokenizer.json of a SentencePiece model"
            ) from None
    if not ranks:
        raise ConfigError(f"{path}: a tiktoken file without any token")
    if sorted(ranks.values()) != list(range(len(content.splitlines()))):
        raise ConfigError(f"{path}: truncated or damaged: its ranks are not 0, 1, 2, ... each once")
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise ConfigError(f"{path}: truncated or damaged: {missing} of the 256 bytes have no token")
    return ranks


LONGEST_RUN = 25_000
"""Maximum characters in a row that are all whitespace, or all other characters, in a piece."""


def _digestible_pieces(
    text: str, longest: int = 400_000, longest_run: int = LONGEST_RUN
) -> Iterator[str]:
    """Split `text` as the Llama 3 reference does, since that affects the ids.

    tiktoken overflows its stack on very long texts, and needs quadratic time on very long runs of
    (non-)whitespace: https://github.com/openai/tiktoken/issues/195.
    """
    for start in range(0, len(text), longest):
        part = text[start : start + longest]
        cuts = [0]
        # Possessive, so that most texts are found to have no long run without an object for each.
        short = rf"(?:\s{{1,{longest_run}}}+(?!\s)|\S{{1,{longest_run}}}+(?!\S))*+"
        if len(part) > longest_run and not re.fullmatch(short, part):
            for run in re.finditer(r"\s+|\S+", part):
                cuts += range(run.start() + longest_run, run.end(), longest_run)
        for begin, end in zip(cuts, [*cuts[1:], len(part)], strict=True):
            yield part[begin:end]


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    The tokens that start and end a document are named in `tokenizer_config.json` or
    `special_tokens_map.json` next to it; without those, the usual names are tried. Where
    `<|endoftext|>` only ends documents, as in Qwen's vocabularies, it is not the usual BOS. Whether
    they are added is `add_bos_token` and `add_eos_token` there; both are, if it is not said.
    """

    usual_bos = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
    usual_eos = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")

    def __init__(self, path: Path) -> None:
        import tokenizers

        content = read_for_node(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ConfigError(f"{path}: not a Hugging Face tokenizer.json: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Special tokens inside a document are ordinary text.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1

        declared = _declared_special_tokens(path.parent)
        if {"<|im_end|>", "<|endoftext|>"} <= vocabulary.keys():
            declared = {"bos_token": None, **declared}
            if _text(declared.get("eos_token")) == "<|im_end|>":
                logger.warning(
                    "%s: documents end with <|im_end|>, which ends a turn of a chat model; for "
                    "pretraining, use the tokenizer_config.json of the base model, which declares "
                    "<|endoftext|>",
                    path,
                )
        self.bos: int | None = None
        self.lost_bos: str | None = None
        try:
            self.bos = _first_known(declared, "bos_token", self.usual_bos, vocabulary, path)
        except ConfigError as error:
            self.lost_bos = f"{error}; or set data.add_bos = false"
        eos = _first_known(declared, "eos_token", self.usual_eos, vocabulary, path)
        if eos is None:
            raise ConfigError(
                f"{path}: cannot tell which token ends a document: no eos_token in "
                "tokenizer_config.json or special_tokens_map.json next to it, and none of "
                f"{', '.join(self.usual_eos)} in the vocabulary"
            )
        self.eos = eos
        self.adds_bos = _flag(declared, "add_bos_token", path)
        self.adds_eos = _flag(declared, "add_eos_token", path)
        self.fingerprint = f"huggingface:{_digest(content)}"

    def encode(self, text: str) -> list[int]:
        # Unlike `encode`, this releases the interpreter lock, and omits character offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def byte_counts(self) -> list[int]:
        return byte_counts(self._tokenizer.to_str(), self.vocab_size)


def _declared_special_tokens(folder: Path) -> dict[str, Any]:
    declared: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            refuse_pointer(file)
            try:
                found = json.loads(read_for_node(file).decode())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file}: not JSON: {error}") from None
            if not isinstance(found, dict):
                raise ConfigError(f"{file}: got {type(found).__name__}; wanted a JSON object")
            declared |= found
    return declared


def _first_known(
    declared: dict[str, Any], key: str, usual: Iterable[str], vocabulary: dict[str, int], path: Path
) -> int | None:
    if key not in declared:
        return next((vocabulary[name] for name in usual if name in vocabulary), None)
    name = _text(declared[key])
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigError(f"{path}: {key} is declared as {show(name)}; wanted the text of a token")
    if name not in vocabulary:
        raise ConfigError(f"{path}: {key} is declared as {name!r}, which is not in the vocabulary")
    return vocabulary[name]


def _flag(declared: dict[str, Any], key: str, path: Path) -> bool:
    found = declared.get(key)
    if found is not None and not isinstance(found, bool):
        raise ConfigError(f"{path}: {key} is declared as {show(found)}; wanted true or false")
    return found is not False


def _text(declared: Any) -> Any:
    """Return the text of a declared token, which may be an object with its text and flags."""
    return declared.get("content") if isinstance(declared, dict) else declared


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def tokenizer_location(path: str) -> Path:
    """Return the file or folder of a tokenizer, which may be in a repository of the hub."""
    return path_to_read(path, hub.TOKENIZER) if is_hub_id(path) else local_path(path)


def load_tokenizer(path: str | None) -> Tokenizer:
    """Load the tokenizer at `path`, a file or a folder that holds one; bytes if `path` is None."""
    if path is None:
        return ByteTokenizer()
    given = tokenizer_location(path)
    names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
    if not exists(path):
        raise ConfigError(f"no tokenizer at {shorten(path)}: there is no such file or folder")
    files = [given / name for name in names] if given.is_dir() else [given]
    file = next((file for file in files if file.is_file() or file.is_symlink()), None)
    if file is None:
        raise ConfigError(f"no tokenizer in the folder {given}: looked for {', '.join(names)}")
    with reading(file):
        refuse_pointer(file)
        is_json = file.suffix.lower() == ".json"
        return HuggingFaceTokenizer(file) if is_json else TiktokenTokenizer(file)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Reject a tokenizer whose ids do not all have a row in the model's embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer ({tokenizer.fingerprint}) has {tokenizer.vocab_size} tokens, but the "
            f"model's vocabulary only {vocab_size}; use a flavor with at least as many, or set the "
            "model's vocabulary size"
        )

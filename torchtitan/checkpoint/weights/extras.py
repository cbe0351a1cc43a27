"""Data that accompanies weights in other formats: tokenizer, special tokens, context length."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config import ConfigError
from torchtitan.data import leading_tokens, load_tokenizer
from torchtitan.data.tokenizer import tokenizer_location
from torchtitan.logging import logger
from torchtitan.remote import RemotePath, refuse_pointer

BYTES = "bytes"
"""Name of the byte tokenizer, which needs no file."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
TOKENIZER_CONFIG = "tokenizer_config.json"
OF_TOKENIZER = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TEMPLATES = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
"""Parts of a tokenizer.json that add special tokens."""
TOKENIZER_FILES = (*TOKENIZERS, *OF_TOKENIZER)


def longest_in_recipe(recipe: Mapping[str, Any]) -> int | None:
    """Return the length of the longest sequence of a run, by its recipe; None: unknown."""
    own = re.compile(r"training\.(stages\.\d+\.)?seq_len")
    lengths = [value for key, value in recipe.items() if own.fullmatch(key) and value is not None]
    return max(lengths, default=None)


class Extras(NamedTuple):
    """Data that accompanies weights, as far as it is known."""

    seq_len: int | None = None
    """Maximum length of a sequence."""
    bos: int | list[int] | None = None
    eos: int | list[int] | None = None
    tokenizer: Path | None = None
    """File of the tokenizer, or folder that holds one."""
    is_bytes: bool = False
    """Whether tokens are bytes, which needs no file."""
    generation: Mapping[str, Any] | None = None
    """Options of generation, as in Hugging Face's generation_config.json."""
    adds_bos: bool | None = None
    """Whether texts started with BOS in training; None: unknown."""

    @classmethod
    def of_recipe(cls, recipe: Mapping[str, Any]) -> "Extras":
        """Read the extras from the recipe of a run, by dotted keys."""
        seq_len, key = longest_in_recipe(recipe), "model.tokenizer_path"
        if key not in recipe:
            return cls(seq_len)
        try:
            tokenizer = load_tokenizer(recipe[key])
            add = recipe.get("data.add_bos"), recipe.get("data.add_eos")
            begin = leading_tokens(tokenizer, *add)
        except ConfigError as error:
            logger.warning("the weights are written without a tokenizer: %s", error)
            return cls(seq_len)
        if recipe[key] is None:
            return cls(seq_len, tokenizer.bos, tokenizer.eos, is_bytes=True)
        path = tokenizer_location(recipe[key])
        adds_bos = bool(begin) if "data.add_bos" in recipe else None
        return cls(seq_len, tokenizer.bos, tokenizer.eos, path, adds_bos=adds_bos)

    @classmethod
    def in_folder(cls, folder: Path, **known: Any) -> "Extras":
        """Return the `known` extras, with the tokenizer in a folder of weights, if there is one."""
        # Tokenizers are loaded from a disk.
        is_there = not isinstance(folder, RemotePath) and any(
            (folder / name).is_file() for name in TOKENIZERS
        )
        return cls(tokenizer=folder.resolve() if is_there else None, **known)

    def recipe(self) -> dict[str, Any]:
        """Return the keys that `of_recipe` reads."""
        recipe: dict[str, Any] = {}
        if self.seq_len is not None:
            recipe["training.seq_len"] = self.seq_len
        if self.tokenizer is not None or self.is_bytes:
            recipe["model.tokenizer_path"] = None if self.is_bytes else str(self.tokenizer)
        if self.adds_bos is not None:
            recipe["data.add_bos"] = self.adds_bos
        return recipe

    def copy_tokenizer(self, folder: Path, names: Collection[str] = TOKENIZER_FILES) -> None:
        """Copy the files of the tokenizer that are among `names`, the names that readers know."""
        if self.is_bytes:
            logger.info("the weights are written without a tokenizer: they were trained on bytes")
        found = self._tokenizer_files()
        copied = [name for name in names if name in found]
        for name in copied:
            refuse_pointer(found[name])
            shutil.copyfile(found[name], folder / name)
        if self.tokenizer is not None and not set(copied) & set(TOKENIZERS):
            wanted = " or ".join(name for name in TOKENIZERS if name in names)
            message = "the weights are written without their tokenizer, %s: this format has %s"
            logger.warning(message, self.tokenizer, wanted)
        if "tokenizer.json" in copied and TOKENIZER_CONFIG not in copied:
            _describe_tokenizer(folder)
        if "tokenizer.json" in copied and self.adds_bos is not None:
            _set_bos(folder, self.adds_bos)

    def _tokenizer_files(self) -> dict[str, Path]:
        """Return the files of the tokenizer by the names that readers know."""
        given = self.tokenizer
        if given is None:
            return {}
        own: dict[str, Path] = {}
        known: tuple[str, ...] = TOKENIZER_FILES
        if not given.is_dir():
            own = {TOKENIZERS[given.suffix != ".json"]: given}
            # Files next to one of another name may be those of another tokenizer.
            known = OF_TOKENIZER if given.name in own else ()
        folder = given if given.is_dir() else given.parent
        return own | {name: folder / name for name in known if (folder / name).is_file()}


def _describe_tokenizer(folder: Path) -> None:
    """Declare that the tokenizer is the one in tokenizer.json.

    Otherwise transformers creates the usual one for the architecture of the weights.
    """
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    names = {key: tokenizer.decode([at]) for key, at in tokens.items() if at is not None}
    write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _set_bos(folder: Path, adds_bos: bool) -> None:
    """Make the tokenizer start a text with BOS, or not, if it would not do as in training.

    transformers 5 follows the template in tokenizer.json, and earlier ones add_bos_token too.
    """
    import tokenizers

    file, config_file = folder / "tokenizer.json", folder / TOKENIZER_CONFIG
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("add_bos_token", adds_bos) != adds_bos:
        write_json(config_file, config | {"add_bos_token": adds_bos})
    bos, library = load_tokenizer(str(folder)).bos, tokenizers.Tokenizer.from_file(str(file))
    if (library.encode("").ids[:1] == [bos]) == adds_bos:
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    own = content["post_processor"] or {"type": "Sequence", "processors": []}
    steps = [s for s in own.get("processors", [own]) if s["type"] not in TEMPLATES]
    if adds_bos and bos is not None:
        name = library.id_to_token(bos)
        begin, *texts = (
            {"SpecialToken": {"id": name, "type_id": 0}},
            *({"Sequence": {"id": text, "type_id": number}} for number, text in enumerate("AB")),
        )
        tokens = {name: {"id": name, "ids": [bos], "tokens": [name]}}
        single, pair = [begin, *texts[:1]], [begin, *texts]
        template = {"single": single, "pair": pair, "special_tokens": tokens}
        steps.append({"type": "TemplateProcessing", **template})
    content["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
    write_json(file, content)
    logger.info("%s: it %s BOS now, as in training", file.name, "adds" if adds_bos else "omits")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a human-readable JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

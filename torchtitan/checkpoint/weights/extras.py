"""Data that accompanies weights in other formats: tokenizer, special tokens, context length."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.remote import RemotePath
from torchtitan.config import ConfigError, local_path
from torchtitan.data import load_tokenizer
from torchtitan.logging import logger

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    *TOKENIZERS,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class Extras(NamedTuple):
    """Data that accompanies weights, as far as it is known."""

    seq_len: int | None = None
    """Maximum length of a sequence."""
    bos: int | list[int] | None = None
    eos: int | list[int] | None = None
    tokenizer: Path | None = None
    """Folder of the tokenizer."""
    generation: Mapping[str, Any] | None = None
    """Options of generation, as in Hugging Face's generation_config.json."""

    @classmethod
    def of_recipe(cls, recipe: Mapping[str, Any]) -> "Extras":
        """Read the extras from the recipe of a run, by dotted keys."""
        seq_len, key = recipe.get("training.seq_len"), "model.tokenizer_path"
        if key not in recipe:
            return cls(seq_len)
        try:
            tokenizer = load_tokenizer(recipe[key])
        except ConfigError as error:
            logger.warning("the weights are written without a tokenizer: %s", error)
            return cls(seq_len)
        if recipe[key] is None:
            logger.info(
                "the weights are written without a tokenizer, as they were trained on bytes"
            )
            return cls(seq_len, tokenizer.bos, tokenizer.eos)
        path = local_path(recipe[key])
        folder = path if path.is_dir() else path.parent
        return cls(seq_len, tokenizer.bos, tokenizer.eos, folder)

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
        if self.tokenizer is not None:
            recipe["model.tokenizer_path"] = str(self.tokenizer)
        return recipe

    def copy_tokenizer(self, folder: Path, names: Collection[str] = TOKENIZER_FILES) -> None:
        """Copy the files of the tokenizer that exist."""
        home = self.tokenizer
        copied = [name for name in names if home is not None and (home / name).is_file()]
        for name in copied:
            shutil.copyfile(home / name, folder / name)  # type: ignore[operator]
        if "tokenizer.json" in copied and TOKENIZER_CONFIG not in copied:
            _describe_tokenizer(folder)


def _describe_tokenizer(folder: Path) -> None:
    """Declare that the tokenizer is the one in tokenizer.json.

    Otherwise transformers creates the usual one for the architecture of the weights.
    """
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    names = {key: tokenizer.decode([at]) for key, at in tokens.items() if at is not None}
    write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a human-readable JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""The section `[model]`: a family by name, a flavor of it, and the sizes that are to be others.

Every family has a settings class, whose keys beyond those here are the sizes of its networks. One
that is absent is the flavor's, so a recipe writes only what it changes.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from torchtitan.config import Config, PlannedWorld, Problem
from torchtitan.models.attention import AttentionMask

Args = TypeVar("Args")


def size(about: str, **bounds: Any) -> Any:
    """A key that the flavor answers where it is absent."""
    return Field(None, description=f"{about}; absent: the flavor's.", **bounds)


class ModelConfig(Config):
    """What can be set of every family of models."""

    name: str = Field("llama3", description="A key of torchtitan.models.MODELS.")
    flavor: str = Field("debugmodel", description="Which sizes, unless a key here sets another.")

    @property
    def tokenizer(self) -> str | None:
        """Where its tokenizer is, if it has one that is in a file."""
        return None

    @classmethod
    def sizes(cls) -> list[str]:
        """The keys that are sizes of the network."""
        shared = ModelConfig.model_fields.keys() | TextConfig.model_fields.keys()
        return [key for key in cls.model_fields if key not in shared]

    @classmethod
    def sizes_of(cls, args: Any) -> dict[str, Any]:
        """The sizes of a network with these arguments, by key."""
        return {key: getattr(args, key) for key in cls.sizes()}

    def over(self, args: Args) -> Args:
        """A flavor's arguments, with the sizes that the recipe says in the place of its own."""
        return dataclasses.replace(args, **self.said())  # type: ignore[type-var]

    def said(self) -> dict[str, Any]:
        """The sizes that the recipe says."""
        return {key: said for key in self.sizes() if (said := getattr(self, key)) is not None}

    def misfits(self, args: Any) -> Iterator[Problem]:
        """Which of the sizes in effect cannot be."""
        return iter(())

    def origin(self, *keys: str) -> str:
        """The first of these keys that the recipe says, for a problem to name."""
        return next((key for key in keys if key in self.said()), "flavor")


class TextConfig(ModelConfig):
    """What can be set of every model of text."""

    tokenizer_path: str | None = Field(
        None,
        description="A tokenizer.json or tokenizer.model (tiktoken), or a folder with one; "
        "absent: bytes.",
    )
    attn_mask_type: AttentionMask = Field(
        "causal",
        description="causal: a token attends to all before it in its sequence; block_causal: to "
        "those of its own document only.",
    )

    def problems(self, recipe: Any, world: PlannedWorld) -> Iterator[Problem]:
        path = self.tokenizer_path
        if path is not None and not Path(path).expanduser().exists():
            message = (
                "there is no such file or folder; put the model's tokenizer.json or "
                "tokenizer.model there (for Llama 3: hf download meta-llama/Llama-3.1-8B "
                f"tokenizer.json --local-dir {path})"
            )
            yield Problem("tokenizer_path", message)

    @property
    def tokenizer(self) -> str | None:
        return self.tokenizer_path

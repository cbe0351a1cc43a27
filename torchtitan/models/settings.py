"""The section `[model]`: a family by name, a flavor of it, and the sizes to change.

Every family has a settings class, whose keys beyond those here are the sizes of its networks. An
absent size is the flavor's, so a recipe writes only what it changes.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from torchtitan.config import Config, Context, Problem, RecipeError, exists, shorten, show
from torchtitan.models.attention import AttentionMask

Args = TypeVar("Args")

MAX_LAYERS = 2**12
MAX_SIZE = 2**28
"""Upper bound of any other size, beyond that of any model."""


def most_of(key: str) -> int:
    """Return the upper bound of a size."""
    return MAX_LAYERS if key.endswith("layers") else MAX_SIZE


class ModelConfig(Config):
    """Settings shared by all families of models."""

    name: str = "llama3"
    """Name of the model: a key of torchtitan.models.MODELS."""
    flavor: str = "debugmodel"
    """Set of sizes; other keys of this section override them."""

    @property
    def tokenizer(self) -> str | None:
        """Path of its tokenizer, if it has one in a file."""
        return None

    @property
    def separates_documents(self) -> bool:
        """Whether tokens attend only to those of their own document."""
        return False

    @classmethod
    def sizes(cls) -> list[str]:
        """Return the keys that are sizes of the network."""
        shared = ModelConfig.model_fields.keys() | TextConfig.model_fields.keys()
        return [key for key in cls.model_fields if key not in shared]

    @classmethod
    def sizes_of(cls, args: Any) -> dict[str, Any]:
        """Return the sizes of a network with these arguments, by key, as plain data."""
        found = {key: getattr(args, key) for key in cls.sizes()}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()}

    @classmethod
    def checked(
        cls, args: Args, keys: Mapping[str, str] | None = None, known: Iterable[str] = ()
    ) -> Args:
        """Return arguments written by other software, if they are valid.

        Args:
            keys: their names in the other software, for messages.
            known: problems found before.

        Raises:
            RecipeError: with all problems.
        """
        sizes, wrong = cls.sizes_of(args), dict[str, str]()
        config: ModelConfig | None = None
        for key, value in sizes.items():
            # Absent from a recipe, a size follows the flavor; there is none to follow here.
            if value is None and (key in (keys or {}) or getattr(type(args), key, 0) is not None):
                wrong[key] = f"got {show(None)}; wanted a value"
            elif isinstance(value, int) and value > (most := most_of(key)):
                wrong[key] = f"got {show(value)}; wanted at most {most:,}"
            elif isinstance(getattr(args, key, None), tuple):
                sizes[key] = tuple(value)
        try:
            config = cls.model_validate(sizes, strict=True)
        except ValidationError as error:
            for details in error.errors():
                message = f"got {show(details['input'])}; {details['msg'].lower()}"
                wrong[str(details["loc"][0])] = message
        problems = [Problem(key, message) for key, message in wrong.items()]
        if config and not problems:
            problems = [*config.size_problems(args)]
        named = [f"{(keys or {}).get(each.path, each.path)}: {each.message}" for each in problems]
        if lines := [*known, *named]:
            raise RecipeError(lines)
        return args

    def over(self, args: Args) -> Args:
        """Return a flavor's arguments with the sizes set in the recipe."""
        return dataclasses.replace(args, **self.overrides())  # type: ignore[type-var]

    def overrides(self) -> dict[str, Any]:
        """Return the sizes set in the recipe."""
        return {key: value for key in self.sizes() if (value := getattr(self, key)) is not None}

    def size_problems(self, args: Any) -> Iterator[Problem]:
        """Find sizes in effect that are invalid."""
        return iter(())

    def origin(self, *keys: str) -> str:
        """Return the first of these keys set in the recipe, for a problem to name."""
        return next((key for key in keys if key in self.overrides()), "flavor")


class TextConfig(ModelConfig):
    """Settings shared by all models of text."""

    hub: ClassVar[Mapping[str, str]] = {}
    """Repositories on the Hugging Face hub that have the tokenizers, by name of the model."""
    tokenizer_path: str | None = None
    """Path of a tokenizer.json or tokenizer.model (tiktoken), or of a folder with one (default:
    bytes; none for stored tokens that do not name their tokenizer)."""
    attn_mask_type: AttentionMask = "causal"
    """Tokens that a token attends to. causal: all before it in its sequence; block_causal: those of
    its own document."""

    def problems(self, context: Context) -> Iterator[Problem]:
        path = self.tokenizer_path
        if path is not None and not exists(path):
            message = f"there is no such file or folder{self._where_from(path)}"
            yield Problem("tokenizer_path", message)

    @property
    def separates_documents(self) -> bool:
        return self.attn_mask_type == "block_causal"

    def _where_from(self, path: str) -> str:
        """Explain how to obtain a tokenizer at `path`."""
        *above, name = path.rstrip("/").split("/")
        is_file = name.endswith((".json", ".model"))
        wanted = "tokenizer.json or tokenizer.model"
        put = f"; put the model's {name if is_file else wanted} there"
        repository = self.hub.get(self.name)
        if repository is None or "://" in path:
            return put
        file = "tokenizer.json"
        if name.endswith(".model"):
            file = f"original/{name}"
            above = above[:-1] if above[-1:] == ["original"] else above
        folder = "/".join(above) or "." if is_file else path
        command = f"hf download {repository} {file} --local-dir {shorten(folder)}"
        if is_file and f"{folder}/{file}" not in (path, f"./{path}"):
            return f"{put} ({command}, and {folder}/{file} is the path to write)"
        return f"{put} ({command})"

    @property
    def tokenizer(self) -> str | None:
        return self.tokenizer_path

"""The models a recipe can name: `[model] name` is a key of `MODELS`."""

from typing import Any

from torchtitan.models.llama3.spec import LLAMA3
from torchtitan.models.spec import ModelSpec

MODELS: dict[str, ModelSpec[Any]] = {
    "llama3": LLAMA3,
}

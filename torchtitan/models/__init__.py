"""Models that a recipe can name; adding a family is a file here and a line in `MODELS`."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config import Registry
from torchtitan.models.settings import ModelConfig
from torchtitan.models.spec import ModelSpec

MODELS = Registry[ModelSpec[Any]](
    "model",
    {
        "llama3": "torchtitan.models.llama3:LLAMA3",
        "qwen2": "torchtitan.models.qwen2:QWEN2",
        "qwen3": "torchtitan.models.qwen3:QWEN3",
        "qwen3_moe": "torchtitan.models.qwen3_moe:QWEN3_MOE",
        "deepseek_v3": "torchtitan.models.deepseek_v3:DEEPSEEK_V3",
        "gpt_oss": "torchtitan.models.gpt_oss:GPT_OSS",
        "mistral": "torchtitan.models.mistral:MISTRAL",
        "mixtral": "torchtitan.models.mixtral:MIXTRAL",
        "olmo2": "torchtitan.models.olmo2:OLMO2",
        "gemma3": "torchtitan.models.gemma3:GEMMA3",
    },
)


class _SettingsOfModels(Mapping[str, type[ModelConfig]]):
    """Settings classes of all models registered at the moment."""

    def __getitem__(self, name: str) -> type[ModelConfig]:
        return MODELS[name].settings

    def __iter__(self) -> Iterator[str]:
        return iter(MODELS)

    def __len__(self) -> int:
        return len(MODELS)


MODEL_SETTINGS = _SettingsOfModels()


def spec_in_recipe(recipe: Mapping[str, Any]) -> ModelSpec[Any]:
    """Return the family named by a recipe (dotted keys), with the recipe's flavor.

    Raises:
        KeyError: if there is no such model, or flavor of it.
    """
    spec = MODELS[recipe["model.name"]]
    keys = {key: f"model.{key}" for key in spec.settings.model_fields}
    sizes = {key: recipe[path] for key, path in keys.items() if path in recipe}
    config = spec.settings.model_validate(sizes)
    return spec.with_flavor(config.flavor, spec.args(config))


def with_sizes(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sizes of its flavor to a recipe (dotted keys); older recipes recorded none."""
    model = MODELS.get(recipe["model.name"])
    if model is None or recipe["model.flavor"] not in model.flavors:
        return dict(recipe)
    spec = spec_in_recipe(recipe)
    sizes = spec.settings.sizes_of(spec.flavors[recipe["model.flavor"]])
    return {**recipe, **{f"model.{key}": value for key, value in sizes.items()}}

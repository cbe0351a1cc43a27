"""Recipes: frozen settings, read strictly, with errors that teach."""

from torchtitan.config.help import help_text, sections
from torchtitan.config.load import Recipe, load
from torchtitan.config.settings import (
    Config,
    ConfigError,
    KeyPath,
    OneOf,
    Problem,
    RecipeError,
    Setting,
    Translation,
)
from torchtitan.config.sources import read_toml
from torchtitan.config.words import allowed_names, nearest, show

__all__ = [
    "Config",
    "ConfigError",
    "KeyPath",
    "OneOf",
    "Problem",
    "Recipe",
    "RecipeError",
    "Setting",
    "Translation",
    "allowed_names",
    "help_text",
    "load",
    "nearest",
    "read_toml",
    "sections",
    "show",
]

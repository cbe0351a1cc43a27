"""Recipes: frozen settings, read strictly, with errors that name the fix."""

from torchtitan.config.faults import validate_all
from torchtitan.config.files import extended, read_file, read_recipe, read_text
from torchtitan.config.flags import read_flags, split_options, split_recipe
from torchtitan.config.help import (
    HelpEntry,
    HelpSection,
    all_sections,
    help_sections,
    json_schema,
    sections,
)
from torchtitan.config.load import Gathered, Recipe, load, merge
from torchtitan.config.packaged import find_recipe, packaged_folder, packaged_name, packaged_recipes
from torchtitan.config.problems import Context, PlannedWorld, Problem, between
from torchtitan.config.registry import Registry
from torchtitan.config.reporting import print_error, print_message
from torchtitan.config.schema import descriptions, find, flat
from torchtitan.config.settings import (
    CannotRun,
    Config,
    ConfigError,
    Discriminated,
    KeyOf,
    KeyPath,
    ListOf,
    OneOf,
    RecipeError,
    Setting,
    Unreachable,
)
from torchtitan.config.words import (
    allowed_names,
    amount,
    counted,
    docstring,
    exists,
    listed,
    local_path,
    located,
    near_names,
    nearest,
    shorten,
    show,
)

__all__ = [
    "CannotRun",
    "Config",
    "ConfigError",
    "Context",
    "Discriminated",
    "Gathered",
    "HelpEntry",
    "HelpSection",
    "KeyOf",
    "KeyPath",
    "ListOf",
    "OneOf",
    "PlannedWorld",
    "Problem",
    "Recipe",
    "RecipeError",
    "Registry",
    "Setting",
    "Unreachable",
    "all_sections",
    "allowed_names",
    "amount",
    "between",
    "counted",
    "descriptions",
    "docstring",
    "exists",
    "extended",
    "find",
    "find_recipe",
    "flat",
    "help_sections",
    "json_schema",
    "listed",
    "load",
    "local_path",
    "located",
    "merge",
    "near_names",
    "nearest",
    "packaged_folder",
    "packaged_name",
    "packaged_recipes",
    "print_error",
    "print_message",
    "read_file",
    "read_flags",
    "read_recipe",
    "read_text",
    "sections",
    "shorten",
    "show",
    "split_options",
    "split_recipe",
    "validate_all",
]

"""Recipes: frozen settings, read strictly, with errors that name the fix."""

from torchtitan.config import hub as hub
from torchtitan.config.faults import validate_all
from torchtitan.config.files import (
    extended,
    find_recipe,
    packaged_folder,
    packaged_name,
    packaged_recipes,
    read_file,
    read_recipe,
    read_text,
)
from torchtitan.config.flags import (
    HelpEntry,
    HelpSection,
    all_sections,
    help_sections,
    is_array,
    json_schema,
    read_flags,
    sections,
    split_options,
    split_recipe,
)
from torchtitan.config.load import Gathered, Recipe, Sources, gather, load, merge, read_sources
from torchtitan.config.node_files import kept_for_ranks, read_for_node
from torchtitan.config.registry import (
    Registry,
    absent_wings,
    has_wing,
    import_extension,
    import_modules,
    import_wing,
    lacks,
    load_entry,
    needs_wing,
    with_wings,
)
from torchtitan.config.schema import descriptions, docstrings, find, flat
from torchtitan.config.settings import (
    CannotRun,
    Config,
    ConfigError,
    Context,
    Discriminated,
    KeyOf,
    KeyPath,
    ListOf,
    OneOf,
    PlannedWorld,
    Problem,
    RecipeError,
    Setting,
    Unreachable,
    between,
)
from torchtitan.config.words import (
    allowed_names,
    amount,
    counted,
    docstring,
    exists,
    first_of,
    is_hub_id,
    listed,
    local_path,
    located,
    near_names,
    nearest,
    print_error,
    print_message,
    shorten,
    show,
)

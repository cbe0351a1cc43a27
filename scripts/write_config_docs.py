"""Writes docs/config.md, the reference of all settings, from the settings themselves.

python scripts/write_config_docs.py
"""

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import show
from torchtitan.config.help import Section, sections
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.legacy_recipes import TABLE, Converted, Kept, Moved
from torchtitan.models import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

INTRODUCTION = """\
# Recipes

<!-- Written by scripts/write_config_docs.py; change the settings, not this page. -->

A recipe is a TOML file; every key of it is in one of the tables below. Section and key names are
those of TorchTitan v0.2 wherever it has the concept.

```toml
extends = "base/llama3.toml"  # relative to this file; that recipe may extend another

[model]
flavor = "8B"

[optimizer]
lr = 3e-4
```

**Precedence.** Defaults < the extended recipe < the recipe < flags. A recipe that changes
`optimizer.name` does not inherit the settings that the new optimizer does not have. A recipe with
`[[convert]]` sections of its own inherits none; `convert = []` is a list without any.

**Flags.** `--section.key value` or `--section.key=value`. Booleans: `--section.key`,
`--no-section.key`, `--section.no-key`, `--section.key false`. Lists: `--section.key a b` or `a,b`.
What may be absent: `--section.key none`. A hyphen may stand for an underscore. A section in a list
has a number: `--convert.0.recipe rowwise` changes the first one, or with `--convert.0.name float8`
makes it.

**Check.** `torchtitan check RECIPE.toml [--world-size N] [--section.key value ...]` validates a
recipe without starting anything, says all its mistakes at once, and prints it with every key
written out. `train` does the same before it starts anything; the status of a wrong recipe is 2.

**Editors.** `torchtitan check --json-schema > recipe.schema.json` writes a JSON Schema. Taplo, and
with it the TOML extension of several editors, completes and checks a recipe whose first line is
`#:schema recipe.schema.json`.

**Old recipes.** A recipe of TorchTitan v0.1 or v0.2 loads as it is, with a line for each key that
moved; `torchtitan migrate OLD.toml -o NEW.toml` writes it in the present form, comments kept.
[What moved](#what-moved-since-torchtitan-v01-and-v02) is at the end of this page.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *map(section, sections(JobConfig)), *lists(), *old_keys()]
    return "\n".join(parts)


def section(section: Section) -> str:
    """One section as a table."""
    choice = f' with `name = "{section.choice}"`' if section.choice else ""
    rows = [
        f"| `{entry.path.split('.')[-1]}` | {cell(entry.allowed)} | `{cell(entry.default)}` "
        f"| {cell(entry.help)} |"
        for entry in section.entries
    ]
    head = ["| key | value | default | |", "|---|---|---|---|"]
    return "\n".join([f"## {section.header}{choice}", "", section.about, "", *head, *rows, ""])


def lists() -> Iterator[str]:
    """The names that a recipe can use for models and data sets."""
    rows = [
        f"| `{name}` | {', '.join(f'`{f}`' for f in s.flavors)} |" for name, s in MODELS.items()
    ]
    yield "\n".join(["## Models", "", "| `model.name` | `model.flavor` |", "|---|---|", *rows, ""])
    rows = [f"| `{name}` | {cell(dataset.about)} |" for name, dataset in DATASETS.items()]
    yield "\n".join(["## Data sets", "", "| `data.dataset` | |", "|---|---|", *rows, ""])


def old_keys() -> Iterator[str]:
    """The translation table."""
    yield "## What moved since TorchTitan v0.1 and v0.2\n"
    yield "A key without a counterpart is left out where it asks for nothing, else refused. One key"
    yield "has another default than in v0.2: `checkpoint.last_save_model_only` is false.\n"
    yield "| old key | now |\n|---|---|"
    for key, row in TABLE.items():
        if isinstance(row, Moved):
            changed = " (written otherwise)" if row.convert else ""
            yield f"| `{key}` | `{row.to}`{changed} |"
        elif isinstance(row, Converted):
            yield f"| `{key}` | `{row.to}` of a `[[convert]]` section |"
        elif isinstance(row, Kept):
            missing = "; ".join(f"not {show(value)}: {why}" for value, why in row.missing.items())
            yield f"| `{key}` | {cell(missing)} |"
        else:
            yield f"| `{key}` | none: {cell(row.instead)} |"
    yield ""


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

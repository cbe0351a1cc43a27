"""Writes docs/config.md, the reference of all settings, from the settings themselves.

python scripts/write_config_docs.py
"""

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import show
from torchtitan.config.help import HelpSection, sections
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.legacy_recipes import TABLE, Converted, Kept, Moved, Together
from torchtitan.legacy_recipes.version_defaults import DEFAULTS, OUR_SECTIONS
from torchtitan.models import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/write_config_docs.py; change the settings, not this page. -->

The reference of all settings: every section and key that a recipe can have.

A recipe is a TOML file. Section and key names are those of TorchTitan v0.2, wherever it has the
concept.

```toml
extends = "base/llama3.toml"  # relative to this file; that recipe may extend another

[model]
flavor = "8B"

[optimizer]
lr = 3e-4
```

**Precedence.** Flags override the recipe, the recipe overrides the one it extends, and that
overrides the defaults. A recipe that changes `optimizer.name` does not inherit settings that the
new optimizer does not have. A recipe with `[[convert]]` sections does not inherit any;
`convert = []` means none.

**Flags.** `--section.key value` or `--section.key=value`. Booleans: `--section.key`,
`--no-section.key`, `--section.no-key`, `--section.key false`. Lists: `--section.key a b` or `a,b`.
Optional values: `--section.key none`. Hyphens and underscores are equivalent. Sections in a list
have numbers: `--convert.0.recipe rowwise` changes the first one, or, with
`--convert.0.name float8`, adds it.

**Check.** `torchtitan check RECIPE.toml [--world-size N] [--section.key value ...]` validates a
recipe without starting anything and reports all its mistakes at once, in the order of the file,
each with a fix. Otherwise it prints the layout, the model, the estimated memory per rank, the
batch, and the checkpoint to start from. `--resolved` prints the recipe with every key instead, as
TOML that can be trained from. `train` makes the same checks before it starts anything; the exit
status for a wrong recipe is 2. `check --device-memory GIB` also refuses a recipe whose ranks need
more memory than such a device has, and names what would fit. `train`, and `check --here`, refuse a
run that cannot fit in the memory of this machine: all ranks share that of a CPU host.

**Editors.** `torchtitan check --json-schema > recipe.schema.json` writes a JSON Schema. Taplo, the
TOML extension of several editors, then completes and validates any recipe whose first line is
`#:schema recipe.schema.json`.

**Old recipes.** A recipe of TorchTitan v0.1 or v0.2 loads as it is, with a notice for each key that
moved. `torchtitan migrate OLD.toml -o NEW.toml` rewrites it with the current keys and keeps the
comments. [What moved](#what-moved-since-torchtitan-v01-and-v02) is at the end of this page.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *map(section, sections(JobConfig)), *lists(), *old_keys()]
    return "\n".join(parts)


def section(section: HelpSection) -> str:
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
    yield "A key without a counterpart is ignored if its value changes nothing, and refused"
    yield "otherwise.\n"
    yield "A recipe is TorchTitan's if it has a key that only TorchTitan has, and no section that"
    yield f"only this project has ({', '.join(f'`[{name}]`' for name in OUR_SECTIONS)}); of recipes"
    yield "that extend each other, the one that all rest on decides. It was written for the newest"
    yield "version that has all its keys. What it does not say is the default of that version, with"
    yield "a notice, where that is not the default here:\n"
    keys = dict.fromkeys(key for defaults in DEFAULTS.values() for key in defaults)
    yield f"| key | here | {' | '.join(DEFAULTS)} |\n|---|---|{'---|' * len(DEFAULTS)}"
    ours = JobConfig().flat()
    for key in keys:
        theirs = [f"`{show(defaults.get(key, ours[key]))}`" for defaults in DEFAULTS.values()]
        yield f"| `{key}` | `{show(ours[key])}` | {' | '.join(theirs)} |"
    yield "\nIts Llama `debugmodel` has as many key/value heads as heads, and scaled rotary"
    yield "frequencies (`model.rope_scaling = 8.0`); those of v0.1 are never scaled. The seed,"
    yield "which TorchTitan draws at random, is 0.\n"
    yield "| old key | now |\n|---|---|"
    for key, row in TABLE.items():
        if isinstance(row, Moved):
            changed = " (in another form)" if row.convert else ""
            yield f"| `{key}` | `{row.to}`{changed} |"
        elif isinstance(row, Together):
            yield f"| `{key}` | {cell(row.about)} |"
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

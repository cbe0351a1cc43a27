"""Makes the reference of all settings from the settings themselves.

python scripts/write_config_docs.py

writes the reference of verbs and settings that `--help` reads. The site takes its pages of
sections, models and data sets from here when it is built (scripts/site_hooks.py).
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from typing import Any

from torch import nn

from torchtitan.config import HelpEntry, HelpSection, all_sections, packaged_recipes, sections, show
from torchtitan.config.other_names import SYNONYMS, Moved
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.attention import attends
from torchtitan.models.experts import idle_parameters
from torchtitan.models.spec import ModelSpec, build_empty, count_parameters
from torchtitan.tasks import TASKS
from torchtitan.tools.cli import command, verbs
from torchtitan.tools.commands import REFERENCE, as_json
from torchtitan.tools.recipes import BASES, described
from torchtitan.torchtitan_keys import DEFAULTS, OF_CONVERTER, OUR_SECTIONS, TABLE


def pages() -> dict[str, str]:
    """Return the pages of settings by their places in the site: one for each top-level section."""
    written = {
        f"config/{name}.md": "\n".join(
            [f"# {parts[0].header}\n\n{about(parts)}\n", *by_header(parts)]
        )
        for name, parts in sections_by_page().items()
    }
    written["config/recipes.md"] = "\n".join(recipes())
    written["config/families.md"] = "\n".join(families())
    written["config/torchtitan_keys.md"] = "\n".join(old_keys())
    written["config/other_names.md"] = "\n".join(other_names())
    return written


def index() -> Iterator[str]:
    """Yield the tables of sections, models and data sets that end the page of recipes."""
    yield "- [Shipped recipes and studies](config/recipes.md)"
    yield "- [Families of models](config/families.md)"
    yield "- [Keys of TorchTitan v0.1 and v0.2](config/torchtitan_keys.md)"
    yield "- [Names in other frameworks](config/other_names.md)\n"
    yield "## Sections\n\n| section | contents |\n|---|---|"
    for name, parts in sections_by_page().items():
        yield f"| [`{parts[0].header}`](config/{name}.md) | {cell(about(parts))} |"
    yield "\n## Models\n\n[Families](config/families.md) has their sizes, and what they support.\n"
    yield "\n## Data sets\n\n| `data.dataset` | |\n|---|---|"
    for name, dataset in DATASETS.items():
        yield f"| `{name}` | {cell(dataset.about)} |"


def recipes() -> Iterator[str]:
    """The table of the recipes and studies that come with the package."""
    yield "# Shipped recipes and studies\n"
    yield "Start a recipe with `torchtitan train NAME`, a study with `torchtitan compare NAME`.\n"
    yield "| name | model | ranks | about |\n|---|---|---|---|"
    for name, path in sorted(packaged_recipes().items(), key=lambda each: "studies/" in each[0]):
        if not name.startswith(BASES):
            model, ranks, about = described(path)
            yield f"| `{name}` | {model} | {ranks} | {cell(about)} |"
    yield ""


def families() -> Iterator[str]:
    """The table of families of models: their sizes, what they support, the sources of formulas."""
    yield "# Families of models\n"
    yield "The table has the techniques that depend on the network; the others, such as FSDP 2,"
    yield "recomputation and compilation, are the same for all families. Any size can be set in the"
    yield "recipe ([keys](model.md)).\n"
    columns = ("`model.name`", "", "flavors", *TECHNIQUES, "formats of weights", "source")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for name, spec in MODELS.items():
        flavors = (
            f"`{flavor}` ({parameters(build_empty(spec.build, args, 1))})"
            for flavor, args in spec.flavors.items()
        )
        able = ["yes" if supports(spec) else "no" for supports in TECHNIQUES.values()]
        if tied := [flavor for flavor, args in spec.flavors.items() if spec.tied(args)]:
            able[1] = f"but for tied flavors: {', '.join(f'`{flavor}`' for flavor in tied)}"
        numbers = SOURCE.findall(sys.modules[spec.settings.__module__].__doc__ or "")
        source = ", ".join(f"[{n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(numbers))
        formats = ", ".join(("`ours`", "`dcp`", *(f"`{each}`" for each in spec.formats)))
        about = cell(cleandoc(spec.settings.__doc__ or "").replace("\n", " "))
        yield f"| {' | '.join((f'`{name}`', about, ', '.join(flavors), *able, formats, source))} |"
    yield ""


TECHNIQUES: dict[str, Callable[[ModelSpec[Any]], bool]] = {
    "tensor parallelism": lambda spec: bool(spec.tensor_plan),
    "pipeline parallelism": lambda spec: True,
    "context parallelism": lambda spec: (
        attends(build_empty(spec.build, next(iter(spec.flavors.values())), 1))
        and TASKS[spec.task].splits_sequences
    ),
    "expert parallelism": lambda spec: spec.experts(next(iter(spec.flavors.values()))) is not None,
}
"""What a family supports or not, by its spec."""
SOURCE = re.compile(r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{4,5})")


def parameters(network: nn.Module) -> str:
    """Return the parameters of a network in words, and those that a token uses if fewer."""
    total = count_parameters(network).total
    idle = idle_parameters(network)
    return short(total) + (f", {short(total - idle)} used by a token" if idle else "")


def short(number: int) -> str:
    """Return a number in millions or billions."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def sections_by_page() -> dict[str, list[HelpSection]]:
    """Return all sections by the names of the top-level ones that contain them."""
    found = defaultdict(list)
    for part in sections(map(with_values, all_sections(JobConfig))):
        found[part.header.strip("[]").partition(".")[0]].append(part)
    return found


def reference_json() -> str:
    """Return the reference of verbs and settings, with the names that complete a value."""
    modules = {name: module for group in verbs().values() for name, module in group.items()}
    commands = {name: command(module) for name, module in modules.items()}
    return as_json(commands, map(with_values, all_sections(JobConfig)))


def with_values(section: HelpSection) -> HelpSection:
    """Add the names that complete the values of a section's keys, and the sizes of flavors."""
    names = {"data.dataset": [*DATASETS], "validation.dataset": [*DATASETS]}
    if section.choice:
        names[f"{section.path}.name"] = [section.choice]
    helps = dict[str, str]()
    if section.path == "model":
        spec = MODELS[str(section.choice)]
        names["model.flavor"] = [*spec.flavors]
        of_sizes = {f"model.{key}": key for key in spec.settings.sizes()}
        helps = {
            each.path: spec.with_sizes(of_sizes[each.path], each.help)
            for each in section.entries
            if each.path in of_sizes
        }
    entries = [
        each._replace(
            values=names.get(each.path, each.values), help=helps.get(each.path, each.help)
        )
        for each in section.entries
    ]
    return section._replace(entries=entries)


def about(parts: Sequence[HelpSection]) -> str:
    """Return a sentence about a section at the top of a recipe, with the sections below it."""
    first = parts[0]
    if not first.choice:
        return first.about
    names = ", ".join(f"`{part.choice}`" for part in parts if part.header == first.header)
    number = "Any number of sections, each" if first.header.startswith("[[") else "One"
    return f"{number} of {names}, selected by `name`."


def by_header(parts: Sequence[HelpSection]) -> Iterator[str]:
    """Yield the text of sections; keys that all choices of one section share are given once."""
    found = defaultdict(list)
    for part in parts:
        found[part.header].append(part)
    for header, choices in found.items():
        if len(choices) == 1:
            if header != parts[0].header:
                yield f"## {header}\n\n{choices[0].about}\n"
            yield table(rows(choices[0]))
            continue
        shared = [row for row in rows(choices[0]) if all(row in rows(each) for each in choices)]
        if choices[0].choice:
            shared.insert(0, name_row(choices))
        if shared:
            yield f"## {header}: shared keys\n\n{table(shared)}"
        own = defaultdict(list)
        for each in choices:
            own[tuple(row for row in rows(each) if row not in shared)].append(each)
        for keys, same in own.items():
            listed = "\n".join(f"- `{each.choice}`: {each.about}" for each in same)
            described = listed if len(same) > 1 else same[0].about
            yield f"## {header} {which(same)}\n\n{described}\n" + f"\n{table(keys)}" * bool(keys)


def which(same: Sequence[HelpSection]) -> str:
    """Return the words that tell sections from others with the same header."""
    if same[0].choice:
        return "with `name = {}`".format(" or ".join(f'"{each.choice}"' for each in same))
    owner = re.match(r"Settings of (.+) that differ", same[0].about)
    assert owner, f"several sections are called {same[0].header}: {same[0].about}"
    return f"of {owner[1]}"


def name_row(choices: Sequence[HelpSection]) -> str:
    """Return the key that chooses one of several sections, as a row of a table."""
    (entry, *_) = (entry for entry in choices[0].entries if entry.path.endswith(".name"))
    default = JobConfig().flat().get(entry.path)
    names = ", ".join(str(each.choice) for each in choices)
    shown = "required" if default is None else show(default)
    return as_row(entry._replace(allowed=names, default=shown))


def rows(section: HelpSection) -> list[str]:
    """Return the rows of the table of a section, without the key that chooses it."""
    entries = (e for e in section.entries if not (section.choice and e.path.endswith(".name")))
    return [as_row(entry) for entry in entries]


def as_row(entry: HelpEntry) -> str:
    """Return a key as a row of a table."""
    default, about = f"`{entry.default}`", entry.help
    if entry.default == "none" and (said := re.fullmatch(r"(.+) \(default: (.+)\)\.", about)):
        about, default = f"{said[1]}.", said[2]
    cells = entry.path.split(".")[-1], cell(entry.allowed), cell(default), cell(about)
    return "| `{}` | {} | {} | {} |".format(*cells)


def table(rows: Sequence[str]) -> str:
    """Return rows with their head, if there are any."""
    head = ["| key | value | default | description |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""]) if rows else ""


def old_keys() -> Iterator[str]:
    """The translation table."""
    yield "# What moved since TorchTitan v0.1 and v0.2\n"
    yield "`torchtitan migrate OLD.toml -o NEW.toml` converts a recipe of TorchTitan by this table;"
    yield "every other verb refuses one, with that command.\n"
    yield "A key without a counterpart is dropped if its value changes nothing, and refused"
    yield "otherwise.\n"
    yield "Other verbs refuse a recipe with several keys that only TorchTitan has; `migrate` takes"
    yield "one with any such key to be TorchTitan's, if it has no section"
    yield f"that only this project has ({', '.join(f'`[{name}]`' for name in OUR_SECTIONS)}). It"
    yield "was written for the newest version that has all its keys. A key that it does not set"
    yield "gets the default of that version, with a notice, where that differs from ours:\n"
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
        if not isinstance(row, Moved):
            yield f"| `{key}` | none: {cell(row.instead)} |"
        elif row.to.startswith(OF_CONVERTER):
            yield f"| `{key}` | `{row.to.removeprefix(OF_CONVERTER)}` of a `[[convert]]` section |"
        else:
            yield f"| `{key}` | `{row.to}`{' (in another form)' if row.convert else ''} |"
    yield ""


def other_names() -> Iterator[str]:
    """The names of settings in other software."""
    yield "# Names in other frameworks\n"
    yield "Settings and options by the names that users of Hugging Face, Megatron-LM, litgpt or"
    yield "nanoGPT know; `train` and `check` suggest ours. The meaning may differ in detail:"
    yield "`gradient_accumulation_steps`, for example, follows from the global batch.\n"
    yield "| elsewhere | here |\n|---|---|"
    for name, ours in sorted(SYNONYMS.items()):
        yield f"| `{name}` | `{ours}` |"
    yield ""


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    REFERENCE.write_text(reference_json(), encoding="utf-8")

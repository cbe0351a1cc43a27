"""The reference of verbs and settings: for `--help SECTION`, and for the completion of a shell."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torchtitan.config import HelpSection, sections
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.tools.commands import CompletionTable

SETTINGS = """\
Settings override the recipe: --section.key VALUE, or --section.key=VALUE.
True, false: --section.key, --no-section.key. None: --section.key none.
Lists: --section.key A B, or A,B. For the settings of a section:
--help SECTION; for those of every section: --help all.
"""


def section_lines() -> dict[str, str]:
    """Return a line about each section of a recipe; where there is a choice, its names."""
    lines: dict[str, str] = {}
    for section in sections(JobConfig):
        name = section.header.strip("[]")
        if section.choice and "." not in name:
            lines[name] = ", ".join(filter(None, [lines.get(name), section.choice]))
        elif "." not in name:
            lines[name] = section.about
    return lines


def show_sections() -> None:
    """Print the list of sections, as a part of the help of a verb."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, about in section_lines().items():
        table.add_row(Text(name, style="bold cyan"), Text(about))
    _print_panels([("Settings", [Text(SETTINGS), table])])


def show_settings(found: Sequence[HelpSection], is_long: bool) -> None:
    """Print the settings of sections; long help on a terminal goes through a pager."""
    from rich.padding import Padding
    from rich.text import Text

    panels: list[tuple[str, list[Any]]] = []
    for section in found:
        rows: list[Any] = [Text(section.about)]
        for entry in section.entries:
            default = "" if "(default: " in entry.help else f"; default: {entry.default}"
            values = f"({entry.allowed}{default})"
            rows.append(Text.assemble((f"--{entry.path}", "bold cyan"), "  ", (values, "dim")))
            rows.append(Padding(Text(entry.help), (0, 0, 0, 4)))
        panels.append((section.title, rows))
    _print_panels(panels, is_long)


def _print_panels(panels: Iterable[tuple[str, Sequence[Any]]], is_long: bool = False) -> None:
    """Print frames such as those of the options of a verb."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    with console.pager() if is_long and console.is_terminal else nullcontext():
        for title, rows in panels:
            frame = Panel(Group(*rows), title=Text(title), title_align="left", border_style="dim")
            console.print(frame)


def completion_table(verbs: Mapping[str, Any]) -> CompletionTable:
    """Return the options of all verbs and the settings of recipes, with their help and values."""
    settings: dict[str, tuple[str, list[str]]] = {}
    for section in sections(JobConfig):
        for entry in section.entries:
            values = list(entry.values)
            if entry.path.endswith(".name") and section.choice:
                values = [section.choice]
            elif entry.path == "model.flavor" and section.choice:
                values = list(MODELS[section.choice].flavors)
            elif entry.path in ("data.dataset", "validation.dataset"):
                values = list(DATASETS)
            of_others = settings.get(f"--{entry.path}", ("", []))[1]
            settings[f"--{entry.path}"] = entry.help, list(dict.fromkeys([*of_others, *values]))
    names = [*section_lines(), "all"]
    table: dict[str, Mapping[str, tuple[str, list[str] | None]]] = {}
    for name, verb in verbs.items():
        group = getattr(verb, "commands", {})
        inside = {f"{name} {key}": command for key, command in group.items()}
        for path, command in (inside or {name: verb}).items():
            context = command.context_class(command)
            options: dict[str, tuple[str, list[str] | None]] = {}
            for option in command.get_params(context):
                if option.param_type_name == "option":
                    found = [item.value for item in option.shell_complete(context, "")]
                    about = option.help, None if option.is_flag else found
                    options |= dict.fromkeys(option.opts, about)
            if command.takes_recipe:
                about = options["--help"][0], names
                options |= settings | {"-h": about, "--help": about}
            table[path] = options
    return table

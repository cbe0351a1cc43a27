"""Show a page of the documentation.

A topic is a page, a section of a recipe, or a command. Without one, all topics are listed.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from difflib import SequenceMatcher
from heapq import nlargest
from pathlib import Path
from typing import Annotated

import typer

from torchtitan.config import ConfigError, help_sections
from torchtitan.logging import make_console, on_terminal
from torchtitan.resilience import exit_codes
from torchtitan.tools.commands import (
    section_names,
    settings,
    show_settings,
    verb_names,
    verb_of_help,
)
from torchtitan.tools.options import RecipeVerb, Verb, verb

PACKAGE = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"<!-- (?:file: (\S+)|.*?) -->\n")
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")
SUGGESTED = 3

app = verb()


@app.command(cls=Verb, help=__doc__)
def show(
    topic: Annotated[
        list[str] | None, typer.Argument(help="Page, section or command: checkpoint, lr_scheduler.")
    ] = None,
) -> None:
    found, said = pages(), " ".join(topic or [])
    name = as_topic(said)
    by_title = {as_topic(title(page)): page for page in found.values()}
    page = found.get(name) or by_title.get(name)
    if not said:
        write("\n".join(topics(found)))
    elif page:
        write(as_text(page, found))
    elif name.partition(".")[0] in section_names():
        show_settings(help_sections(settings(), name), is_long=True)
    elif name.replace("_", "-") in verb_names():
        command = name.replace("_", "-")
        stand_in = verb_of_help(command, (Verb, RecipeVerb))
        stand_in.main(["--help"], f"torchtitan {command}", standalone_mode=False)
    else:
        near = ", ".join(nearest_topics(said, found))
        raise ConfigError(f"help: got {said}; the nearest topics are {near}")


def folder() -> Path:
    """Return the folder of the pages: in the package, or in the clone around it."""
    installed = PACKAGE / "pages"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    files = [*sorted(folder().glob("*.md")), *sorted(PACKAGE.glob("research/*.md"))]
    found = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return found | {"exit_codes": exit_codes.page()}


def as_topic(words: str) -> str:
    """Return the name that a topic has in the code, for the words by which a user calls it."""
    return re.sub(r"[\s-]+", "_", words.strip().lower())


def title(page: str) -> str:
    return page.partition("\n")[0].removeprefix("# ")


def topics(found: Mapping[str, str]) -> list[str]:
    """Return the lines that list all topics, in Markdown."""
    rows = [f"- `{name}`: {title(page)}" for name, page in found.items()]
    return [
        *("# Topics", "", *rows, ""),
        f"Sections of a recipe: {', '.join(section_names())}.\n",
        f"Verbs: {', '.join(verb_names())}.",
    ]


def nearest_topics(said: str, found: Mapping[str, str]) -> list[str]:
    """Return the topics whose names, headings or keywords are most like what was said."""
    keywords = tomllib.loads((folder() / "keywords.toml").read_text(encoding="utf-8"))
    known = {name: [name, *name.split("_")] for name in (*found, *verb_names(), *section_names())}
    for name, page in found.items():
        known[name] += re.findall(r"\w+", " ".join(re.findall(r"^#+ .+$", page, re.M)).lower())
        known[name] += keywords.get(name, "").split(", ")

    def likeness(name: str) -> float:
        each = (SequenceMatcher(None, said.lower(), word) for word in known[name])
        return max(match.ratio() for match in each)

    return nlargest(SUGGESTED, known, likeness)


def as_text(page: str, found: Mapping[str, str]) -> str:
    """Return a page without what only the site shows, and with the topics that it links to."""
    linked = dict.fromkeys(Path(each[2].partition("#")[0]).stem for each in LINK.findall(page))
    text = COMMENT.sub(lambda match: f"`{match[1]}`:\n\n" if match[1] else "", page)

    def without_link(match: re.Match[str]) -> str:
        is_picture, words, target = match.groups()
        address = f" ({target})" if target.startswith("https:") else ""
        return f"[picture: {words}]" if is_picture else words + address

    also = [name for name in linked if name in found and found[name] != page]
    ending = f"\n\nSee also: torchtitan help {' | '.join(also)}" if also else ""
    return LINK.sub(without_link, text).rstrip() + ending


def write(text: str) -> None:
    """Print Markdown, formatted and through a pager on a terminal."""
    if not on_terminal(sys.stdout):
        print(text)
        return
    from rich.markdown import Markdown

    console = make_console()
    with console.pager():
        console.print(Markdown(text))

"""Parts of the site that mkdocs does not find in docs/ by itself.

Pages from elsewhere in the repository are added, and the pages of settings are made. The README's
section Install, the list of packages, the tables of sections and the options of verbs are filled
in, and so is what two commands print and write. Links to files outside of the site become plain
text: the pages are also read in the repository, where those links work.
"""

import ast
import functools
import io
import posixpath
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the code of this clone, whichever one is installed


def added() -> dict[str, str]:
    """Return the place in the site of each file that is not in docs/."""
    results = (ROOT / "benchmarks/results").iterdir()
    papers = (path.stem for path in (ROOT / "torchtitan/research").glob("*.md"))
    pages = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    pages["benchmarks/README.md"] = "benchmarks/index.md"
    for path in results:
        if path.suffix in (".md", ".svg"):
            pages[f"benchmarks/results/{path.name}"] = f"benchmarks/results/{path.name}"
    return pages | {f"torchtitan/research/{name}.md": f"papers/{name}.md" for name in papers}


ADDED = added()
KEYWORDS = tomllib.loads((ROOT / "docs/keywords.toml").read_text(encoding="utf-8"))
NOT_SEARCHED = "benchmarks/results/"
LESS_SEARCHED = ("benchmarks/", "changelog", "api")
MORE_SEARCHED = ("quickstart", "layouts", "checkpoint", "precision", "data.md")
FILE = re.compile(r"<!-- file: (\S+) -->\n```(\w+)")
"""The name of a file, above the block with its text."""
SMALLEST_TEXT = 10
"""Pixels of the text of a picture on a narrow screen, where the picture scrolls."""
COMMANDS = {"plan.md": "--html plan.html", "compare.md": "compare train_configs/debug_model.toml"}
"""A part of the command of a page whose answer is shown below it."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and those of settings."""
    from scripts.write_config_docs import pages

    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    for uri, (_, html) in examples().items():
        files.append(File.generated(config, f"examples/{uri[:-3]}.html", content=html))
    return files


@functools.cache
def examples() -> dict[str, tuple[str, str]]:
    """Return what the commands of `COMMANDS` print, and the pages that they write.

    The plan is made here; the comparison was made on a CPU.
    """
    from pydantic import TypeAdapter

    from torchtitan.tools.cli import main
    from torchtitan.tools.compare import summary
    from torchtitan.tools.compare.report_page import report_page
    from torchtitan.tools.compare.results import Report

    command = "plan train_configs/debug_model.toml --world-size 2 --hardware h100 --html"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        words = [*command.replace("train_configs", f"{ROOT}/train_configs").split(), str(page)]
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
            assert main(words) == 0, command
        plan = printed.getvalue().partition("\npage: ")[0], page.read_text(encoding="utf-8")
    recorded = (ROOT / "benchmarks/results/compare.json").read_bytes()
    report = TypeAdapter(Report).validate_json(recorded)
    lines = "\n".join(["$ " + report.command.replace(" --", " \\\n    --", 2), *summary(report)])
    return {"plan.md": plan, "compare.md": (lines, report_page(report).html())}


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Fill in what is computed, name files, and point links to where the site has theirs."""
    from scripts.write_config_docs import index
    from torchtitan.resilience import exit_codes

    markdown = FILE.sub(r'```\2 title="\1"', markdown)
    if command := COMMANDS.get(uri := page.file.src_uri):
        printed, _ = examples()[uri]
        link = f"[The page that it writes](examples/{uri[:-3]}.html)"
        block = re.compile(rf"```bash\n[^`]*{re.escape(command)}[^`]*```\n")
        shown = block.search(markdown)
        assert shown, f"{uri} has no command {command}"
        answer = f"\n```text\n{printed}\n```\n\n{link}.\n"
        markdown = markdown[: shown.end()] + answer + markdown[shown.end() :]
    if page.file.src_uri == "commands.md":
        markdown += "\n\n" + "\n".join(help_of_verbs())
    if page.file.src_uri == "config.md":
        markdown += "\n\n" + "\n".join(index())
    if page.file.src_uri == "exit_codes.md":
        markdown = exit_codes.page()
    if page.file.src_uri == "architecture.md":
        markdown = re.sub(r"(?<=\n## The road\n).*?(?=\n## )", with_lines, markdown, flags=re.S)
        markdown += "\n\n| package | contents |\n|---|---|\n" + "\n".join(packages())
    if page.file.src_uri == "install.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        section = readme.partition("\n## Install\n")[2].partition("\n## ")[0]
        assert section, "README.md has no section Install"
        before, _, after = markdown.partition("The [README]")
        markdown = before + section.replace("](docs/", "](") + after.partition("\n")[2]
    if page.file.src_uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(LESS_SEARCHED + MORE_SEARCHED):
        boost = 0.2 if page.file.src_uri.startswith(LESS_SEARCHED) else 2
        page.meta["search"] = {"boost": boost}
    if page.file.src_uri in (f"{name}.md" for name in KEYWORDS):
        page.meta["tags"] = KEYWORDS[page.file.src_uri.removesuffix(".md")].split(", ")
    source = page.file.abs_src_path or ROOT / "docs" / page.file.src_uri
    here = Path(source).relative_to(ROOT).as_posix()

    def linked(match: re.Match[str]) -> str:
        text, name, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        place = path.removeprefix("docs/") if path.startswith("docs/") else ADDED.get(path)
        if path == "README.md":
            place, anchor = ("install.md" if anchor == "#install" else "index.md"), ""
        if place is None:
            return text if (ROOT / path).exists() else match[0]
        relative = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({relative}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([\w./-]+)(#[^)]*|)\)", linked, markdown)


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Refuse a picture without a text alternative, and let paths in tables break after a slash.

    Pictures are given the width below which their text cannot be read (stylesheets/site.css).
    """
    if picture := re.search(r'<img (?![^>]*\balt="[^"])[^>]*>', html):
        raise PluginError(f"{page.file.src_uri}: {picture[0]} has no text alternative")
    html = re.sub(r'<img (?=[^>]*src="[^"]*?([\w.]+\.svg)")', with_width, html)
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)  # no header, for a screen reader
    return re.sub(
        r"<code>[^<]+/[^<]+</code>", lambda m: m[0][:-7].replace("/", "/<wbr>") + "</code>", html
    )


def with_width(image: re.Match[str]) -> str:
    """Return the start of an image with the width at which its smallest text can be read."""
    folders = (ROOT / "docs/images", ROOT / "benchmarks/results")
    drawn = next(path for each in folders if (path := each / image[1]).exists()).read_text("utf-8")
    sizes = [int(size) for size in re.findall(r'font-size="(\d+)"', drawn)]
    width = int(drawn.partition('viewBox="0 0 ')[2].partition(" ")[0])
    return f'{image[0]}style="--readable: {ceil(width * SMALLEST_TEXT / min(sizes))}px" '


def on_post_page(output: str, **_: Any) -> str:
    """Name the search dialog, and leave nested navigation without landmarks of its own."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    nested = (
        r'(<nav class="md-nav" data-md-level="[1-9]") aria-labelledby="\w+" aria-expanded="\w+"'
    )
    return re.sub(nested, r'\1 role="presentation"', output)


def with_lines(section: re.Match[str]) -> str:
    """Return a section with the numbers of lines of the files in its table."""
    lines = section[0].replace("| contents |\n|---|---|", "| contents | lines |\n|---|---|---:|")

    def counted(row: re.Match[str]) -> str:
        text = (ROOT / "torchtitan" / row[1]).read_text(encoding="utf-8")
        return f"{row[0]} {len(text.splitlines())} |"

    return re.sub(r"^\| `([\w/]+\.py)` \|.*\|$", counted, lines, flags=re.M)


def packages() -> Iterator[str]:
    """Yield a row for each package, and each module outside of one, from its docstring."""
    package = ROOT / "torchtitan"
    for path in sorted([*package.glob("*/__init__.py"), *package.glob("[!_]*.py")]):
        name = f"{path.parent.name}/" if path.stem == "__init__" else path.name
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        about = docstring.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield f"| `{name}` | {about} |"


def help_of_verbs() -> Iterator[str]:
    """Yield the help of every verb."""
    import typer.cli

    from torchtitan.tools.cli import verbs

    for group in verbs().values():
        for name, module in group.items():
            command = typer.main.get_command(import_module(module).app)
            context = typer.Context(command, info_name=name)
            yield typer.cli.get_docs_for_click(
                obj=command, ctx=context, indent=1, name=name, call_prefix="torchtitan"
            )

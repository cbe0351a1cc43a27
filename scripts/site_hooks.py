"""Parts of the site that mkdocs does not find in docs/ by itself.

Pages from elsewhere in the repository are added, and links to files that the site does not have
become plain text: the pages can be read in the repository, too, where those links work.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def added() -> dict[str, str]:
    """Return the place in the site of each file that is not in docs/."""
    results = {
        f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks/results").iterdir()
    }
    results = {name for name in results if name.endswith((".md", ".svg"))}
    papers = (path.parent.name for path in (ROOT / "torchtitan/research").glob("*/README.md"))
    return (
        PAGES
        | {"benchmarks/README.md": "benchmarks/index.md"}
        | {name: name for name in results}
        | {f"torchtitan/research/{name}/README.md": f"papers/{name}.md" for name in papers}
    )


ADDED = added()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Point links to where the site has their files."""
    assert page.file.abs_src_path is not None
    here = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def linked(match: re.Match[str]) -> str:
        text, name, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        place = path.removeprefix("docs/") if path.startswith("docs/") else ADDED.get(path)
        if path == "README.md":
            place = "index.md"
        if place is None:
            return text if (ROOT / path).exists() else match[0]
        relative = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({relative}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([\w./-]+)(#[^)]*|)\)", linked, markdown)

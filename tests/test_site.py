"""The site is built without a warning, and shows and requests what it should."""

import ast
import functools
import http.server
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest

from tests.compare.browser import CHROMIUM, opened_browser
from torchtitan.launch import WRONG_RECIPE
from torchtitan.resilience.stop import DIVERGED, REQUEUE, SIGNALS, status_of_stop

ROOT = Path(__file__).resolve().parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # --strict fails for dead links and anchors, and for pages that the navigation omits.
    assert built.returncode == 0, built.stderr
    return folder


class Elements(HTMLParser):
    """The files that a page loads, and the ids of its headings."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.headings: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and (file := values.get(LOADED[tag])):
            self.loaded.append(file)
        if re.fullmatch("h[1-6]", tag) and (heading := values.get("id")):
            self.headings.append(heading)


@pytest.mark.gate
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        elsewhere = [file for file in Elements(page).loaded if re.match(r"(https?:)?//", file)]
        assert elsewhere == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.gate
def test_headings_of_a_page_can_be_linked(site: Path) -> None:
    for page in site.rglob("*.html"):
        # mkdocs numbers the anchors of equal headings, and the numbers change with their order.
        names = Counter(re.sub(r"_\d+$", "", each) for each in Elements(page).headings)
        assert [name for name, count in names.items() if count > 1] == [], page


@pytest.mark.gate
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_finds_a_page(scheme: str, site: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with opened_browser() as browser:
            page = browser.new_page(color_scheme=scheme)  # type: ignore[arg-type]
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            shown = page.locator("body").get_attribute("data-md-color-scheme")
            assert shown == {"light": "default", "dark": "slate"}[scheme]
            page.get_by_placeholder("Search").fill("exit codes")
            page.locator(".md-search-result__link").first.click()
            page.wait_for_url("**/exit_codes/**")
        server.shutdown()
    assert {url.split("/")[2] for url in requested if url.startswith("http")} == {
        f"127.0.0.1:{server.server_port}"
    }


def test_exit_codes_are_those_of_the_code() -> None:
    page = (ROOT / "docs/exit_codes.md").read_text(encoding="utf-8")
    run = page.partition("## A run")[2].partition("## Other verbs")[0]
    codes = re.findall(r"^\| ([\d]+|128 \+ n) \|", run, re.MULTILINE)
    assert codes == ["0", "1", str(WRONG_RECIPE), str(DIVERGED), str(REQUEUE), "128 + n"]
    stopped = {by: status_of_stop(by, True) for by in (*SIGNALS, None)}
    assert {by for by, code in stopped.items() if code == REQUEUE} == {SIGTERM, SIGUSR1}
    assert set(stopped.values()) == {0, REQUEUE}
    assert status_of_stop(SIGTERM, False) == 1


def registries() -> Iterator[str]:
    """The name of every registry of the package."""
    for path in (ROOT / "torchtitan").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Registry["):
                yield ast.unparse(node.targets[0])


def test_every_registry_has_a_row_in_the_python_api() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `torchtitan\.([\w.]+)\.(\w+)` \|", page, re.MULTILINE)
    assert {name for _, name in listed} == {*registries(), "SINKS"}
    for module, name in listed:
        assert hasattr(import_module(f"torchtitan.{module}"), name)

"""The site is built without a warning, and shows and requests what it should."""

import ast
import functools
import http.server
import json
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from types import SimpleNamespace

import pytest

from tests.compare.browser import CHROMIUM, opened_browser
from tests.sources import MODULES, ROOT, nodes, pages_of_settings, tree
from torchtitan.tools.cli import verbs
from torchtitan.tools.commands import REFERENCE

LOOKED_AT = (
    *("", "tutorial/", "papers/loco/", "config/training/", "plan/", "parallelism/"),
    *("examples/plan.html", "examples/compare.html"),
)
"""Pages that are looked at in a browser, on a narrow screen."""
TEXT_SIZES = """() => Promise.all(Array.from(document.images, async (image) => {
    const text = await (await fetch(image.src)).text();
    const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    const sizes = [...drawn.querySelectorAll("text")].map((each) =>
        each.closest("[font-size]").getAttribute("font-size"));
    return Math.min(...sizes) * image.width / drawn.viewBox.baseVal.width;
}))"""
"""The height of the smallest text of each picture of a page, in pixels of the screen."""
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # --strict fails for dead links and anchors, and for pages that the navigation omits.
    assert built.returncode == 0, built.stderr
    return folder


class Elements(HTMLParser):
    """The files that a page loads, and the ids of its headings."""

    def __init__(self, page):
        super().__init__()
        self.loaded = []
        self.headings = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in LOADED and (file := values.get(LOADED[tag])):
            self.loaded.append(file)
        if re.fullmatch("h[1-6]", tag) and (heading := values.get("id")):
            self.headings.append(heading)


@pytest.mark.gate
def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        elsewhere = [file for file in Elements(page).loaded if re.match(r"(https?:)?//", file)]
        assert elsewhere == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.gate
def test_headings_of_a_page_can_be_linked(site):
    for page in site.rglob("*.html"):
        # mkdocs numbers the anchors of equal headings, and the numbers change with their order.
        names = Counter(re.sub(r"_\d+$", "", each) for each in Elements(page).headings)
        assert [name for name, count in names.items() if count > 1] == [], page


@pytest.mark.gate
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_search_finds_a_page(scheme, site):
    from axe_playwright_python.sync_playwright import Axe

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with opened_browser() as browser:
            page = browser.new_page(color_scheme=scheme)
            page.set_default_timeout(120_000)
            requested = []
            page.on("request", lambda request: requested.append(request.url))
            home = f"http://127.0.0.1:{server.server_port}/"
            page.goto(home)
            shown = page.locator("body").get_attribute("data-md-color-scheme")
            assert shown == {"light": "default", "dark": "slate"}[scheme]
            page.set_viewport_size({"width": 360, "height": 800})
            for path in LOOKED_AT:
                page.goto(home + path)
                found = Axe().run(page, options={"resultTypes": ["violations"]}).response
                assert [rule["id"] for rule in found["violations"]] == [], path
                assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
                assert min(page.evaluate(TEXT_SIZES), default=10) >= 10, path
            page.set_viewport_size({"width": 1280, "height": 800})
            page.goto(f"{home}?q=exit+codes")
            page.get_by_placeholder("Search").click()
            page.locator(".md-search-result__link").first.click()
            page.wait_for_url("**/exit_codes/**")
        server.shutdown()
    assert {url.split("/")[2] for url in requested if url.startswith("http")} == {
        f"127.0.0.1:{server.server_port}"
    }


@pytest.mark.gate
def test_search_answers_questions_of_users(site):
    """The worker of the site is asked, with its own index, in the Node.js that playwright has."""
    from playwright._impl._driver import compute_driver_executable

    folder = ROOT / "tests/docs"
    questions = tomllib.loads((folder / "questions.toml").read_text(encoding="utf-8"))
    command = [compute_driver_executable()[0], folder / "search.js", site]
    asked = json.dumps([*questions])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    found = dict(zip(questions, json.loads(done.stdout), strict=True))
    missed = {
        question: found[question][:5]
        for question, pages in questions.items()
        if not {f"{page}/" for page in pages} & {*found[question][:5]}
    }
    assert len(questions) >= 40
    assert missed == {}, "say it on the page, or in docs/keywords.toml"


def test_navigation_has_every_page():
    """A build of the site would refuse a missing page too, but only in the gate."""
    added = runpy.run_path(str(ROOT / "scripts/site_hooks.py"))["ADDED"].values()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    results = "benchmarks/results/"  # linked from where they are quoted
    pages |= {page for page in added if page.endswith(".md") and not page.startswith(results)}
    pages |= {path.relative_to(ROOT / "docs").as_posix() for path in pages_of_settings()}
    named = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert (sorted(pages - set(named)), len(named)) == ([], len(pages))
    keywords = tomllib.loads((ROOT / "docs/keywords.toml").read_text(encoding="utf-8"))
    assert [page for page in keywords if f"{page}.md" not in pages] == []


def test_a_picture_without_a_text_alternative_fails_the_build():
    from mkdocs.exceptions import PluginError

    shown = runpy.run_path(str(ROOT / "scripts/site_hooks.py"))["on_page_content"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    text = '<p><img alt="two curves" src="../images/lanes.svg" /></p>'
    assert "--readable: 619px" in shown(text, page=page)  # where its text of 11 is 10 of 680 px
    for alternative in ("", 'alt="" '):
        with pytest.raises(PluginError, match=r"a\.md: "):
            shown(text.replace('alt="two curves" ', alternative), page=page)


def registries():
    """The name of every registry of the package."""
    for path in MODULES:
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Registry["):
                yield ast.unparse(node.targets[0])


def test_every_registry_has_a_row_in_the_python_api():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `torchtitan\.([\w.]+)\.(\w+)` \|", page, re.MULTILINE)
    assert {name for _, name in listed} == set(registries())
    for module, name in listed:
        assert hasattr(import_module(f"torchtitan.{module}"), name)


@pytest.mark.slow
def test_table_of_sizes_is_as_computed():
    script = runpy.run_path(str(ROOT / "scripts/write_layout_table.py"))
    page = (ROOT / "benchmarks/results/plan_accuracy.md").read_text(encoding="utf-8")
    assert page == script["written"](page), "run python scripts/write_layout_table.py"


@pytest.mark.gate
def test_verbs_tables_and_names_of_files_are_shown(site):
    commands = (site / "commands/index.html").read_text(encoding="utf-8")
    for name in (verb for group in verbs().values() for verb in group):
        assert f'id="torchtitan-{name}"' in commands
    text = (site / "extending/index.html").read_text(encoding="utf-8")
    assert '<span class="filename">my_decoder.py</span>' in text
    text = (site / "config/index.html").read_text(encoding="utf-8")
    settings = json.loads(REFERENCE.read_text(encoding="utf-8"))["settings"]
    keys = [entry for *_, entries in settings for entry in entries]
    names = {name for key in keys if key[0] in ("model.name", "data.dataset") for name in key[4]}
    assert {"llama3", "c4"} < names
    assert all(f"<code>{name}</code>" in text for name in names)


def texts_of_the_package():
    """Every string of the package, a line each; values in them are left out."""
    found = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(text.replace("\n", " ") for text in found)


def test_quoted_messages_exist():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    said, missing = texts_of_the_package(), []
    for message in (quoted := re.findall(r'^### "(.+)"$', page, re.MULTILINE)):
        pattern = ".+".join(re.escape(part) for part in message.strip("… ").split("…"))
        missing += [] if re.search(pattern, said) else [message]
    assert quoted
    assert missing == [], "mend docs/troubleshooting.md"

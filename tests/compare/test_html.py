"""The page of a comparison: it shows what `report.json` says, to everybody who reads it."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compare.browser import CHROMIUM, TEXT_CONTRAST, opened_browser
from tests.compare.samples import HOSTILE, LONG, UNICODE, sample
from torchtitan.tools.compare import summary
from torchtitan.tools.compare.html_page import html_page as page
from torchtitan.tools.compare.markdown import markdown
from torchtitan.tools.compare.plots import plots
from torchtitan.tools.compare.results import Report, Variant
from torchtitan.tools.compare.verdict import verdict

ROOT = Path(__file__).resolve().parents[2]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


class Reader(HTMLParser):
    """Tags, links and texts of a page; scripts are not text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)
        (self.scripts if self.cdata_elem == "script" else self.texts).append(data)


@pytest.fixture(scope="module")
def report() -> Report:
    return sample()


@pytest.fixture(scope="module")
def document(report: Report) -> str:
    return page(report)


def test_the_report_is_inside(report: Report, document: str) -> None:
    inside = document.split('<script type="application/json" id="report">')[1].split("</script>")[0]
    assert json.loads(inside) == json.loads(report.to_json())


def test_no_name_is_taken_for_markup(report: Report, document: str) -> None:
    from markdown_it import MarkdownIt

    reader = Reader(document)
    assert reader.tags.count("script") == 3
    assert reader.tags.count("title") == 1
    assert "b" not in reader.tags
    assert {HOSTILE, UNICODE, LONG} <= set(reader.texts)
    # Nor is one in the Markdown, by readers that let HTML pass.
    reader = Reader(
        MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown(report))
    )
    assert not {"script", "b"} & set(reader.tags)
    assert {HOSTILE, UNICODE, LONG} <= set(reader.texts)


def test_a_name_is_shown_as_it_is(report: Report) -> None:
    from markdown_it import MarkdownIt

    first, *others = report.variants
    special = "a_b _c_ *d* `e` [f](g) <h> &amp; \\| ~~i~~ | j #"
    for name in (special, "# k", "> l", "- m", "![n](o)"):
        variants = (dataclasses.replace(first, name=name), *others)
        changed = dataclasses.replace(report, title=name, variants=variants, baseline=name)
        for text in (page(changed), MarkdownIt().enable("table").render(markdown(changed))):
            assert Reader(text).texts.count(name) >= 8  # the title, and a row of each table


def test_nothing_is_loaded(document: str) -> None:
    reader = Reader(document)
    assert {link for link in reader.loads if not link.startswith("#")} == {"data:,"}
    assert not {"img", "link", "iframe", "object"} & set(reader.tags) - {"link"}
    assert "default-src 'none'" in document
    assert "@import" not in document.split("<style>")[1].split("</style>")[0]


def test_it_is_mostly_plotly(document: str) -> None:
    from plotly.offline import get_plotlyjs

    own = len(document.encode()) - len(get_plotlyjs().encode())
    assert own < 250_000
    assert len(document.encode()) < 6_000_000


def test_sections_are_in_order(document: str) -> None:
    assert Reader(document).headings == [
        *("Verdict", "Variants", "Loss and gradient norm", "Speed", "Experts", "Memory"),
        "Communication",
        *("What differs", "Conditions and machine", "Notes", "What could not run"),
    ]


def test_plans_have_a_column_only_where_there_are_any(report: Report, document: str) -> None:
    assert "planned" not in Reader(document).texts
    first, *others = report.variants
    planned = dataclasses.replace(first, planned={"tps": 9876.54, "memory_gib": 10.257, "odd": 2.0})
    texts = Reader(page(dataclasses.replace(report, variants=(planned, *others)))).texts
    assert "planned" in texts
    assert "tokens/s 9,877; peak memory 10.26 GiB; odd 2" in texts


def test_a_comparison_of_which_nothing_ran_has_a_page(report: Report) -> None:
    kept = tuple(variant for variant in report.variants if variant.status != "ran")
    document = page(dataclasses.replace(report, variants=kept, baseline="tp 3", notes=()))
    reader = Reader(document)
    assert "const FIGURES = {};" in document
    assert reader.headings == [
        *("Verdict", "Variants", "What differs", "Conditions and machine", "What could not run")
    ]
    assert "No variant could be compared with the baseline in speed." in reader.texts


def test_a_variant_alone_has_no_differences(report: Report) -> None:
    document = page(dataclasses.replace(report, variants=report.variants[:1]))
    assert 'id="plot-loss"' in document
    assert 'id="plot-loss-difference"' not in document


def test_the_verdict_names_the_fastest_that_trains_the_same_run(report: Report) -> None:
    same_run, near, other_run, unknown, fastest, same, *others = verdict(report)
    by_name = {variant.name: variant for variant in report.ran}
    ratio = by_name[HOSTILE].ratio
    assert ratio is not None
    assert fastest == (
        f"“{HOSTILE}” is the fastest: {ratio.median:.3f} times the tokens per second and device "
        f"of “fsdp” ({ratio.least:.3f} to {ratio.most:.3f} in 3 rounds). But it does not train the "
        "baseline's run."
    )
    assert same.startswith(f"Of those that train it, “{UNICODE}” is the fastest: ")
    assert (same_run, near, other_run, unknown) == (
        f"Train the same run as “fsdp”, with the same loss: “{UNICODE}”.",
        f"As near to “fsdp” as its own seeds are to each other: “{LONG}”.",
        f"Do not train the same run: “{HOSTILE}”.",
        "Not judged whether they train the same run: “exact”.",
    )
    assert others == ["Cannot run: “tp 3”.", "Failed: “too big”."]


def test_the_summary_tells_the_loss_before_the_speed(report: Report) -> None:
    lines = {line.split("  ")[0]: line for line in summary(report)}
    assert "x speed" not in lines["fsdp"]
    assert re.search(
        r"  same loss .*/s/device  [\d.]+x speed \([\d.]+ to [\d.]+\)$", lines[UNICODE]
    )
    assert lines["tp 3"].endswith("cannot run")


def test_the_verdict_does_not_call_a_slower_variant_fast(report: Report) -> None:
    slow = next(variant for variant in report.variants if variant.name == "exact")
    _, first, *_ = verdict(dataclasses.replace(report, variants=(report.variants[0], slow)))
    words = "The baseline, “fsdp”, is the fastest. “exact” reaches 0.966"
    assert first.startswith(words)
    assert "its spread is not known. But it is not known to train the baseline's run." in first


def test_plotly_knows_every_key_of_the_figures(report: Report) -> None:
    from plotly.graph_objects import Figure

    for plot in plots(report).values():
        for figure in plot.figures.values():
            Figure(figure["data"], figure["layout"])
    with pytest.raises(ValueError, match="colour"):
        Figure(figure["data"], figure["layout"] | {"colour": "red"})


def test_an_ordinary_wheel_has_the_files_of_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "torchtitan/tools/compare"
    declared = {
        file
        for glob in settings["package-data"]["torchtitan.tools.compare"]
        for file in package.glob(glob)
    }
    assert {path for path in (package / "page").iterdir() if path.is_file()} == declared


@pytest.fixture(scope="module")
def opened(document: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page in a browser, with all that was asked of the network and said on the console."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(document, encoding="utf-8")
    with opened_browser() as browser:
        live = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        asked, said = [], []
        live.on("request", lambda request: asked.append(request.url))
        live.on("console", lambda message: said.append(message.text))
        live.on("pageerror", lambda error: said.append(str(error)))
        live.goto(file.as_uri())
        yield SimpleNamespace(page=live, asked=asked, said=said, url=file.as_uri())


def traces(live: Any, name: str) -> list[dict]:
    return live.evaluate(
        "name => document.getElementById(`plot-${name}`).data.map("
        "({ meta, x, y, visible, error_x }) => ({ ...meta, x, y, visible, error_x }))",
        name,
    )


def relative(variant: Variant, base: Variant, name: str, along: str) -> tuple[list, list]:
    """A curve's difference from the baseline's, where both have the same step or tokens."""
    mine, theirs = getattr(variant, name), getattr(base, name)
    at = dict(zip(getattr(theirs, along), theirs.values, strict=True))
    pairs = [
        (x, abs(value - at[x]) / abs(at[x]))
        for x, value in zip(getattr(mine, along), mine.values, strict=True)
        if x in at
    ]
    return [x for x, _ in pairs], [apart or None for _, apart in pairs]


@pytest.mark.gate
@needs_browser
@pytest.mark.parametrize("along", ["steps", "units"])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_plotted_curves_are_those_of_the_report(
    report: Report, opened: SimpleNamespace, name: str, along: str
) -> None:
    opened.page.get_by_role("radio", name=along.replace("units", "tokens")).check()
    found = {trace["variant"]: trace for trace in traces(opened.page, name)}
    assert list(found) == [variant.name for variant in report.ran]
    apart = {t["variant"]: t for t in traces(opened.page, f"{name}-difference") if "variant" in t}
    base, *others = report.ran
    for variant in report.ran:
        curve = getattr(variant, name)
        assert found[variant.name]["x"] == list(getattr(curve, along))
        assert found[variant.name]["y"] == list(curve.values)
    assert list(apart) == [variant.name for variant in others]
    for variant in others:
        x, y = relative(variant, base, name, along)
        assert apart[variant.name]["x"] == x
        assert apart[variant.name]["y"] == pytest.approx(y)
    allowed = [t for t in traces(opened.page, f"{name}-difference") if "tolerance" in t]
    judged = [v for v in others if (d := getattr(v.parity, name)) and d.tolerance]
    assert [trace["tolerance"] for trace in allowed] == [variant.name for variant in judged]
    for trace, variant in zip(allowed, judged, strict=True):
        difference = getattr(variant.parity, name)
        assert trace["x"] == [getattr(getattr(variant, name), along)[difference.step - 1]]
        assert trace["y"] == [difference.tolerance]
    text = opened.page.locator(f"p:has(+ #figure-{name}-difference)").inner_text()
    assert text.endswith(" Equal to the last bit throughout: exact.")


@needs_browser
def test_plotted_bars_are_those_of_the_report(report: Report, opened: SimpleNamespace) -> None:
    def bars(name: str) -> dict[str, list]:
        return {trace["part"]: trace["x"] for trace in traces(opened.page, name)}

    ran = report.ran
    spread = [variant.tps for variant in ran if variant.tps]
    assert bars("tps") == {
        "median": [tps.median for tps in spread],
        "median of a run": [run.tps.median for variant in ran for run in variant.runs if run.tps],
    }
    quartiles = traces(opened.page, "tps")[0]["error_x"]
    assert quartiles["array"] == [tps.quartile_3 - tps.median for tps in spread]
    assert quartiles["arrayminus"] == [tps.median - tps.quartile_1 for tps in spread]
    assert bars("memory") == {"peak": [variant.memory_gib for variant in ran]}
    assert bars("time") == {
        phase: [variant.time_shares[phase] for variant in ran] for phase in ran[0].time_shares
    } | {"exposed communication": [variant.exposed_communication for variant in ran]}
    assert bars("sent") == {
        axis: [variant.sent_bytes.get(axis) for variant in ran]
        for axis in ("dp_shard", "loss", "tp")
    }


@needs_browser
def test_the_map_of_experts_has_a_row_for_each_block(
    report: Report, opened: SimpleNamespace
) -> None:
    drawn = opened.page.evaluate(
        "[document.getElementById('plot-experts')].map(({ data, layout }) => data.map("
        "({ meta, y, z }) => [meta.variant, layout.yaxis.ticktext[y[0]], z]))[0]"
    )
    for variant in report.ran:
        mine = [(y, z) for name, y, z in drawn if name == variant.name]
        for (label, found), (block, shares) in zip(mine, variant.expert_loads.items(), strict=True):
            assert label.endswith(f": {block}")
            assert found[0] == pytest.approx([4 * share for share in shares])
    table = cells(opened.page, "Balance of experts")
    assert table[1][1:] == ["40.0 %", "0.95"]


def cells(live: Any, caption: str) -> list[list[str]]:
    """The body of the table under a heading, its columns' names first."""
    return live.evaluate(
        "caption => [...[...document.querySelectorAll('.frame')]"
        ".find((frame) => frame.ariaLabel.startsWith(caption)).firstChild.rows]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))",
        caption,
    )


@needs_browser
def test_cells_are_the_rounded_numbers_of_the_report(
    report: Report, opened: SimpleNamespace
) -> None:
    head, *rows = cells(opened.page, "Variants and what")
    assert len(rows) == len(report.variants)
    for variant, row in zip(report.variants, rows, strict=True):
        cell = dict(zip(head, row, strict=True))
        assert cell["variant"].startswith(variant.name)
        assert cell["status"] == variant.status
        if variant.status != "ran":
            assert set(row[3:]) == {"-"}
            continue
        tps, ratio, several = variant.tps, variant.ratio, len(variant.runs) > 1
        expected = f"{tps.median:,.0f}"
        expected += f" ({tps.quartile_1:,.0f} to {tps.quartile_3:,.0f})" if several else ""
        assert cell["tokens/s per device"] == expected
        expected = f"{ratio.median:.3f}"
        baseline = variant.name == report.baseline
        spread = f" ({ratio.least:.3f} to {ratio.most:.3f})"
        expected += spread if several and not baseline else ""
        assert cell["ratio to baseline"] == expected
        assert cell["MFU"] == f"{100 * variant.mfu:.1f} %"
        assert cell["peak memory"] == f"{variant.memory_gib:.4g} GiB"
        assert cell["startup"] == f"{variant.startup_s:.4g} s"
        assert cell["compile"] == (f"{variant.compile_s:.4g} s" if variant.compile_s else "-")
        assert cell["same run as baseline"] == variant.parity.verdict

    _, *rows = cells(opened.page, "Loss by step: 40 of 100 steps")
    assert [row[0] for row in rows[:2]] + [rows[-1][0]] == ["1", "4", "100"]
    for row in rows:
        values = [variant.loss.values[int(row[0]) - 1] for variant in report.ran]
        assert row[1:] == [f"{value:.4g}" for value in values]

    _, *rows = cells(opened.page, "Loss: difference from the baseline")
    assert rows == [
        [UNICODE, "2e-06", "10", "0.0024"],
        [LONG, "0.019", "76", "-"],
        [HOSTILE, "0.0006", "1", "0.00024"],
        ["exact", "-", "-", "-"],
    ]
    _, *rows = cells(opened.page, "Bytes sent in a step")
    assert rows[1] == [UNICODE, "2.627 GB", "1.2 kB", "1.4 GB"]
    head, *rows = cells(opened.page, "Settings that are not the same")
    assert head[1:] == [variant.name for variant in report.variants]
    assert rows[2] == ["convert", "-", "-", "-", '[{"name": "<float8>"}]', "-", "-", "-"]


@needs_browser
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_the_page_is_never_wider_than_the_screen(opened: SimpleNamespace, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    plots = opened.page.evaluate(
        "[...document.querySelectorAll('.plot .main-svg')].map((svg) => svg.clientWidth)"
    )
    assert plots
    assert max(plots) <= width


@needs_browser
def test_text_can_be_read_in_both_colour_schemes(opened: SimpleNamespace) -> None:
    live, inks = opened.page, set()
    for scheme in ("light", "dark"):
        # The page is open already: its plots have to follow.
        live.emulate_media(color_scheme=scheme)
        live.wait_for_timeout(200)
        contrast, words, seen = live.evaluate(TEXT_CONTRAST)
        assert seen > 200
        assert contrast >= 4.5, f"{scheme}: {words}"
        inks.add(live.evaluate("document.getElementById('plot-loss').data[1].line.color"))
    assert len(inks) == 2


@needs_browser
@pytest.mark.parametrize("width", [320, 1280])
def test_it_keeps_the_rules_of_accessibility(opened: SimpleNamespace, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    opened.page.set_viewport_size({"width": width, "height": 800})
    # Contrast is measured above, in both schemes.
    options = {"rules": {"color-contrast": {"enabled": False}}, "resultTypes": ["violations"]}
    found = Axe().run(opened.page, options=options).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found] == []


@needs_browser
def test_the_keyboard_reaches_what_can_be_changed(opened: SimpleNamespace) -> None:
    live = opened.page
    live.get_by_role("radio", name="tokens").check()
    live.get_by_role("radio", name="tokens").focus()
    live.keyboard.press("ArrowLeft")
    assert live.get_by_role("radio", name="steps").is_checked()
    assert live.evaluate("document.getElementById('plot-loss').layout.xaxis.title.text") == "step"
    live.keyboard.press("Tab")
    live.keyboard.press("Space")
    hidden = [trace["variant"] for trace in traces(live, "loss") if trace["visible"] is False]
    assert hidden == ["fsdp"]
    live.keyboard.press("Space")
    assert all(trace["visible"] for trace in traces(live, "loss"))


@needs_browser
@pytest.mark.costs("the browser, which ends here")
def test_it_asked_for_nothing_and_complained_of_nothing(opened: SimpleNamespace) -> None:
    """The last of these tests, so all that they did is seen."""
    assert opened.asked == [opened.url]
    assert opened.said == []
    assert opened.page.evaluate("typeof window.broken") == "undefined"

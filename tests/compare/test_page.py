"""The page of a comparison: it shows what `report.json` says, to everybody who reads it."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt

from tests.compare.browser import CHROMIUM, TEXT_CONTRAST, opened_browser
from tests.compare.samples import HOSTILE, LONG, UNICODE, sample
from torchtitan.tools.compare import summary
from torchtitan.tools.compare.report_page import answer, report_page
from torchtitan.tools.compare.results import Spread
from torchtitan.tools.page import ticks

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


class Reader(HTMLParser):
    """Tags, links, headings, texts, tables and drawn boxes of a page; scripts are not text."""

    def __init__(self, document):
        super().__init__()
        self.tags = []
        self.loads = []
        self.headings = []
        self.texts = []
        self.rows = []
        self.widths = []
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "rect":
            self.widths.append(float(found["width"] or 0))

    def handle_data(self, data):
        if self.cdata_elem == "script" or not self.tags:
            return
        self.texts.append(data)
        if self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)
        if self.tags[-1] in ("th", "td", "code"):
            self.rows[-1][-1] += data.strip("\n")


@pytest.fixture(scope="module")
def report():
    return sample()


@pytest.fixture(scope="module")
def document(report):
    return report_page(report).html()


def rendered(report):
    """The Markdown, as readers show it that let HTML pass."""
    text = report_page(report).markdown()
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def only(report, *names, **changes):
    variants = tuple(variant for variant in report.variants if variant.name in names)
    return dataclasses.replace(report, variants=variants, **changes)


def test_the_report_is_inside_and_nothing_is_loaded(report, document):
    inside = document.split('<script type="application/json" id="report">')[1].split("</script>")[0]
    assert json.loads(inside) == json.loads(report.to_json())
    reader = Reader(document)
    assert reader.loads == ["data:,"]
    assert not {"img", "iframe", "object"} & set(reader.tags)
    assert "default-src 'none'" in document
    assert "@import" not in document.split("<style>")[1].split("</style>")[0]
    assert len(document.encode()) < 250_000


def test_no_name_is_taken_for_markup(report, document):
    reader = Reader(document)
    assert (reader.tags.count("script"), "b" in reader.tags) == (1, False)
    assert {HOSTILE, UNICODE, LONG} <= set(reader.texts)
    reader = Reader(rendered(report))
    assert not {"script", "b"} & set(reader.tags)
    assert {HOSTILE, UNICODE, LONG} <= set(reader.texts)


@pytest.mark.parametrize(
    "name", ["a_b _c_ *d* `e` [f](g) <h> &amp; \\| ~~i~~ | j #", "# k", "> l", "- m", "![n](o)"]
)
def test_a_name_is_shown_as_it_is(report, name):
    first, *others = report.variants
    variants = (dataclasses.replace(first, name=name), *others)
    changed = dataclasses.replace(report, title=name, variants=variants, baseline=name)
    for text in (report_page(changed).html(), rendered(changed)):
        assert Reader(text).texts.count(name) >= 7  # the title, and a row of each table


@pytest.mark.parametrize("form", ["html", "md"])
def test_sections_with_content_are_in_order(report, form):
    def headings(changed):
        return Reader(report_page(changed).html() if form == "html" else rendered(changed)).headings

    last = ("What differs", "Conditions and machine")
    assert headings(report) == [
        *("Variants", "Loss and gradient norm", "Speed", "Experts", "Memory", "Communication"),
        *(*last, "Notes", "What could not run"),
    ]
    nothing = only(report, "tp 3", "too big", baseline="tp 3", notes=())
    assert headings(nothing) == ["Variants", *last, "What could not run"]


def test_the_first_thing_is_the_answer_and_one_chart(report, document):
    first = document.split("<h2>")[0]
    assert answer(report) in Reader(first).texts
    memory = [variant.memory_gib or 0 for variant in report.ran]
    speed = [variant.tps.median for variant in report.ran if variant.tps]
    expected = [1000 * v / max(values) for values in (speed, memory) for v in values]
    assert Reader(first).widths == pytest.approx(expected, abs=0.01)


def test_the_answer_says_what_is_the_same_before_what_is_fast(report):
    fsdp, same, *_ = report.ran
    slow = dataclasses.replace(same, name="slow", ratio=Spread(0.5, 0.5, 0.5, 0.5, 0.5, 1))
    best = "the fastest of these, “größer → 流水线 🚀 تجربة”, has 1.18x its speed (1.16 to 1.20)"
    alone = dataclasses.replace(report, variants=(fsdp, slow))
    two_slow = (fsdp, slow, dataclasses.replace(slow, name="other"))
    none_is_faster = "none is faster: “slow” has 0.50x its speed."
    for changed, expected in [
        (report, f"1 of 4 variants has the same loss as “fsdp”; {best}."),
        (alone, "“slow” has the same loss as “fsdp”, and 0.50x its speed."),
        (
            dataclasses.replace(report, variants=two_slow),
            f"2 of 2 variants have the same loss as “fsdp”; {none_is_faster}",
        ),
        (only(report, "fsdp", HOSTILE), f"“{HOSTILE}” has another loss than “fsdp”, and 1.39x"),
        (only(report, "fsdp", "exact"), "“exact” ran, and its loss is not judged against “fsdp”"),
        (only(report, "fsdp", HOSTILE, "exact"), "0 of 2 variants have the same loss as “fsdp”."),
        (only(report, "fsdp"), "No variant ran besides the baseline."),
    ]:
        assert answer(changed).startswith(expected)


def test_the_summary_tells_the_loss_before_the_speed(report):
    lines = {line.split("  ")[0]: line for line in summary(report)}
    assert "x speed" not in lines["fsdp"]
    assert re.search(
        r"  same loss .*/s/device  [\d.]+x speed \([\d.]+ to [\d.]+\)$", lines[UNICODE]
    )
    assert lines["tp 3"].endswith("cannot run")


def table(document, title):
    """The rows of the table under a heading, the names of its columns first."""
    return Reader(document.split(f"<h3>{title}")[1].split("</table>")[0]).rows


@pytest.mark.parametrize("form", ["html", "md"])
def test_cells_are_the_rounded_numbers_of_the_report(report, form):
    document = report_page(report).html() if form == "html" else rendered(report)
    head, *rows = table(document, "Measured")
    for variant, row in zip(report.variants, rows, strict=True):
        cell = dict(zip(head, row, strict=True))
        assert cell["variant"] == variant.name
        if variant.status != "ran":
            assert (cell["loss"], set(row[3:])) == (variant.status, {"-"})
            continue
        tps, ratio, several = variant.tps, variant.ratio, len(variant.runs) > 1
        assert tps is not None
        assert ratio is not None
        expected = f"{tps.median:,.0f}"
        expected += f" ({tps.quartile_1:,.0f} to {tps.quartile_3:,.0f})" if several else ""
        assert cell["tokens/s per device"] == expected
        spread = f" ({ratio.least:.2f} to {ratio.most:.2f})"
        is_spread = several and variant.name != report.baseline
        assert cell["speed"] == f"{ratio.median:.2f}x{spread if is_spread else ''}"
        assert cell["MFU"] == f"{100 * (variant.mfu or 0):.1f} %"
        assert cell["peak memory"] == f"{variant.memory_gib:.4g} GiB"
        assert cell["startup"] == f"{variant.startup_s:.4g} s"
        assert cell["compile"] == (f"{variant.compile_s:.4g} s" if variant.compile_s else "-")
    judged = [row[2] for row in rows[:4]]
    assert judged == ["baseline", "same loss", "loss not judged", "other loss"]

    _, *rows = table(document, "Does it train")
    assert [row[3:] for row in rows] == [
        ["-", "-"],
        ["2e-06 at step 10, tolerance 0.0024", "2e-05 at step 10, tolerance 0.073"],
        ["0.019 at step 76", "-"],
        ["0.0006 at step 1, tolerance 0.00024", "-"],
        ["-", "-"],
    ]
    assert "Loss equal to the last bit throughout: exact." in document
    _, *rows = table(document, "Bytes sent per step")
    assert rows[1] == [UNICODE, "2.627 GB", "1.2 kB", "1.4 GB"]
    assert table(document, "Balance of experts")[1][1:] == ["40.0 %", "0.95"]
    _, *rows = table(document, "Settings that are not the same")
    assert 'convert = [{"name": "<float8>"}]' in rows[3][1]


def test_plans_have_a_table_only_where_there_are_any(report, document):
    assert "Planned" not in Reader(document).texts
    first, *others = report.variants
    planned = dataclasses.replace(first, planned={"tps": 9876.54, "memory_gib": 10.257, "odd": 2.0})
    changed = dataclasses.replace(report, variants=(planned, *others))
    found = table(report_page(changed).html(), "Planned<")
    assert found == [
        ["variant", "tokens/s per device", "peak memory", "odd"],
        ["fsdp", "9,877", "10.26 GiB", "2"],
    ]


def test_a_report_says_nothing_of_conditions_that_were_not_set(report):
    first, *others = report.variants
    variants = (dataclasses.replace(first, differs={"training.global_batch_size": None}), *others)
    unset = {"ranks": None, "recipe": None, "title": "", "rounds": 3}
    page = report_page(dataclasses.replace(report, conditions=unset, variants=variants)).markdown()
    assert "| rounds | 3 |" in page
    assert "`training.global_batch_size = none`" in page
    assert not [word for word in ("| ranks |", "| title |", "None", "null") if word in page]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 4, [1, 2, 3, 4]),
        (1, 2, [1, 2]),
        (1, 100, [20, 40, 60, 80, 100]),
        (3, 5000, [1000, 2000, 3000, 4000, 5000]),
    ],
)
def test_steps_are_whole(low, high, expected):
    assert ticks(low, high, is_whole=True) == expected


@pytest.fixture(scope="module")
def opened(document, tmp_path_factory):
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


@needs_browser
@pytest.mark.parametrize("width", [320, 360, 1000, 1280])
def test_nothing_is_wider_than_the_window(opened, width):
    from axe_playwright_python.sync_playwright import Axe

    opened.page.set_viewport_size({"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    # Contrast is measured below, in both schemes.
    options = {"rules": {"color-contrast": {"enabled": False}}, "resultTypes": ["violations"]}
    found = Axe().run(opened.page, options=options).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found] == []


@needs_browser
@pytest.mark.costs("the browser, which ends here")
def test_it_can_be_read_in_light_and_dark_and_asks_for_nothing(opened):
    """The last of these tests, so all that they did is seen."""
    live, inks = opened.page, set()
    for scheme in ("light", "dark"):
        live.emulate_media(color_scheme=scheme)
        contrast, words, seen = live.evaluate(TEXT_CONTRAST)
        assert seen > 200
        assert contrast >= 4.5, f"{scheme}: {words}"
        inks.add(live.evaluate("getComputedStyle(document.querySelector('.line')).stroke"))
    assert len(inks) == 2
    assert (opened.asked, opened.said) == ([opened.url], [])
    assert live.evaluate("typeof window.broken") == "undefined"

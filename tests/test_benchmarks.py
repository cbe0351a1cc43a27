"""The benchmarks run, and report what their page says; how fast is not a test's business."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.coordinate_check import check, slopes
from torchtitan.optim import AdamW, Muon

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks/results").glob("overhead_*.json"))


def written_by(script, folder, *words):
    """What a benchmark writes, on one thread."""
    output = folder / "output"
    command = [sys.executable, f"benchmarks/{script}.py", *words, "--output", output]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_overhead(ranks, tmp_path):
    small = ["--blocks", "2", "--steps", "1", "--warmup", "0", "--starts", "2"]
    result = json.loads(written_by("overhead", tmp_path, "--ranks", str(ranks), *small))
    assert result["ratio"]["median"] > 0
    assert result["tokens_per_step"] == 2048
    assert ("memory_gib" in result) == (ranks == 1)


@pytest.mark.slow
def test_cost_of_reporting(tmp_path):
    small = ["--metrics", "--blocks", "2", "--steps", "1"]
    result = json.loads(written_by("overhead", tmp_path, *small))
    assert result["ratio"]["median"] > 0
    assert result["percent_of_step"]["median"] > 0
    assert set(result["milliseconds_a_step"]) == {"calls", "calls, wall", "threads", "processes"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_wait_before_the_optimizer(ranks, tmp_path):
    small = ["--wait", "--ranks", str(ranks), "--blocks", "2", "--steps", "2", "--warmup", "1"]
    found = json.loads(written_by("overhead", tmp_path, *small))["milliseconds"]
    assert 0 < found["host"]["median"] < found["step"]["median"]


@pytest.mark.parametrize("path", RESULTS)
def test_results_say_how_they_were_made(path):
    result = json.loads(path.read_text())
    assert result.keys() >= {"command", "device", "torch", "python", "date", "ratio"}


def spread(found, digits):
    """A median and its quartiles, as the page has them."""
    low, middle, high = (f"{found[k]:.{digits}f}" for k in ("quartile_1", "median", "quartile_3"))
    return middle, f"({low} to {high})"


def test_page_quotes_the_results():
    page = (ROOT / "benchmarks/README.md").read_text()
    assert len(RESULTS) == 3
    for path in RESULTS:
        assert " ".join(spread(json.loads(path.read_text())["ratio"], 3)) in page
    reporting = json.loads((ROOT / "benchmarks/results/overhead_metrics.json").read_text())
    assert " % ".join(spread(reporting["percent_of_step"], 2)) in page
    for kind, milliseconds in reporting["milliseconds_a_step"].items():
        assert f"| {kind} | {' '.join(spread(milliseconds, 2))} |" in page
    profile = json.loads((ROOT / "benchmarks/results/profile_cpu_1_rank.json").read_text())
    for part, milliseconds in profile["milliseconds_of_our_step"].items():
        assert f"| {part} | {milliseconds:.2f} |" in page


def rows(page):
    """The cells of a page's table, without its head."""
    lines = [line for line in page.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("name", "page"), [("attention_held_out", "torchtitan/research/hadamard_attention")]
)
def test_the_documentation_quotes_what_was_measured(name, page):
    docs = (ROOT / f"{page}.md").read_text()
    quoted = docs.partition(f"<!-- Written by benchmarks/{name}.py -->\n\n")[2].partition("\n\n")[0]
    lines = quoted.splitlines()
    assert len(lines) > 5
    assert set(lines) <= set((ROOT / "benchmarks/results/attention.md").read_text().splitlines())


PAGES = sorted((ROOT / "torchtitan/research").glob("*.md"))
RESEARCH = [page for page in PAGES if "\n## Results\n" in page.read_text()]


@pytest.mark.parametrize("page", [ROOT / "docs/communication.md", *RESEARCH], ids=lambda p: p.stem)
def test_figures_of_a_page_are_those_of_the_results_that_it_links_to(page):
    """Every decimal figure of its results, but for claims of papers, which come last."""
    _, results = re.split(r"\n##+ (?:Results|Measurements)\n", page.read_text())
    own = re.split(r"\n## |\n\nNot reproduced", results)[0]
    linked = [page.parent / path for path in re.findall(r"\]\(([^)\s]+/results/\w+\.md)[)#]", own)]
    text = "".join(path.resolve().read_text() for path in linked)
    for figure in re.findall(r"\d+\.\d+", own):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text), figure
    assert linked or not re.search(r"\d+\.\d+", own)


@pytest.mark.parametrize(
    "name",
    [
        *("communication", "attention_held_out", "optimizers", "data", "document_attention"),
        *("plan_memory", "checkpoint"),
    ],
)
def test_pages_of_results_say_how_they_were_made(name):
    pages = (ROOT / "benchmarks/results").glob("*.md")
    assert re.search(
        rf"`python benchmarks/{name}\.py.*`: .+ cores\b.*, torch .+, Python .+, 20",
        "".join(page.read_text() for page in pages),
    )
    assert f"python benchmarks/{name}.py" in (ROOT / "benchmarks/README.md").read_text()


def test_the_page_of_gpus_quotes_its_results():
    results = (ROOT / "benchmarks/results/gpu_h100.md").read_text()
    quoted = {name: cells for name, *cells in rows((ROOT / "docs/gpu.md").read_text())}
    for column, model in enumerate(("8B, 4 layers", "8B, 8 layers, 2 sequences", "1B")):
        table = results.partition(f"### {model}\n")[2].partition("\n### ")[0]
        found = {name: cells for name, *cells in rows(table)}
        ours, hand = found["compiled"], found["by hand, compiled by block"]
        speed, by_hand = (float(row[0].split()[0].replace(",", "")) for row in (ours, hand))
        for name, expected in {
            "MFU, bf16, compiled by block": ours[2].replace("%", " %"),
            "speed relative to the hand-written loop, by block": f"{speed / by_hand:.3f}",
            "memory, GiB: ours, hand-written": f"{ours[4]}, {hand[4]}",
        }.items():
            assert quoted[name][column] == expected
        for kind in ("tensorwise", "rowwise"):
            (cells,) = (each for n, each in quoted.items() if n.startswith(f"Float8 {kind}"))
            assert float(cells[column]) == pytest.approx(
                float(found[f"Float8 {kind}"][1]), abs=5e-3
            )


@pytest.mark.slow
def test_memory_of_documents_is_linear(tmp_path):
    """As it is without a mask; with a dense mask it is quadratic."""
    small = ["--lengths", "1024", "--counted", "2048", "4096", "--rounds", "2"]
    text = written_by("document_attention", tmp_path, *small)
    assert text.count("| 1,024 |") == 10
    assert re.search(
        r"^\| 1,024 \| causal \| .+ \| 1\.000 \(1\.000 to 1\.000\) \| 1\.000 \|$", text, re.M
    )
    found = {name: sizes for name, *sizes in rows(text) if "/" in sizes[0]}
    assert len(found) == 4
    for name, sizes in found.items():
        short, long = ([float(size) for size in each.split(" / ")] for each in sizes)
        growth = [other / one for one, other in zip(short, long, strict=True)]
        is_dense = "dense" in name
        assert min(growth) > 3 if is_dense else max(growth) < 2.3, (name, growth)


@pytest.mark.slow
def test_saving_and_loading(tmp_path):
    page = written_by("checkpoint", tmp_path, "--quick")
    for name in ("dcp.save", "ours, with hashes", "ours, verified", "resumed: verify and load"):
        assert re.search(rf"^\| {name}.*\| \d+\.?\d* \(", page, re.MULTILINE), name
    kept = (ROOT / "benchmarks/results/checkpoint.md").read_text().split("\n## ")[1]
    assert len(rows(kept)) == len(rows(page))


@pytest.mark.slow
def test_speed_and_memory_of_data(tmp_path):
    parts = ["loading", "starts", "resume", "memory"]
    page = written_by("data", tmp_path, "--quick", "--parts", *parts)
    assert [count for count, *_ in rows(page)] == ["1,000", "10,000"]
    assert re.search(r"sample 0: [\d.]+ \(.+\); sample 1,000: [\d.]+ \(", page)
    assert re.search(r"Of 1 shard: [\d.]+ \(.+\); of 3 shards: [\d.]+ \(", page)
    assert re.search(r"without a worker [\d.]+ \(.+\), with one thread as a worker [\d.]+", page)


def test_all_parts_of_data_are_kept():
    page = (ROOT / "benchmarks/results/data.md").read_text()
    for name in ("`data tokenize`, 2 processes", "while training, 1 thread", "10,000,000"):
        assert re.search(rf"^\| {re.escape(name)} \| [\d.,]+", page, re.MULTILINE), name
    found = re.findall("^## (.+)", page, re.MULTILINE)
    assert found == ["Loading", "Tokenization", "Start", "Resume", "Share of a step", "Memory"]


@pytest.mark.gate
@pytest.mark.parametrize(
    "config", [AdamW(lr=1e-2), Muon(lr=1e-2, ns_dtype="float32")], ids=["AdamW", "Muon"]
)
def test_activations_grow_with_the_width_only_without_a_base(config):
    found = check((32, 64, 128, 256), config)
    with_base, without = (slopes(found[way]) for way in ("with", "without"))
    assert max(map(abs, with_base.values())) < 0.5
    assert min(without.values()) > 0.3

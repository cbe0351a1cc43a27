"""The benchmarks run, and report what their page says; how fast is not a test's business."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import runs
from tests.processes import descendants

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks/results").glob("overhead_*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_overhead(ranks: int, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    small = ["--blocks", "2", "--steps", "1", "--warmup", "0", "--starts", "2"]
    command = [sys.executable, "benchmarks/overhead.py", "--ranks", str(ranks), *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    result = json.loads(output.read_text())
    assert result["ratio"]["median"] > 0
    assert result["tokens_per_step"] == 2048
    assert ("memory_gib" in result) == (ranks == 1)


@pytest.mark.slow
def test_cost_of_reporting(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    small = ["--metrics", "--blocks", "2", "--steps", "1", "--output", str(output)]
    command = [sys.executable, "benchmarks/overhead.py", *small]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    result = json.loads(output.read_text())
    assert result["ratio"]["median"] > 0
    assert result["percent_of_step"]["median"] > 0
    assert set(result["milliseconds_a_step"]) == {"calls", "calls, wall", "threads", "processes"}


@pytest.mark.slow
def test_what_is_killed_while_it_measures_leaves_no_process(tmp_path: Path) -> None:
    """Three sides, of two ranks each, which wait for their turn or for each other."""
    command = [sys.executable, "benchmarks/recording.py", "--blocks", "1000"]
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            while len(made := descendants(killed.pid)) < 9:
                assert killed.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        finally:
            killed.kill()
            killed.wait()
    deadline = time.monotonic() + 60
    while left := [pid for pid in made if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


KEPT_ERRORS = "benchmarks/results/attention.md"


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("path", RESULTS)
def test_results_say_how_they_were_made(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result.keys() >= {"command", "device", "torch", "python", "date", "ratio"}


def test_page_quotes_the_results() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    assert len(RESULTS) == 7
    for path in RESULTS:
        ratio = json.loads(path.read_text())["ratio"]
        low, middle, high = (f"{ratio[k]:.3f}" for k in ("quartile_1", "median", "quartile_3"))
        assert f"{middle} ({low} to {high})" in page
    reporting = json.loads((ROOT / "benchmarks/results/overhead_metrics.json").read_text())
    low, middle, high = (
        f"{reporting['percent_of_step'][k]:.2f}" for k in ("quartile_1", "median", "quartile_3")
    )
    assert f"{middle} % ({low} to {high})" in page
    for kind, milliseconds in reporting["milliseconds_a_step"].items():
        low, middle, high = (
            f"{milliseconds[k]:.2f}" for k in ("quartile_1", "median", "quartile_3")
        )
        assert f"| {kind} | {middle} ({low} to {high}) |" in page
    profile = json.loads((ROOT / "benchmarks/results/profile_cpu_1_rank.json").read_text())
    for part, milliseconds in profile["milliseconds_of_our_step"].items():
        assert f"| {part} | {milliseconds:.2f} |" in page


def rows(page: str) -> list[list[str]]:
    """The cells of a page's table, without its head."""
    lines = [line for line in page.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_two_ranks_against_one(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = ["benchmarks/parallel.py", "--quick", "--sides", "FSDP", "PP", "--output", output]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    found = rows(output.read_text())
    assert [name for name, *_ in found] == ["one rank", "FSDP", "PP"]
    for name, *speeds, memory, memory_ratio, _ in found:
        for speed in speeds:
            assert re.fullmatch(r"[\d.,]+ \([\d.,]+ to [\d.,]+\)", speed)
        assert float(memory) > 0
        assert name != "one rank" or float(memory_ratio) == 1


@pytest.mark.slow
def test_simple_fsdp_beside_fsdp2(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = ["benchmarks/simple_fsdp.py", "--blocks", "2", "--steps", "1", "--output", output]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    found = {name: int(gathers) for name, gathers, *_ in rows(output.read_text())[1:]}
    assert found["SimpleFSDP"] > found["SimpleFSDP, merged by block"] > 1


@pytest.mark.slow
def test_precision(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    chosen = ["bf16", "Float8 tensorwise, loss in chunks", "SimpleFSDP, loss in chunks"]
    command = ["benchmarks/precision.py", "--quick", "--output", output]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, "--rows", *chosen],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    page = output.read_text()
    found = [row for row in rows(page) if "(" in row[1]]
    assert [name for name, *_ in found] == ["bf16", "Float8 tensorwise, loss in chunks, emulated"]
    for _, speed, ratio, memory, memory_ratio in found:
        assert all(re.fullmatch(r"[\d.,]+ \([\d.,]+ to [\d.,]+\)", x) for x in (speed, ratio))
        assert float(memory) > 0
        assert float(memory_ratio) > 0
    assert re.search("SimpleFSDP, loss in chunks: left out: .*compile.backend: ", page)


@pytest.mark.slow
def test_collectives_of_a_layout(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = ["benchmarks/collectives.py", "--layouts", "CP 2", "--output", output]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    kept = (ROOT / "benchmarks/results/collectives.md").read_text()
    assert rows(output.read_text()) == [row for row in rows(kept) if row[0] == "CP 2"]


def test_kept_counts_are_those_of_the_formulas() -> None:
    kept = rows((ROOT / "benchmarks/results/collectives.md").read_text())
    assert {"DDP 2", "FSDP 4", "TP 4", "CP 4, ring", "PP 4"} <= {name for name, *_ in kept}
    assert all(formula == counted for *_, formula, counted, _ in kept)


def test_techniques_are_counted() -> None:
    kept = rows((ROOT / "benchmarks/results/collectives.md").read_text())
    names = " ".join({name for name, *_ in kept})
    for technique in ("SimpleFSDP", "RTP", "LoCo", "QSDP", "demo", "random", "striding", "slicing"):
        assert technique in names


def test_where_a_technique_begins_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bandwidth = importlib.import_module("bandwidth")

    def measured(size: float, computing: float) -> object:
        """A step takes `computing`, and as long as its bytes take."""
        speeds = {f"{gigabits:g}": 1e9 * gigabits for gigabits in bandwidth.GIGABITS}
        seconds = {name: [computing + 8 * size / speed] for name, speed in speeds.items()}
        cores = os.cpu_count() or 1
        return bandwidth.Measured(512, size, seconds | {"": [computing]}, [cores * computing])

    plain, few_bits, slower = measured(8e6, 0.1), measured(2e6, 0.2), measured(8e6, 0.2)
    found = bandwidth.crossing(few_bits, plain)
    assert found.formula == pytest.approx(8 * 6e6 / 0.1 / 1e9)
    assert found.measured == pytest.approx(found.formula, rel=0.2)
    assert bandwidth.crossing(slower, plain) == (None, None)
    assert bandwidth.crossing(measured(2e6, 0.1), plain).formula == float("inf")


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("attention", "research/attention_8bit"),
        ("document_attention", "attention"),
        ("experts", "experts"),
        ("optimizers", "optimizers"),
    ],
)
def test_the_documentation_quotes_what_was_measured(name: str, page: str) -> None:
    docs = (ROOT / f"docs/{page}.md").read_text()
    quoted = docs.partition(f"<!-- Written by benchmarks/{name}.py -->\n\n")[2].partition("\n\n")[0]
    lines = quoted.splitlines()
    assert len(lines) > 5
    assert set(lines) <= set((ROOT / f"benchmarks/results/{name}.md").read_text().splitlines())


RESEARCH = sorted((ROOT / "docs/research").glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "docs/communication.md", *RESEARCH], ids=lambda p: p.stem)
def test_figures_of_a_page_are_those_of_the_results_that_it_links_to(page: Path) -> None:
    """Every decimal figure of its results, but for claims of papers, which come last."""
    _, results = re.split(r"\n##+ (?:Results|Measurements)\n", page.read_text())
    own = re.split(r"\n## |\n\nThe papers? report", results)[0]
    linked = [page.parent / path for path in re.findall(r"\]\(([^)\s]+/results/\w+\.md)\)", own)]
    text = "".join(path.resolve().read_text() for path in linked)
    for figure in re.findall(r"\d+\.\d+", own):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text), figure
    assert linked or not re.search(r"\d+\.\d+", own)


@pytest.mark.parametrize(
    "name",
    [
        *("parallel", "collectives", "bandwidth", "communication", "attention", "optimizers"),
        *("data", "document_attention", "experts", "plan_memory", "checkpoint_tiers", "low_bits"),
    ],
)
def test_pages_of_results_say_how_they_were_made(name: str) -> None:
    page = (ROOT / f"benchmarks/results/{name}.md").read_text()
    assert re.search(rf"`python benchmarks/{name}\.py.*`: .+ cores, torch .+, Python .+, 20", page)
    assert f"python benchmarks/{name}.py" in (ROOT / "benchmarks/README.md").read_text()


def test_pages_that_disown_their_times_name_no_fastest() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "benchmarks/results").glob("*.md")}
    disowned = {name for name, page in pages.items() if "say nothing about the strategies" in page}
    assert disowned == {"fsdp", "vit_mae_strategies"}
    assert [name for name in disowned if "fastest" in pages[name]] == []


def test_the_page_of_gpus_quotes_its_results() -> None:
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
            (cells,) = (
                cells for name, cells in quoted.items() if name.startswith(f"Float8 {kind}")
            )
            assert float(cells[column]) == pytest.approx(
                float(found[f"Float8 {kind}"][1]), abs=5e-3
            )


def test_errors_of_attention_are_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    attention = importlib.import_module("attention")
    kept = {tuple(row[:3]): row[3:] for row in rows((ROOT / KEPT_ERRORS).read_text())}
    for dtype, scale, rotation in (
        *(("float8", "token", "qkv"), ("int8", "tensor", "qkv")),
        *(("float8", "tensor", "none"), ("float8", "tensor", "qk")),  # which docs/systems.md quotes
    ):
        found = kept[dtype, "10 times larger", scale][attention.ROTATIONS.index(rotation)]
        again = attention.cell(5, 10, dtype=dtype, scale=scale, rotation=rotation)
        pairs = zip(again.split(" / "), found.split(" / "), strict=True)
        assert all(float(one) == pytest.approx(float(other), abs=0.11) for one, other in pairs)


@pytest.mark.slow
def test_memory_of_documents_is_linear(tmp_path: Path) -> None:
    """As it is without a mask; with a dense mask it is quadratic."""
    output = tmp_path / "page.md"
    small = ["--lengths", "1024", "--counted", "2048", "4096", "--rounds", "2", "--output", output]
    command = [sys.executable, "benchmarks/document_attention.py", *small]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    text = output.read_text()
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
def test_two_tiers_of_checkpoints(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = [sys.executable, "benchmarks/checkpoint_tiers.py", "--quick", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    lost = json.loads(output.with_suffix(".json").read_text())["losses"]
    kept = json.loads((ROOT / "benchmarks/results/checkpoint_tiers.json").read_text())["losses"]
    assert lost.keys() == kept.keys()
    assert lost["a process"] < lost["a node"] == lost["a process; rare checkpoints only"]
    assert lost["a node, with one replica"] < lost["a node"]


@pytest.mark.slow
def test_saving_and_loading(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = [sys.executable, "benchmarks/checkpoint.py", "--quick", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    page = output.read_text()
    for name in ("dcp.save", "ours, with hashes", "ours, verified", "resumed: verify and load"):
        assert re.search(rf"^\| {name}.*\| \d+\.?\d* \(", page, re.MULTILINE), name
    kept = (ROOT / "benchmarks/results/checkpoint.md").read_text()
    assert len(rows(kept)) == len(rows(page))


@pytest.mark.slow
def test_cost_of_recording(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- RECORDING -->\n<!-- END -->\n")
    command = [sys.executable, "benchmarks/recording.py", "--blocks", "2", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--page", str(page)], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    assert [size for size, *_ in rows(page.read_text())] == ["0", "2,000", "20,000"]


def test_the_cost_of_recording_is_kept() -> None:
    page = (ROOT / "benchmarks/results/recording.md").read_text()
    table = page.partition("<!-- RECORDING -->\n")[2].partition("<!-- END -->")[0]
    assert [size for size, *_ in rows(table)] == ["0", "2,000", "20,000"]


@pytest.mark.gate
def test_loading_what_dcp_saved(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    small = ["--dcp", "--quick", "--output", str(output)]
    command = [sys.executable, "benchmarks/checkpoint.py", *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    kept = (ROOT / "benchmarks/results/checkpoint_dcp.md").read_text()
    for page in (output.read_text(), kept):
        assert re.findall(r"^\| (\S+) \| \d+ \(", page, re.MULTILINE) == ["dcp.load", "ours"] * 2


@pytest.mark.slow
def test_speed_and_memory_of_data(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    command = ["benchmarks/data.py", "--quick", "--parts", "resume", "memory", "--output", output]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    page = output.read_text()
    assert [count for count, *_ in rows(page)] == ["1,000", "10,000"]
    assert re.search(r"sample 0: [\d.]+ \(.+\); sample 1,000: [\d.]+ \(", page)


def test_all_parts_of_data_are_kept() -> None:
    page = (ROOT / "benchmarks/results/data.md").read_text()
    for name in (
        *("torchtitan", "torchtitan, Megatron's files", "megatron-core", "MosaicML streaming"),
        *("litdata", "torchdata, memmap", "`data tokenize`, 2 processes", "own shards"),
        *("Megatron's files, no index yet", "the same by megatron-core, again", "10,000,000"),
    ):
        assert re.search(rf"^\| {re.escape(name)} \| [\d.,]+", page, re.MULTILINE), name


def test_tables_of_low_bits_are_those_of_the_kept_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    low_bits = importlib.import_module("low_bits")
    kept = json.loads((ROOT / "benchmarks/results/low_bits.json").read_text())
    page = (ROOT / "benchmarks/results/low_bits.md").read_text()
    for table in low_bits.tables(kept).values():
        assert table in page


@pytest.mark.gate
def test_modelled_ranks_train_the_run_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As shards and as replicas; and another run if what they send is rounded."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    low_bits = importlib.import_module("low_bits")
    short = ("training.steps=3", "lr_scheduler.warmup_steps=1", "validation.steps=2")
    ways = ((low_bits.SHARDS,), low_bits.REPLICAS, low_bits.qsdp(4, 4).keys)
    cases = [low_bits.Case("", (*way, *short)) for way in ways]
    shards, replicas, rounded = low_bits.train([(case, 0) for case in cases], 3)
    watched = (*short, "validation.enable=true", f"job.dump_folder={tmp_path}")
    runs.train(low_bits.Case("", watched).job(0, 1))
    expected = runs.rows(tmp_path)[-1]["validation_loss"]
    assert shards["loss"] == pytest.approx(expected, rel=1e-5)
    assert replicas["loss"] == pytest.approx(expected, rel=1e-5)
    assert rounded["loss"] != pytest.approx(expected, rel=1e-5)

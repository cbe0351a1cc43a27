"""The benchmarks run, and report what their page says; how fast is not a test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks/results").glob("overhead_*.json"))


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


@pytest.mark.parametrize("path", RESULTS)
def test_results_say_how_they_were_made(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result.keys() >= {"command", "device", "torch", "python", "date", "ratio"}


def test_page_quotes_the_results() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    assert len(RESULTS) == 2
    for path in RESULTS:
        ratio = json.loads(path.read_text())["ratio"]
        low, middle, high = (f"{ratio[k]:.3f}" for k in ("quartile_1", "median", "quartile_3"))
        assert f"{middle} ({low} to {high})" in page
    profile = json.loads((ROOT / "benchmarks/results/profile_cpu_1_rank.json").read_text())
    for part, milliseconds in profile["milliseconds_of_our_step"].items():
        assert f"| {part} | {milliseconds:.2f} |" in page

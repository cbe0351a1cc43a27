"""`torchtitan plot`: the loss of runs as an SVG."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.run_folders import row, write_run
from torchtitan.tools.cli import main
from torchtitan.tools.page import TICKS, ticks, vertical_axis

SVG = "{http://www.w3.org/2000/svg}"


def parts(path, kind):
    return list(ElementTree.parse(path).getroot().iter(f"{SVG}{kind}"))


def words(path):
    return [text.text for text in parts(path, "text")]


def test_the_loss_of_a_run_is_drawn_into_its_folder(tmp_path, capsys):
    rows = [row(1, loss=5.0), row(50, loss=3.0), {"step": 50, "validation_loss": 3.5}]
    folder = write_run(tmp_path / "a <&> b", [*rows, row(60, loss=None), row(100, loss=2.0)])
    assert main(["plot", str(folder)]) == 0
    path = folder / "loss.svg"
    assert capsys.readouterr().out == f"{path}\n"
    (line,) = parts(path, "polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) == 3, "a loss that is not finite has no point"
    assert heights == sorted(heights), "lower losses lie lower"
    (dot,) = parts(path, "circle")
    assert heights[0] < float(dot.attrib["cy"]) < heights[1]
    assert {str(folder), "100", "training loss; dots: validation"} <= {*words(path)}


def test_several_runs_have_a_line_each(tmp_path):
    ends = {"a": 3.0, "b": 2.0}.items()
    runs = [write_run(tmp_path / n, [row(1, loss=4.0), row(10, loss=end)]) for n, end in ends]
    folders = [*map(str, runs)]
    path = tmp_path / "both.svg"
    assert main(["plot", *folders, "-o", str(path), "--reference", "3.5"]) == 0
    assert len({line.attrib["stroke"] for line in parts(path, "polyline")}) == 2
    assert {*folders, "reference: 3.5"} <= {*words(path)}


def test_other_metrics_are_drawn_into_files_of_their_names(tmp_path, capsys):
    rows = [row(1, loss=5.0), row(2, loss=3.0), {"step": 2, "event": "statistics", "norm/a": 0.5}]
    folder = write_run(tmp_path / "run", rows)
    assert main(["plot", str(folder), "--metric", "norm/a", "--metric", "loss"]) == 0
    assert capsys.readouterr().out == f"{folder}/norm-a.svg\n{folder}/loss.svg\n"
    assert "norm/a" in words(folder / "norm-a.svg")
    assert main(["plot", str(folder), "--metric", "los"]) == 2
    assert f"{folder}: the run has reported no los; its metrics: " in capsys.readouterr().err


def test_a_file_that_is_there_is_not_overwritten(tmp_path, says):
    folder, path = write_run(tmp_path / "run", [row(1, loss=5.0)]), tmp_path / "curves.svg"
    path.write_text("mine")
    assert "curves.svg; already exists" in says("plot", folder, "--output", path, status=2)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("none", "none: is not a folder\n  wanted the job.dump_folder of a run"),
        ("empty", "empty: the run has reported no loss"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run, message, tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    write_run(Path("empty"), [])
    assert says("plot", run, status=2) == f"error: {message}\n"


@pytest.mark.parametrize(
    "losses", [[2.0, 11.9], [2.123, 2.124], [3.0], [0.0], [0.01, 5e6], [-1.0, 1.0]]
)
def test_the_axis_holds_all_losses_in_round_numbers(losses):
    low, high, *_ = vertical_axis(losses)
    levels = ticks(low, high)
    assert low <= min(losses) <= max(losses) <= high
    assert (levels[0], levels[-1]) == pytest.approx((low, high))
    assert 2 <= len(levels) <= TICKS + 3
    assert f"{levels[1] - levels[0]:.0e}"[0] in "125"

"""`torchtitan watch`: what it shows, what it reads, and how it ends."""

import io
import json
import math
import os
import pty
import re
import signal
import sys

import pytest
from rich.console import Console

from torchtitan.tools import cli
from torchtitan.tools.history import RunHistory
from torchtitan.tools.watch import View, sparkline, state

NOW = 1_800_000_000.0
RECIPE = """
[model]
name = "llama3"
flavor = "8B"
[training]
steps = 1000
[metrics]
log_freq = 10
run_name = "long"
tags = ["a", "b"]
"""


def report(step, **changes):
    row = {
        "step": step,
        "time": NOW - 5,
        "loss": 5.0 - step / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1000 * step,
        "tps": 500.0,
        "mfu": 0.412,
        "step_time": 2.0,
        "memory_gib": 12.3,
        "memory_pct": 15.4,
        "data_pct": 1.25,
        "skipped": 0,
        "eta_s": 65.0,
    }
    return row | changes


def write(folder, rows, recipe=RECIPE, mode="w"):
    folder.mkdir(exist_ok=True)
    if recipe:
        (folder / "recipe.toml").write_text(recipe)
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def lines(folder, width=100, now=NOW):
    found = [
        f"{label:<12}{text}" for label, text in View(RunHistory.open(folder)).lines(width, now)
    ]
    return [re.sub(r"\d\d:\d\d:\d\d  step", "HH:MM:SS  step", line) for line in found]


def test_what_is_shown_of_a_run(tmp_path):
    rows = [
        {"event": "restart", "step": 0, "time": NOW - 60, "restart": 1, "ranks": 8},
        report(1, loss=5.0, tps=250.0, time=NOW - 50),
        report(10, loss=4.0, time=NOW - 30),
        {"step": 10, "time": NOW - 28, "validation_loss": 3.5},
        {"event": "precision", "step": 15, "time": NOW - 26, "layer": 0.1},
        report(20, loss=3.0, skipped=1, skipped_because="loss"),
        {"step": 20, "time": NOW - 5, "validation_loss": 3.75},
    ]
    environment = {"ranks": 8, "device": "NVIDIA H100"}
    folder = write(tmp_path / "run", rows)
    (folder / "environment.json").write_text(json.dumps(environment))
    assert lines(folder) == [
        "run         long  llama3 8B  8 x NVIDIA H100  a, b",
        "state       alive: last report 5.0 s ago; next expected in 15 s",
        "step        20 of 1,000 (2%), 0:01:00 left",
        "loss        █▅▁  3.0000",
        "grad norm   ▁▁▁  1.0000",
        "validation  3.7500 at step 20; best 3.5000 at step 10",
        "tokens      20,000",
        # 1,000 tokens at 250 a second and 19,000 at 500.
        "speed       500 tokens/s/device now, 476 mean; 2 s per step",
        "mfu         41.2%",
        "memory      12.30 GiB (15%)",
        "data        1.2% of the time spent waiting",
        "events      HH:MM:SS  step 0  restart: restart 1, ranks 8",
        "            HH:MM:SS  step 20  skipped: steps 1, because loss",
    ]


def test_a_run_of_images_counts_images(tmp_path):
    rows = [report(step) for step in (1, 10)]
    for row in rows:
        row |= {"images": row.pop("tokens"), "images_per_second": row.pop("tps")}
    found = lines(write(tmp_path / "run", rows))
    assert "images      10,000" in found
    assert any(line.startswith("speed       500 images/s/device now") for line in found)


def test_a_run_without_recipe_and_with_what_is_not_known(tmp_path):
    row = report(3, loss=None, mfu=None, tps=None, grad_norm=None, non_finite={"loss": "nan"})
    folder = write(tmp_path / "bare", [row], recipe=None)
    found = lines(folder)
    assert found[0] == "run         bare"
    assert found[2] == "step        3, 0:01:00 left"
    assert found[3] == "loss        !  n/a"
    assert "speed       n/a tokens/s/device now, n/a mean; 2 s per step" in found
    assert not any(line.startswith("mfu") for line in found)


def test_the_rank_that_is_furthest_behind_is_named(tmp_path):
    behind = {"forward": (1, 3.0), "backward": (5, 12.4), "data": (2, 0.0)}
    row = report(20)
    for phase, (rank, percent) in behind.items():
        row |= {f"slowest/{phase}": rank, f"slowest/{phase}_pct": percent}
    shown = lines(write(tmp_path / "run", [row]))
    assert shown[-1] == "slowest     rank 5 in backward: 12% of a step behind the median"


def test_the_load_of_experts_is_a_line_for_each_of_some_blocks(tmp_path):
    last = report(20) | {"experts/busiest_share": 0.5, "experts/entropy": 0.9}
    loads = {f"load/layers.{n}/{e}": [0.0, 0.5][e == n % 2] for n in range(12) for e in range(2)}
    measured = {"step": 20, "event": "experts", **loads}
    shown = lines(write(tmp_path / "run", [last, measured]))
    begin = shown.index("experts     busiest 50.0% of the tokens' choices, entropy 0.900")
    assert shown[begin + 1 :] == [f"{f'  layers.{n}':<12}█▁" for n in range(0, 12, 2)]


def test_a_run_that_has_not_reported_yet(tmp_path):
    assert lines(write(tmp_path / "run", [])) == [
        "run         long  llama3 8B  a, b",
        "state       no report yet",
    ]


@pytest.mark.parametrize(
    ("step", "step_time", "since", "expected"),
    [
        (20, 2.0, 5, "alive: last report 5.0 s ago; next expected in 15 s"),
        (20, 2.0, 60, "alive: "),
        (
            20,
            2.0,
            61,
            "silent: last report 0:01:01 ago; next was expected after 20 s. It may be saving,",
        ),
        # Nine steps are left, of a tenth of a second: half a minute is not yet long.
        (1, 0.1, 30, "alive: last report 30 s ago; next was expected after 0.9 s"),
        (1, 0.1, 31, "silent: "),
        (1000, 2.0, 3600, "finished at step 1,000, 1:00:00 ago"),
        # A clock that differs from this one.
        (20, 2.0, -9, "alive: last report 0.0 s ago"),
    ],
)
def test_whether_a_run_seems_alive(step, step_time, since, expected, tmp_path):
    row = report(step, step_time=step_time, time=NOW - since)
    history = RunHistory.open(write(tmp_path / "run", [row]))
    assert state(history, NOW).startswith(expected)


def test_only_the_last_events_are_shown(tmp_path):
    events = [{"event": "rollback", "step": step, "time": NOW} for step in range(9)]
    shown = lines(write(tmp_path / "run", events))[2:]
    assert [int(line.split()[-2]) for line in shown] == [4, 5, 6, 7, 8]


def test_sparklines():
    assert sparkline([], 5) == ""
    assert sparkline([1.0], 5) == "▁"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 0.0, 0.0, 7.0, 7.0], 3) == "▁▁█"
    assert sparkline([0.0, math.nan, 7.0], 9) == "▁!█"
    # Seven values in three columns: two, two and three of them.
    assert sparkline([0.0, 0.0, 7.0, 7.0, 0.0, 0.0, 0.0], 3) == "▁█▁"
    assert len(sparkline([float(n) for n in range(12345)], 40)) == 40


def test_a_file_written_anew_is_read_from_its_beginning(tmp_path):
    folder = write(tmp_path / "run", [report(step) for step in (10, 20, 30)])
    view = View(RunHistory.open(folder))
    assert len(view.history.reports) == 3
    # As a resumed run does: rows past the checkpoint are left out, and it goes on.
    write(folder, [report(10)], recipe=RECIPE.replace("1000", "40"), mode="w")
    view.update()
    assert len(view.history.reports) == 1
    write(tmp_path / "new", [report(10), report(20), report(30), report(40)])
    (tmp_path / "new/metrics.jsonl").replace(folder / "metrics.jsonl")
    view.update()
    assert len(view.history.reports) == 4
    assert dict(view.lines(80, NOW))["state"] == "finished at step 40, 5.0 s ago"


def test_rich_draws_it_within_the_width_of_the_terminal(tmp_path):
    rows = [report(step, loss=math.sin(step)) for step in range(1, 500)]
    rows.append({"event": "groups", "step": 500, "time": NOW, "groups": "x" * 200})
    view = View(RunHistory.open(write(tmp_path / "run", rows)))
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(view)
    shown = console.export_text().splitlines()
    assert max(map(len, shown)) <= 60
    assert shown[0] == "run         long  llama3 8B  a, b"
    [loss] = [line for line in shown if line.startswith("loss")]
    assert re.fullmatch(r"loss        [▁▂▃▄▅▆▇█]{38}  -?\d\.\d{4}", loss)
    assert shown[-2].endswith("…")


def test_elsewhere_than_on_a_terminal_it_prints_once(tmp_path, capsys):
    folders = [write(tmp_path / name, [report(20)]) for name in ("first", "second")]
    assert cli.main(["watch", *map(str, folders)]) == 0
    output = capsys.readouterr().out
    assert output.count("run         long  llama3 8B") == 2
    assert "\033" not in output


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "outputs").mkdir()
    write(tmp_path / "outputs/run", [])
    assert cli.main(["watch", str(tmp_path / "outputs")]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: {tmp_path}/outputs: has no metrics.jsonl\n"
        f"  did you mean {tmp_path}/outputs/run?\n  wanted the job.dump_folder of a run\n"
    )
    assert cli.main(["watch", str(tmp_path / "gone")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["0", "-1", "often", "nan"])
def test_a_pace_that_cannot_be_is_refused(word, capsys):
    assert cli.main(["watch", "x", f"--refresh={word}"]) == 2
    assert f"got {word}\n  wanted seconds" in capsys.readouterr().err


def test_on_a_terminal_it_goes_on_until_ctrl_c(tmp_path):
    folder = write(tmp_path / "run", [report(20)])
    process, terminal = pty.fork()
    if process == 0:
        on_a_terminal(["watch", str(folder), "--refresh", "0.02"])
    shown = read_until(terminal, "20 of 1,000")
    assert "\033[" in shown
    write(folder, [report(30)], mode="a")
    read_until(terminal, "30 of 1,000")
    os.write(terminal, b"\x03")
    left = read_until(terminal, None)
    assert "Traceback" not in left
    assert left.endswith("\033[?25h")  # the cursor is there again
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def on_a_terminal(words: list[str]) -> None:
    """In the child of `pty.fork`: run the command on the terminal that it was given."""
    os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    # A shell without a terminal has what it starts beside it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        status = cli.main(words)
    finally:
        sys.stdout.flush()
        os._exit(status)


def read_until(terminal: int, word: str | None) -> str:
    """What a terminal shows until a word, or until its process has ended."""
    shown = b""
    while word is None or word.encode() not in shown:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux's way to tell that nobody has it open any more
            piece = b""
        if not piece:
            assert word is None, f"ended before {word!r}: {shown.decode()}"
            break
        shown += piece
    return shown.decode()

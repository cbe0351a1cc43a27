"""The log: its lines, its colours, and where they go."""

import io
import logging
import os
import re
import subprocess
import sys

import pytest

from torchtitan.config import print_error
from torchtitan.logging import configure, logger, make_console, on_terminal, progress_bar, status
from torchtitan.tasks import Task, previewed


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def lines_of(stream, monkeypatch, **arguments):
    monkeypatch.setattr(sys, "stderr", stream)
    configure(**arguments)
    logger.debug("hidden")
    logger.info("loss %.1f", 2.5)
    logger.warning("careful")
    return re.sub(r"\d\d:\d\d:\d\d", "TIME", stream.getvalue()).splitlines()


def test_plain_lines_elsewhere_than_on_a_terminal(monkeypatch):
    assert lines_of(io.StringIO(), monkeypatch) == ["TIME loss 2.5", "TIME WARNING careful"]


@pytest.mark.parametrize(("resumed", "level"), [(False, logging.INFO), (True, logging.DEBUG)])
def test_the_first_sample_is_shown_on_a_fresh_start(resumed, level, caplog):
    class Pictures(Task):
        sample = "image"

        def preview(self, batch):
            return f"3 x {batch}"

    caplog.set_level(logging.DEBUG, "torchtitan")
    assert list(previewed(iter([4, 5]), Pictures(None, None), lambda: resumed)) == [4, 5]
    assert caplog.record_tuples == [("torchtitan", level, "first image: 3 x 4")]


def test_the_rank_is_shown_where_there_is_more_than_one(monkeypatch):
    lines = lines_of(io.StringIO(), monkeypatch, rank=3, world=8)
    assert lines == ["TIME [rank 3] loss 2.5", "TIME [rank 3] WARNING careful"]


def test_colour_on_a_terminal(monkeypatch):
    assert lines_of(Terminal(), monkeypatch) == [
        "\033[2mTIME \033[0mloss 2.5",
        "\033[2mTIME \033[0m\033[33mWARNING careful\033[0m",
    ]


def test_no_colour_when_told(monkeypatch):
    assert lines_of(Terminal(), monkeypatch, color=False)[0] == "TIME loss 2.5"


def test_no_colour_under_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines_of(Terminal(), monkeypatch)[0] == "TIME loss 2.5"


def test_levels(monkeypatch):
    assert lines_of(io.StringIO(), monkeypatch, level="warning") == ["TIME WARNING careful"]
    assert lines_of(io.StringIO(), monkeypatch, level="debug")[0] == "TIME DEBUG hidden"


def test_a_dumb_terminal_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert on_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not on_terminal()


def test_configuring_twice_writes_each_line_once(monkeypatch):
    configure(rank=1, world=2)
    assert len(lines_of(io.StringIO(), monkeypatch)) == 2


def test_lines_follow_sys_stderr(monkeypatch):
    """This is what lets a progress bar print them above itself."""
    configure()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logger.info("here")
    assert later.getvalue().endswith(" here\n")


def test_a_traceback_is_written(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure()
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed")
    assert "ERROR failed\nTraceback" in stream.getvalue()
    assert stream.getvalue().endswith("KeyError: 'lost'\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_opened_on_nothing(closed, tmp_path):
    """Else the next file would take their number, and what native code prints."""
    code = (
        "import os, sys; from torchtitan.logging import configure, logger; configure();"
        "open(sys.argv[1], 'w').write(str(os.dup(0))); logger.error('lost'); print('lost');"
        "sys.stdin.read(); [os.fstat(number) for number in range(3)]"
    )
    file = tmp_path / "number"
    words = [sys.executable, "-c", code, str(file)]
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *words]
    subprocess.run(shell, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    assert int(file.read_text()) > 2


def test_a_process_may_have_no_streams(monkeypatch):
    """As under pythonw."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert not on_terminal()
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    print_error("before the log is configured")
    assert printed.getvalue() == ""
    monkeypatch.setattr(sys, "stdout", None)
    configure()
    print_error("after it")
    logger.error("lost")
    assert sys.stdout.isatty() is sys.stderr.isatty() is on_terminal() is False


def test_a_character_that_an_encoding_lacks_is_an_escape(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    configure()
    print("é中", flush=True)
    assert stdout.buffer.getvalue() == b"\\xe9\\u4e2d\n"


def test_a_file_has_its_name_in_any_locale(tmp_path):
    code = (
        "import sys; from torchtitan.logging import use_utf8; use_utf8();"
        "print(sys.getfilesystemencoding(), sys.argv[1:])"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", code, "é", "-v"]
    done = subprocess.run(
        words, env={**os.environ, **ascii_only}, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert done.stdout == "utf-8 ['é', '-v']\n"


NAME = "run[/b] [red]x[/] :smile: {task}"


def test_names_are_no_markup(monkeypatch):
    from rich.table import Table

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    table = Table(NAME, title=NAME)
    table.add_row(NAME)
    make_console(stderr=True, width=80).print(table, NAME)
    with progress_bar(NAME, 2) as show, status(NAME) as add:
        show(completed=1)
        add("[/b]")
    assert re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).count(NAME) >= 6


def test_long_work_reports_where_there_is_no_terminal(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("torchtitan.logging.QUIET_SECONDS", 0.01)
    caplog.set_level("INFO", "torchtitan")
    with status("planning") as add:
        add(": 3 recorded")
        while not caplog.messages:
            pass
    assert caplog.messages[-1].startswith("planning: 3 recorded, for ")


def test_importing_configures_nothing():
    code = (
        "import logging, torchtitan.logging as ours;"
        "print(ours.logger.handlers, logging.root.handlers, ours.logger.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] [] {logging.NOTSET}\n"

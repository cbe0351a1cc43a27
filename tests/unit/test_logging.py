"""The log: its lines, its colours, and where they go."""

import io
import logging
import re
import subprocess
import sys

import pytest

from torchtitan.logging import configure, logger, on_terminal
from torchtitan.tasks.task import Task, previewed


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def leave_the_logger_as_it_was(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


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


def test_importing_configures_nothing():
    code = (
        "import logging, torchtitan.logging as ours;"
        "print(ours.logger.handlers, logging.root.handlers, ours.logger.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] [] {logging.NOTSET}\n"

"""Every key of a TOML text is found on its line, whatever surrounds it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tables import table
from torchtitan.config.files import key_lines

TEXT = Path(__file__).with_name("key_lines.toml").read_text(encoding="utf-8").rstrip("\n")
LINES = {tuple(path): int(line) for line, *path in table(__file__, "key_lines.txt")}


def paths(value, path=()):
    """The path of every table and key of what tomllib read; tables of a list by their number."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from paths(item, (*path, key))
    for number, item in enumerate(value) if isinstance(value, list) else ():
        if isinstance(item, dict):
            yield (*path, str(number))
            yield from paths(item, (*path, str(number)))


def test_lines_are_found_without_asserts():
    code = "from torchtitan.config.files import key_lines; print(key_lines('a = 1\\nb = \"c\"'))"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, check=True, timeout=60
    )
    assert done.stdout.decode().strip() == "{('a',): 1, ('b',): 2}"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines(end):
    lines = key_lines(TEXT.replace("\n", end))
    assert {path: lines[path] for path in LINES} == LINES


def test_keys_are_those_that_tomllib_reads():
    assert set(key_lines(TEXT)) == set(paths(tomllib.loads(TEXT)))


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "   \n\t# and blanks\n\n"])
def test_nothing(text):
    assert key_lines(text) == {}

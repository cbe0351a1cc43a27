"""Every key of a TOML text is found on its line, whatever surrounds it."""

import subprocess
import sys
import tomllib

import pytest

from torchtitan.config.files import key_lines

TEXT = '''\
# [not] = "a key"
top = 1
"quoted key" = "a # b"   # and [not] = this
'its.literal'.b = 2

[ spaced . "dots.in" ]
a.b . c = "\\" [x] = 1"
text = """
[not]
a = 1  \\
""" # after
closing = """"five"""""
raw = \'\'\'
b = "
\'\'\'
list = [
    # x = 1
    "]", [1, 2],
    { deep = { er = 1 }, more = [ { z = 1 } ] },
]
inline = { one = 1, "two" = { three = 3 }, four = "}" }
when = 1979-05-27 07:32:00
time = 07:32:00.5
number = -1_000.5e-3
escaped."\\u00e9" = true
[[tables]]
name = "first"
[[tables]]
name = "second"
[tables.of]
its = 1
[[tables.own]]
a = 1
[[tables.own]]
[last]
x = 1'''
LINES = {
    ("top",): 2,
    ("quoted key",): 3,
    ("its.literal",): 4,
    ("its.literal", "b"): 4,
    ("spaced",): 6,
    ("spaced", "dots.in"): 6,
    ("spaced", "dots.in", "a", "b", "c"): 7,
    ("spaced", "dots.in", "text"): 8,
    ("spaced", "dots.in", "closing"): 12,
    ("spaced", "dots.in", "raw"): 13,
    ("spaced", "dots.in", "list"): 16,
    ("spaced", "dots.in", "list", "2"): 19,
    ("spaced", "dots.in", "list", "2", "deep", "er"): 19,
    ("spaced", "dots.in", "list", "2", "more", "0", "z"): 19,
    ("spaced", "dots.in", "inline"): 21,
    ("spaced", "dots.in", "inline", "two", "three"): 21,
    ("spaced", "dots.in", "when"): 22,
    ("spaced", "dots.in", "time"): 23,
    ("spaced", "dots.in", "number"): 24,
    ("spaced", "dots.in", "escaped", "é"): 25,
    ("tables",): 26,
    ("tables", "0"): 26,
    ("tables", "0", "name"): 27,
    ("tables", "1"): 28,
    ("tables", "1", "name"): 29,
    ("tables", "1", "of"): 30,
    ("tables", "1", "of", "its"): 31,
    ("tables", "1", "own"): 32,
    ("tables", "1", "own", "0", "a"): 33,
    ("tables", "1", "own", "1"): 34,
    ("last",): 35,
    ("last", "x"): 36,
}


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

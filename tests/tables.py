"""Data that lie beside a test: tables as text, a row a line with bars between columns, or TOML."""

import tomllib
from pathlib import Path


def table(test, name):
    r"""The rows of a file beside a test, as tuples of their columns; `\n` stands for a new line."""
    lines = Path(test).with_name(name).read_text(encoding="utf-8").splitlines()
    rows = (line.replace(r"\n", "\n") for line in lines if line and not line.startswith("# "))
    return [tuple(column.strip(" ") for column in row.split(" | ")) for row in rows]


def data(test, name=None):
    """The TOML file beside a test, which has its name unless another is given."""
    path = Path(test).parent / name if name else Path(test).with_suffix(".toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))

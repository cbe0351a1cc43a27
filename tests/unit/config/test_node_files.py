"""What a launcher reads for the ranks of its machine."""

import json
import os

import pytest

from tests import forked
from torchtitan.config import kept_for_ranks, read_for_node
from torchtitan.config.node_files import VARIABLE

LARGE = os.urandom(2**21)


def test_a_rank_reads_what_its_launcher_has_read(tmp_path):
    file, other = tmp_path / "recipe.toml", tmp_path / "other.toml"
    file.write_bytes(LARGE)
    other.write_text("of a rank alone")
    with kept_for_ranks():
        assert read_for_node(file) == LARGE
        file.unlink()
        assert forked.run(lambda: read_for_node(file) != LARGE, tmp_path).status == 0
        assert read_for_node(other) == b"of a rank alone"
    assert VARIABLE not in os.environ
    with pytest.raises(FileNotFoundError):
        read_for_node(file)


def test_a_rank_whose_launcher_is_gone_reads_the_file(tmp_path, monkeypatch):
    file = tmp_path / "recipe.toml"
    file.write_text("steps = 3")
    gone = {str(file): "/proc/0/fd/3"}
    monkeypatch.setenv(VARIABLE, json.dumps(gone))
    assert read_for_node(file) == b"steps = 3"
    with kept_for_ranks():  # which is not of the launcher that started this one
        assert VARIABLE not in os.environ
    assert json.loads(os.environ[VARIABLE]) == gone

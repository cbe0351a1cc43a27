"""Ranks of a test that die in native code."""

import os
import resource
import signal
from pathlib import Path

import pytest

from tests.ranks import run_ranks


def dies_once(folder: Path) -> int:
    marker = folder / os.environ["RANK"]
    if not marker.exists():
        marker.touch()
        dies()
    return 7


def dies() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core takes gigabytes
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_fault_is_shown_with_its_stack_and_ranks_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)rank 0 .* status -11.*in dies_once"):
        assert run_ranks(dies_once, 1, tmp_path) == [7]


def test_a_second_fault_is_an_error() -> None:
    with pytest.warns(UserWarning, match="native"), pytest.raises(AssertionError, match="in dies"):
        run_ranks(dies, 1)


def fails() -> None:
    raise ValueError("ours")


def test_an_error_of_our_own_is_no_fault() -> None:
    with pytest.raises(AssertionError, match="ValueError: ours"):
        run_ranks(fails, 1)

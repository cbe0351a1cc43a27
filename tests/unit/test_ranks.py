"""Ranks of a test that fail: nothing is tried again, and the stacks are shown."""

import os
import resource
import signal

import pytest

from tests.ranks import run_ranks


def dies():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core takes gigabytes
    os.kill(os.getpid(), signal.SIGSEGV)


def fails():
    raise ValueError("ours")


def test_a_fault_in_native_code_is_shown_with_its_stack():
    with pytest.raises(AssertionError, match=r"(?s)rank 0 .* status -11.*in dies"):
        run_ranks(dies, 1)


def test_an_error_is_shown_with_its_traceback():
    with pytest.raises(AssertionError, match="ValueError: ours"):
        run_ranks(fails, 1)

"""Ranks of a test that fail: nothing is tried again, and the stacks are shown."""

import os
import resource
import signal

import pytest
from torch._inductor import config

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


def compiles():
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.pool().submit(os.getpid).result(10)


@config.patch(compile_threads=2)
def test_a_rank_starts_the_threads_of_the_compiler():
    """It would wait forever for those of this process, once one of them is idle."""
    assert compiles() == os.getpid()
    assert run_ranks(compiles, 1) != [os.getpid()]

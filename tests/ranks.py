"""Runs a function on several ranks of this machine, as a test: a rank that fails fails it."""

from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan import local_ranks

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], world: int, *args: Any, device: str = "cpu"
) -> list[Result]:
    """`function(*args)` on `world` ranks with a process group; the results in rank order.

    Raises:
        AssertionError: with the tracebacks of the ranks that failed.
    """
    try:
        return local_ranks.run_ranks(function, world, *args, device=device)
    except local_ranks.RanksFailed as error:
        raise AssertionError(str(error)) from None

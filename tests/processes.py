"""Processes by their number, and ports that are free for them."""

import socket
from pathlib import Path


def descendants(pid):
    """The processes that a process has started, and those that they have."""
    children = [
        int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _read(path)
    ]
    return [*children, *(child for one in children for child in descendants(one))]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _read(path):
    try:
        return path.read_text().split()
    except OSError:  # a thread that has ended since
        return []

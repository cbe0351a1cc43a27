"""Bytes that ranks send each other, in messages of a bounded size."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from torchtitan.checkpoint import deliveries
from torchtitan.checkpoint.deliveries import Delivery, Span, appending, deliver, messages
from torchtitan.config import ConfigError
from torchtitan.device import Device
from torchtitan.parallel import CommConfig, Degrees, open_world

CONTENT = bytes(range(256)) * 20


def test_messages_are_full_but_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "CHUNK", 10)
    found = list(messages([Span("a", 0, 3), Span("b", 5, 25), Span("c", 0, 4), Span("d", 0, 0)]))
    assert [sum(span.size for span in message) for message in found] == [3, 10, 10, 9]
    assert found[-1] == [Span("b", 25, 5), Span("c", 0, 4)]


def exchanged(folder: Path, name: str) -> tuple[bytes, str]:
    """Each of two ranks sends the other two parts of a file; what arrives, and the error."""
    deliveries.CHUNK = 1000
    with open_world(Degrees(dp_shard=2), CommConfig(), Device("cpu")) as world:
        (own := folder / str(world.rank)).mkdir()
        (own / "content").write_bytes(CONTENT)
        spans = Span("content", 7, 3001), Span(name, 0, 10)
        both = [Delivery(0, 1, spans), Delivery(1, 0, spans)]
        try:
            deliver(world, own, both, appending(own / "received"))
            error = ""
        except (ConfigError, OSError) as found:
            error = str(found)
        assert world.gather(world.rank) == [0, 1]  # still in step
        return (own / "received").read_bytes(), error


def test_ranks_send_each_other_parts_of_files(tmp_path: Path) -> None:
    for received, error in run_ranks(exchanged, 2, tmp_path, "content"):
        assert received == CONTENT[7:3008] + CONTENT[:10]
        assert not error


def test_what_cannot_be_read_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    for _, error in run_ranks(exchanged, 2, tmp_path, "missing"):
        assert "No such file" in error

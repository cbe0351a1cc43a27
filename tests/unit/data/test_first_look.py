"""The first look at data: by one process of a node, and again when a file has changed."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, check_local, first_look
from torchtitan.inputs import problems_of_files


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Counts the looks of all processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(first_look, "SHARED_BYTES", 1)
    check = first_look._check

    def counted(*arguments: Any) -> None:
        with (tmp_path / "looks").open("a") as file:
            file.write(".")
        check(*arguments)

    monkeypatch.setattr(first_look, "_check", counted)
    return lambda: len((tmp_path / "looks").read_text())


def _refused(config: DataConfig) -> None:
    try:
        check_local(config)
    except ConfigError:
        os._exit(2)


def exit_codes(config: DataConfig) -> list[int | None]:
    """What some processes that start together say."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_refused, args=(config,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_one_process_looks_and_all_refuse(tmp_path: Path, looks: Callable[[], int]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    config = DataConfig(dataset=str(path))
    assert exit_codes(config) == [0] * 4
    assert looks() == 1
    path.write_text('{"body": "a"}\n')
    assert exit_codes(config) == [2] * 4
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: no key 'text'"):
        check_local(config)
    path.write_text('{"text": "b"}\n')
    before = looks()
    assert exit_codes(config) == [0] * 4
    assert looks() == before + 1
    with pytest.raises(ConfigError, match="no key 'body'"):
        check_local(config.model_copy(update={"text_key": "body"}))


def test_the_launcher_and_its_ranks_look_once(tmp_path: Path, looks: Callable[[], int]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    for _ in range(3):
        job = load_job(None, ["--data.dataset", str(path)], 1, "cpu", is_here=True).config
        assert list(problems_of_files(job)) == []
    assert looks() == 1


def test_without_a_folder_every_process_looks(
    tmp_path: Path, looks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    assert exit_codes(DataConfig(dataset=str(path))) == [0] * 4
    assert looks() == 4

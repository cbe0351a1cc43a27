"""Every test of recipes starts in a folder of its own, which is empty."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

"""Every test of recipes starts in a folder of its own, which is empty."""

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

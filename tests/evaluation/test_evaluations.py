"""An evaluation of another kind than the tasks of the harness, registered by a user's module."""

from pathlib import Path

import pytest

from torchtitan.tools.cli import main

MODULE = """
from torchtitan.tools.evaluate.evaluation import EVALUATIONS, EvaluationRequest, Result


def count(request: EvaluationRequest) -> Result:
    return Result({"documents": request.limit}, [f"{request.limit} of {request.dataset}"])


EVALUATIONS["count"] = count
"""


def test_a_module_adds_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_evaluations.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["evaluate", str(tmp_path), "--imports", "my_evaluations", "--limit", "3"]
    assert main([*words, "--tasks", "count", "--dataset", "text"]) == 0
    assert capsys.readouterr().out == "3 of text\n"
    assert main([*words, "--tasks", "count", "--json"]) == 0
    assert capsys.readouterr().out == '{"count": {"documents": 3}}\n'
    assert main([*words, "--tasks", "hellaswag,count"]) == 2
    assert "--tasks: got hellaswag,count; count is run by itself" in capsys.readouterr().err

"""The evaluations of `torchtitan evaluate`: the held-out loss, and those of a user's module."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests import small_weights
from tests.small_weights import SPEC
from torchtitan.losses import cross_entropy
from torchtitan.models import MODELS
from torchtitan.tools.cli import main
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject

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
    assert main([*words, "--tasks", "hellaswag"]) == 2
    message = "--tasks: got hellaswag\n  wanted loss or linear_probe or count\n  for benchmarks"
    assert message in capsys.readouterr().err


def test_held_out_loss_is_that_of_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of BOS, the text and EOS, against the forward; longer documents in windows."""
    monkeypatch.setitem(MODELS, "small", SPEC)
    texts = ["def add(a, b):\n    return a + b\n", "Größe 🙂, a longer text", "third"]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = {"model.tokenizer_path": None, "validation.dataset": str(file)}
    run = small_weights.saved(tmp_path / "ours", recipe=recipe)
    words = ["evaluate", str(run), "--dtype", "float32", "--limit", "2", "--json"]
    nats, count = 0.0, 0
    with open_model(open_subject(ModelLocation(run)), 64, torch.float32) as model:
        for text in texts[:2]:
            tokens = [256, *text.encode(), 257]
            logits = model.logits(torch.tensor([tokens[:-1]]))
            nats += float(cross_entropy(logits, torch.tensor([tokens[1:]])))
            count += len(tokens) - 1
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    assert (found["tokens"], found["documents"]) == (count, 2)
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    size = sum(len(text.encode()) for text in texts[:2])
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert main([*words, "--dataset", str(file), "--length", "9"]) == 0
    shorter = json.loads(capsys.readouterr().out)["loss"]
    assert shorter["tokens"] == count
    assert shorter["loss"] != found["loss"]
    assert main([*words, "--dataset", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err

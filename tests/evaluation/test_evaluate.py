"""The evaluations of `torchtitan evaluate`: the held-out loss, and those of a user's module.

The logarithm of a text's probability is the sum of those of its tokens, each counted once.
"""

import itertools
import json
import math

import pytest
import torch

from tests import small_weights
from torchtitan.losses import cross_entropy
from torchtitan.tools.cli import main
from torchtitan.tools.evaluate import Window, score_texts, windows
from torchtitan.tools.inference import InferenceModel, ModelLocation, find_model

pytestmark = pytest.mark.usefixtures("small")

MODULE = """
from torchtitan.tools.evaluate import EVALUATIONS, EvaluationRequest, Result


def count(request: EvaluationRequest) -> Result:
    return Result({"documents": request.limit}, [f"{request.limit} of {request.dataset}"])


EVALUATIONS["count"] = count
"""

CONTEXT = [256, *b"The quick brown fox"]
TEXTS = [[*b" jumps over the lazy dog"], [*b" is"], [*b"."], []]


def test_a_module_adds_an_evaluation(tmp_path, monkeypatch, capsys, says):
    (tmp_path / "my_evaluations.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["evaluate", str(tmp_path), "--imports", "my_evaluations", "--limit", "3"]
    assert says(*words, "--tasks", "count", "--dataset", "text") == "3 of text\n"
    assert says(*words, "--tasks", "count", "--json") == '{"count": {"documents": 3}}\n'
    assert main([*words, "--tasks", "hellaswag"]) == 2
    message = "--tasks: got hellaswag\n  wanted loss or linear_probe or count\n  for benchmarks"
    assert message in capsys.readouterr().err


def test_held_out_loss_is_that_of_each_document(tmp_path, monkeypatch, says):
    """Of BOS, the text and EOS, against the forward; longer documents in windows."""
    texts = ["def add(a, b):\n    return a + b\n", "Größe 🙂, a longer text", "third"]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = {"model.tokenizer_path": None, "validation.dataset": str(file)}
    run = small_weights.saved(tmp_path / "ours", recipe=recipe)
    words = ["evaluate", str(run), "--dtype", "float32", "--limit", "2", "--json"]
    monkeypatch.setattr("torchtitan.tools.evaluate.AT_A_TIME", 1)
    nats, count = 0.0, 0
    model = InferenceModel(find_model(ModelLocation(run)), 64, torch.float32)
    for text in texts[:2]:
        tokens = [256, *text.encode(), 257]
        logits = model.logits(torch.tensor([tokens[:-1]]))
        nats += float(cross_entropy(logits, torch.tensor([tokens[1:]])))
        count += len(tokens) - 1
    found = json.loads(says(*words))["loss"]
    assert (found["tokens"], found["documents"]) == (count, 2)
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    size = sum(len(text.encode()) for text in texts[:2])
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    shorter = json.loads(says(*words, "--dataset", file, "--length", "9"))["loss"]
    assert shorter["tokens"] == count
    assert shorter["loss"] != found["loss"]
    assert "nowhere" in says(*words, "--dataset", tmp_path / "nowhere", status=2)
    # Of a run without BOS, a text follows another's EOS. The options are in place of its files.
    own = {"data.add_bos": False, "validation.dataset": "texts", "validation.dataset_path": "x"}
    words[1] = str(small_weights.saved(tmp_path / "bare", recipe=recipe | own))
    assert find_model(ModelLocation(tmp_path / "bare")).begin == ()
    assert json.loads(says(*words, "--dataset", file))["loss"]["tokens"] == count


# --- scores of texts ---


def model_of(folder, length):
    path = small_weights.saved(folder / "ours", recipe={"model.tokenizer_path": None})
    return InferenceModel(find_model(ModelLocation(path)), length, torch.float32)


def logarithms(model, tokens):
    """Of every token but the first, by one forward over all of them."""
    whole = model.logits(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    return whole.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_a_continuation_has_the_sum_of_its_tokens_in_the_whole(tmp_path):
    model = model_of(tmp_path, 64)
    found = score_texts(model, [CONTEXT + text for text in TEXTS], rows=3)
    for text, score in zip(TEXTS, found, strict=True):
        expected = logarithms(model, CONTEXT + text).sum()
        assert score == pytest.approx(float(expected), abs=1e-4)


def test_a_text_after_its_begin_has_minus_the_loss_of_training(tmp_path):
    model = model_of(tmp_path, 64)
    text = [*b"any text"]
    [score] = score_texts(model, [[256, *text]], rows=1)
    logits = model.logits(torch.tensor([[256, *text[:-1]]]))
    loss = cross_entropy(logits, torch.tensor([text]))
    assert score == pytest.approx(-float(loss), rel=1e-6)


def test_windows_are_those_of_the_harness():
    """The example in the docstring of its `LM.loglikelihood_rolling`, BOS as -1."""
    assert list(windows([-1, *range(10)], 4)) == [
        Window([-1, 0, 1, 2], [0, 1, 2, 3]),
        Window([3, 4, 5, 6], [4, 5, 6, 7]),
        Window([5, 6, 7, 8], [8, 9]),
    ]


def test_windows_count_each_token_once_and_fit():
    for length, size in itertools.product((1, 2, 5, 9, 10, 11, 12, 100), (0, 1, 2, 11, 12)):
        whole = list(range(size))
        found = list(windows(whole, length))
        assert [target for window in found for target in window.targets] == whole[1:]
        for tokens, targets in found:
            assert len(targets) <= len(tokens) <= length
            assert tokens == list(range(targets[-1] - len(tokens), targets[-1]))  # all before
            assert len(tokens) == min(length, targets[-1])  # as far back as there is room


def test_a_text_in_windows_has_the_sum_over_them(tmp_path):
    text = list(bytes(range(97, 122)))
    model = model_of(tmp_path, 7)
    [score] = score_texts(model, [[256, *text]], rows=2)
    expected = sum(
        float(logarithms(model, [*tokens, targets[-1]])[-len(targets) :].sum())
        for tokens, targets in windows([256, *text], 7)
    )
    assert score == pytest.approx(expected, abs=1e-4)


def test_uniform_model_has_the_logarithm_of_the_vocabulary(tmp_path):
    model = model_of(tmp_path, 64)
    for parameter in model.network.parameters():
        parameter.zero_()
    [score] = score_texts(model, [[256, *TEXTS[0]]], rows=1)
    assert score == pytest.approx(-len(TEXTS[0]) * math.log(300), rel=1e-6)

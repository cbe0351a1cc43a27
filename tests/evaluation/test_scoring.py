"""The logarithm of a text's probability is the sum of those of its tokens, each counted once."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import small_weights
from tests.ranks import run_ranks
from tests.small_weights import SPEC
from torchtitan.config import ConfigError
from torchtitan.losses import cross_entropy
from torchtitan.models import MODELS
from torchtitan.tools import cli
from torchtitan.tools.evaluate.harness import (
    CollectiveModel,
    HarnessRequest,
    as_table,
    before,
    read_request,
)
from torchtitan.tools.evaluate.inference import InferenceModel, open_model
from torchtitan.tools.evaluate.sampling import Sampling
from torchtitan.tools.evaluate.scoring import Score, Window, score_texts, windows
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject

CONTEXT = [256, *b"The quick brown fox"]
TEXTS = [[*b" jumps over the lazy dog"], [*b" is"], [*b"."], []]
GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", SPEC)


def checkpoint(folder: Path) -> Path:
    return small_weights.saved(folder / "ours", recipe={"model.tokenizer_path": None})


def logarithms(model: InferenceModel, tokens: list[int]) -> Tensor:
    """Of every token but the first, by one forward over all of them."""
    whole = model.logits(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    return whole.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_a_continuation_has_the_sum_of_its_tokens_in_the_whole(tmp_path: Path) -> None:
    subject = open_subject(ModelLocation(checkpoint(tmp_path)))
    with open_model(subject, 64, torch.float32) as model:
        found = score_texts(model, [(CONTEXT, text) for text in TEXTS], rows=3)
        for text, score in zip(TEXTS, found, strict=True):
            expected = logarithms(model, CONTEXT + text)[len(CONTEXT) - 1 :].sum()
            assert score.log_probability == pytest.approx(float(expected), abs=1e-4)


def test_a_text_after_its_begin_has_minus_the_loss_of_training(tmp_path: Path) -> None:
    with open_model(open_subject(ModelLocation(checkpoint(tmp_path))), 64, torch.float32) as model:
        text = [*b"any text"]
        [score] = score_texts(model, [([256], text)], rows=1)
        logits = model.logits(torch.tensor([[256, *text[:-1]]]))
        loss = cross_entropy(logits, torch.tensor([text]))
        assert score.log_probability == pytest.approx(-float(loss), rel=1e-6)


def test_the_likeliest_continuation_is_known_as_such(tmp_path: Path) -> None:
    with open_model(open_subject(ModelLocation(checkpoint(tmp_path))), 64, torch.float32) as model:
        tokens = list(CONTEXT)
        for _ in range(5):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
        likeliest = tokens[len(CONTEXT) :]
        other = [*likeliest[:-1], (likeliest[-1] + 1) % 256]
        found = score_texts(model, [(CONTEXT, likeliest), (CONTEXT, other)], rows=2)
        assert [score.is_likeliest for score in found] == [True, False]


def test_windows_are_those_of_the_harness() -> None:
    """The example in the docstring of its `LM.loglikelihood_rolling`, BOS as -1."""
    assert list(windows([-1], range(10), 4)) == [
        Window([-1, 0, 1, 2], [0, 1, 2, 3]),
        Window([3, 4, 5, 6], [4, 5, 6, 7]),
        Window([5, 6, 7, 8], [8, 9]),
    ]


def test_windows_count_each_token_once_and_fit() -> None:
    lengths, contexts, sizes = (1, 2, 5, 9, 10, 11, 12, 100), (1, 3, 20), (0, 1, 10, 11)
    for length, context, size in itertools.product(lengths, contexts, sizes):
        whole = list(range(context + size))
        found = list(windows(whole[:context], whole[context:], length))
        assert [target for window in found for target in window.targets] == whole[context:]
        for tokens, targets in found:
            assert len(targets) <= len(tokens) <= length
            assert tokens == list(range(targets[-1] - len(tokens), targets[-1]))  # all before
            assert len(tokens) == min(length, targets[-1])  # as far back as there is room


def test_a_text_in_windows_has_the_sum_over_them(tmp_path: Path) -> None:
    text = list(bytes(range(97, 122)))
    with open_model(open_subject(ModelLocation(checkpoint(tmp_path))), 7, torch.float32) as model:
        seen: list[tuple[int, int]] = []
        [score] = score_texts(
            model, [([256], text)], rows=2, after_batch=lambda *counts: seen.append(counts)
        )
        expected = sum(
            float(logarithms(model, [*tokens, targets[-1]])[-len(targets) :].sum())
            for tokens, targets in windows([256], text, 7)
        )
    assert score.log_probability == pytest.approx(expected, abs=1e-4)
    assert seen == [(2, 4), (2, 4)]


def test_uniform_model_has_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    with open_model(open_subject(ModelLocation(checkpoint(tmp_path))), 64, torch.float32) as model:
        for parameter in model.network.parameters():
            parameter.zero_()
        [score] = score_texts(model, [([256], TEXTS[0])], rows=1)
    assert score.log_probability == pytest.approx(-len(TEXTS[0]) * math.log(300), rel=1e-6)


# --- what the harness asks ---


def asked(path: Path) -> tuple[list[Score], list[str]] | None:
    """Rank 0 is asked; the others compute along."""
    with open_model(open_subject(ModelLocation(path)), 64, torch.float32) as model:
        together = CollectiveModel(model, rows=2)
        if model.world.rank:
            together.follow()
            return None
        with together.leading():
            scores = together.score([(CONTEXT, text) for text in TEXTS])
            requests = [
                HarnessRequest(CONTEXT, ("e", "a"), 8, GREEDY),
                HarnessRequest([256], (), 8, GREEDY),
            ]
            return scores, together.generate(requests, 0)


def test_all_ranks_compute_what_the_first_is_asked(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    [one] = run_ranks(asked, 1, path)
    two, nothing = run_ranks(asked, 2, path)
    assert nothing is None
    assert one is not None
    assert two is not None
    assert two[1] == one[1]
    for here, there in zip(two[0], one[0], strict=True):
        assert here.log_probability == pytest.approx(there.log_probability, abs=1e-4)


def test_a_text_ends_before_the_first_of_what_it_is_to_end_at() -> None:
    assert before("a b c", ["c", " b"]) == "a"
    assert before("a b c", ["x", "y"]) == "a b c"
    assert before("a b c", []) == "a b c"
    assert before("", ["x"]) == ""


def test_what_a_task_wants(tmp_path: Path) -> None:
    with open_model(open_subject(ModelLocation(checkpoint(tmp_path))), 30, torch.float32) as model:
        context = list(range(50))
        said = {"until": "\n", "max_gen_toks": 10, "temperature": 0.5}
        request = read_request(model, context, said)
        assert request == HarnessRequest(
            context[-20:], ("\n",), 10, GREEDY
        )  # do_sample is not said
        request = read_request(model, [1], said | {"do_sample": True, "top_k": 5})
        assert request.how == Sampling(0.5, 5, 1.0)
        with pytest.raises(ConfigError, match="a task generates 256 tokens after a text; use 512"):
            read_request(model, [1], {})
        with pytest.raises(ConfigError, match="a task sets num_beams, which is not supported"):
            read_request(model, [1], {"num_beams": 4})


def test_results_as_a_table() -> None:
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.25, "sample_len": 4}
    found = {"results": {"task": values, "b": {"bits_per_byte,none": 9.2, "x,strict": 1.0}}}
    assert as_table(found).splitlines() == [
        "task  acc            0.5000  ± 0.2500",
        "b     bits_per_byte  9.2000",
        "b     x (strict)     1.0000",
    ]


def test_without_the_harness_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["evaluate", str(tmp_path), "--tasks", "hellaswag"]) == 2
    message = 'error: lm-evaluation-harness is not installed: pip install "lm_eval>=0.4.13,<0.5"\n'
    assert capsys.readouterr().err == message

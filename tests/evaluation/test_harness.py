"""The adapter under the harness itself, on tasks in local files."""

import json
from pathlib import Path

import pytest
import torch

from tests import small_weights
from tests.small_weights import SPEC
from torchtitan.losses import cross_entropy
from torchtitan.models import MODELS
from torchtitan.tools import cli
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject

pytest.importorskip("lm_eval")

TEXTS = ["def add(a, b):\n    return a + b\n", "Größe 🙂, a longer text"]
TASKS = {
    "whole_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" one", " two"]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "continuations": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.filterwarnings("default")  # the harness and what it needs warn of their own affairs
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_per_byte_are_those_of_our_loss(
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(MODELS, "small", SPEC)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, about in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {file}}}\ntest_split: train\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{source}{about}")
    path = small_weights.saved(tmp_path / "ours", recipe={"model.tokenizer_path": None})

    words = [str(path), "--tasks", ",".join(TASKS), "--include-path", str(tmp_path), "--json"]
    assert cli.main(["evaluate", *words, "--tensor-parallel", str(ranks)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found.keys() == TASKS.keys()
    assert found["continuations"]["exact_match,none"] == 0.0

    assert cli.main(["evaluate", *words, "--tensor-parallel", str(ranks), "--length", "5"]) == 2
    assert "--length: got 5, but a task wants 5 tokens" in capfd.readouterr().err
    if ranks == 1:
        assert cli.main(["evaluate", str(path), "--tasks", "choice"]) == 2
        assert "--tasks: got choice; the harness has no such task" in capfd.readouterr().err

    nats = 0.0
    with open_model(open_subject(ModelLocation(path)), 64, torch.float32) as model:
        for text in TEXTS:
            tokens = [256, *text.encode()]
            logits = model.logits(torch.tensor([tokens[:-1]]))
            nats += float(cross_entropy(logits, torch.tensor([tokens[1:]])))
    bits = nats / sum(len(text.encode()) for text in TEXTS) / torch.tensor(2.0).log().item()
    assert found["whole_texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)

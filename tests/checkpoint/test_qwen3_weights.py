"""Weights of Qwen3 to Hugging Face's format and back, with the command and with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_weights import content, run, same
from tests.unit.data.test_tokenizer import like_qwen
from torchtitan.checkpoint.storage import write_tensors
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.initialize import initialize
from torchtitan.models.qwen3.settings import Qwen3Config
from torchtitan.tools.cli import main

SEQ_LEN = 64
SIZES = {
    "dim": 48,  # 8 heads of 16, so heads are together wider than the residual stream
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 96,
    "vocab_size": 320,
}


def network(tied: bool) -> Any:
    spec = MODELS["qwen3"]
    args = spec.args(Qwen3Config(name="qwen3", **SIZES, tied=tied))
    model = spec.build(args, SEQ_LEN)
    initialize(model.named_parameters(), lambda name: 1.0 if "norm" in name else 0.1, seed=0)
    return model


def saved(folder: Path, tied: bool, **recipe: Any) -> Path:
    """A checkpoint of a run of Qwen3 with these sizes."""
    folder.mkdir()
    recipe |= {f"model.{key}": value for key, value in SIZES.items()}
    recipe |= {"model.name": "qwen3", "model.flavor": "debugmodel", "model.tied": tied}
    recipe |= {"training.seq_len": SEQ_LEN}
    weights = network(tied).state_dict().items()
    write_tensors(folder, ((f"model.{n}", w) for n, w in weights), {"recipe": recipe}, 10**9)
    return folder


def convert(source: Path, destination: Path) -> Path:
    assert main(["checkpoint", "convert", str(source), str(destination)]) == 0
    return destination


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (2, SEQ_LEN), generator=generator)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back_and_with_transformers_in_between(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    library = like_qwen(tokenizer, bos_token=None, eos_token="<|endoftext|>")
    source = saved(tmp_path / "ours", tied, **{"model.tokenizer_path": str(tokenizer)})
    folder = convert(source, tmp_path / "hf")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (not tied)
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 270)
    assert config["head_dim"] == 16

    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, Qwen3ForCausalLM)
    assert not any(report.values())
    with torch.no_grad():
        logits = network(tied)(tokens())
        torch.testing.assert_close(theirs(tokens()).logits, logits, atol=1e-5, rtol=0)
    text = "<|im_start|>the cat<|im_end|>"
    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    assert ids == library.encode(text).ids

    theirs.save_pretrained(tmp_path / "theirs")  # in transformers' own form of config.json
    for other in (folder, tmp_path / "theirs"):
        back = convert(other, tmp_path / f"{other.name}-back")
        assert same(content(back), content(source))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.k_norm.weight", None),
        ("model.embed_tokens.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(128)),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(128)),
    ],
    ids=["norm missing", "embedding missing", "bias unused", "norm of all heads"],
)
def test_missing_and_unused_tensors_are_refused(
    name: str, change: torch.Tensor | None, tied: bool, tmp_path: Path
) -> None:
    folder = run(saved(tmp_path / "ours", tied), tmp_path / "hf")
    tensors = load_file(path := folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if change is None else tensors | {name: change}, path)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        run(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_meta_has_no_such_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "ours", tied=False)
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "new"), "--to", "meta"]) == 2
    assert capsys.readouterr().err == (
        "error: qwen3 has no weight format meta; its formats: ours, dcp, hf\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_dcp_is_for_pytorch_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run(saved(tmp_path / "ours", tied=False), tmp_path / "dcp", target_format="dcp")
    assert "TorchTitan cannot: model.name: TorchTitan's Llama has no norms in heads" in caplog.text
    recipe = {f"model.{key}": value for key, value in SIZES.items()}
    recipe |= {"model.name": "qwen3", "model.flavor": "debugmodel", "model.tied": False}
    with pytest.raises(ConfigError, match=r"the order of the rows of queries and keys .* unknown"):
        run(folder, tmp_path / "new", recipe=recipe)

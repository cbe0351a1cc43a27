"""Weights of GPT-OSS to Hugging Face's format and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_expert_weights import MLP, changed
from tests.small_weights import SEQ_LEN, content, run, same, write_run
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.gpt_oss.settings import GptOssConfig
from torchtitan.models.initialize import initialize

SIZES = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 16,
    "n_experts": 11,
    "top_k": 3,
    "expert_dim": 40,
    "vocab_size": 320,
    "sliding_window": 9,
    "swiglu_limit": 0.05,
    "rope_scaling": 4.0,
    "rope_original_context": 16,
}


def network() -> Any:
    spec = MODELS["gpt_oss"]
    model = spec.build(spec.args(GptOssConfig(name="gpt_oss", **SIZES)), SEQ_LEN)
    initialize(model.named_parameters(), lambda name: 1.0 if "norm" in name else 0.1, seed=0)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run with these sizes."""
    return write_run(tmp_path_factory.mktemp("ours") / "step-1", "gpt_oss", SIZES, network())


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("hf") / "hf")


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
def test_there_and_back_and_with_transformers_in_between(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, GptOssForCausalLM

    tensors, ours = load_file(folder / "model.safetensors"), network()
    experts = ours.layers["1"].mixture.experts
    assert torch.equal(tensors[f"{MLP}.experts.gate_up_proj"][..., 1::2], experts.w3.mT)
    assert torch.equal(tensors[f"{MLP}.experts.gate_up_proj_bias"][..., ::2], experts.b1)
    assert torch.equal(tensors[f"{MLP}.experts.down_proj"], experts.w2.mT)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert isinstance(theirs, GptOssForCausalLM)
    assert not any(report.values())
    tokens = torch.randint(320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    for other in (folder, tmp_path / "theirs"):
        assert same(content(run(other, tmp_path / f"{other.name}-back")), content(source))


def test_a_rank_reads_its_block_of_the_experts(folder: Path) -> None:
    weights = HuggingFaceWeights(folder, [MODELS["gpt_oss"]])
    for name, whole in network().layers["1"].mixture.experts.named_parameters():
        ours = f"model.layers.1.mixture.experts.{name}"
        assert weights.shapes()[ours] == (torch.float32, tuple(whole.shape))
        block = weights.read(ours, (5, 8, 4)[: whole.ndim], (6, 5, 7)[: whole.ndim])
        assert torch.equal(block, whole[5:11, 8:13, 4:11] if whole.ndim == 3 else whole[5:11, 8:13])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MLP}.router.bias"), r"missing: .*mlp\.router\.bias"),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), r"missing: .*self_attn\.sinks"),
        (lambda t: t.pop(f"{MLP}.experts.gate_up_proj_bias"), r"missing: .*gate_up_proj_bias"),
        (
            lambda t: t.update({f"{MLP}.gate.weight": torch.zeros(11, 48)}),
            r"unexpected: .*mlp\.gate\.weight",
        ),
        (
            lambda t: t.update(
                {f"{MLP}.experts.down_proj": t[f"{MLP}.experts.down_proj"].mT.contiguous()}
            ),
            r"down_proj: has shape \(11, 48, 40\); wanted \(11, 40, 48\)",
        ),
        (
            lambda t: t.update(
                {f"{MLP}.experts.down_proj_blocks": torch.zeros(1, dtype=torch.uint8)}
            ),
            r"down_proj_blocks: weights in MXFP4 cannot be read; write a copy in bf16 with ",
        ),
    ],
    ids=["no bias", "no sinks", "no biases", "one more", "transposed", "in 4 bits"],
)
def test_tensors_of_another_kind_are_refused(
    change: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(changed(folder, tmp_path / "hf", change), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_config_of_weights_in_4_bits_is_refused(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "hf", lambda tensors: None)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"quantization_config: weights in MXFP4 .* a copy in bf16"
    ):
        run(other, tmp_path / "new")

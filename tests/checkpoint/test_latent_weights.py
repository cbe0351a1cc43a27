"""Weights of latent attention and of balanced routers to Hugging Face's format and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_expert_weights import MLP, changed, fuse
from tests.small_weights import SEQ_LEN, content, run, same, write_run
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.deepseek_v3.settings import DeepSeekV3Config
from torchtitan.models.experts import Router
from torchtitan.models.initialize import initialize

SIZES = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "query_rank": 28,
    "latent_rank": 20,
    "plain_dim": 12,
    "rotated_dim": 8,
    "value_dim": 10,
    "ffn_dim": 96,
    "n_experts": 12,
    "top_k": 3,
    "expert_dim": 40,
    "shared_dim": 80,
    "expert_groups": 4,
    "vocab_size": 320,
    "dense_layers": 1,
    "rope_scaling": 4.0,
    "rope_original_context": 16,
}
ATTENTION = "model.layers.1.self_attn"


def network(query_rank: int) -> Any:
    spec = MODELS["deepseek_v3"]
    config = DeepSeekV3Config.model_validate({**SIZES, "query_rank": query_rank})
    model = spec.build(spec.args(config.model_copy(update={"name": "deepseek_v3"})), SEQ_LEN)
    initialize(model.named_parameters(), lambda name: 1.0 if "norm" in name else 0.1, seed=0)
    for module in model.modules():
        if isinstance(module, Router):
            assert module.bias is not None
            module.bias.copy_(torch.linspace(-0.5, 0.5, 12).roll(5))
    return model


@pytest.fixture(scope="module", params=[28, 0], ids=["as in 671B", "as in 16B"])
def query_rank(request: pytest.FixtureRequest) -> int:
    rank: int = request.param
    return rank


@pytest.fixture(scope="module")
def source(query_rank: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run with these sizes."""
    folder, sizes = tmp_path_factory.mktemp("ours") / "step-1", SIZES | {"query_rank": query_rank}
    return write_run(folder, "deepseek_v3", sizes, network(query_rank))


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("hf") / "hf")


def fuse_all(tensors: dict[str, torch.Tensor]) -> None:
    fuse(tensors, experts=12)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
def test_there_and_back_and_with_transformers_in_between(
    query_rank: int, source: Path, folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

    tensors, ours = load_file(folder / "model.safetensors"), network(query_rank)
    assert (f"{ATTENTION}.q_proj.weight" in tensors) == (query_rank == 0)
    bias = tensors[f"{MLP}.gate.e_score_correction_bias"]
    assert torch.equal(bias, ours.layers["1"].mixture.router.bias)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, DeepseekV3ForCausalLM)
    assert not any(report.values())
    tokens = torch.randint(320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    fused = changed(folder, tmp_path / "fused", fuse_all)
    for other in (folder, tmp_path / "theirs", fused):
        assert same(content(run(other, tmp_path / f"{other.name}-back")), content(source))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MLP}.gate.e_score_correction_bias"), r"missing: .*correction_bias"),
        (lambda t: t.pop(f"{ATTENTION}.kv_b_proj.weight"), r"missing: .*kv_b_proj"),
        (lambda t: t.pop(f"{MLP}.shared_experts.up_proj.weight"), r"missing: .*shared_experts"),
        (
            lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(48, 96)}),
            r"unexpected: .*layers\.2\.eh_proj",
        ),
    ],
    ids=["no bias", "no keys and values", "no shared expert", "multi-token prediction"],
)
def test_missing_and_unused_tensors_are_refused(
    change: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(changed(folder, tmp_path / "hf", change), tmp_path / "new")
    assert not (tmp_path / "new").exists()

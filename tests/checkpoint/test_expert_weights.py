"""Weights of experts to Hugging Face's format and back: a tensor an expert, or fused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_weights import SEQ_LEN, content, run, same, write_run
from torchtitan.checkpoint.folder import look_at, read_state
from torchtitan.checkpoint.storage import SavedTensors, Sizes, StoredBlock, assemble, write_tensors
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.initialize import initialize
from torchtitan.models.qwen3_moe.settings import Qwen3MoeConfig
from torchtitan.tools.checkpoint.inspection import verify

SIZES = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 96,
    "n_experts": 11,
    "top_k": 3,
    "expert_dim": 40,
    "vocab_size": 320,
    "dense_layers": 1,
}
MLP = "model.layers.1.mlp"


def network() -> Any:
    spec = MODELS["qwen3_moe"]
    model = spec.build(spec.args(Qwen3MoeConfig(name="qwen3_moe", **SIZES)), SEQ_LEN)
    initialize(model.named_parameters(), lambda name: 1.0 if "norm" in name else 0.1, seed=0)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ours(tmp_path_factory.mktemp("ours") / "step-1")


def write_ours(folder: Path) -> Path:
    """A checkpoint of a run with these sizes."""
    return write_run(folder, "qwen3_moe", SIZES, network())


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("hf") / "hf")


def changed(folder: Path, destination: Path, change: Any) -> Path:
    """A copy of Hugging Face's weights after a change of its tensors."""
    destination.mkdir()
    (destination / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, destination / "model.safetensors")
    return destination


def fuse(tensors: dict[str, torch.Tensor], keeps: bool = False, experts: int = 11) -> None:
    """Replace the tensors of experts as transformers 5 has them in memory."""
    take = tensors.get if keeps else tensors.pop
    gate, up, down = (
        torch.stack([take(f"{MLP}.experts.{e}.{kind}_proj.weight") for e in range(experts)])  # type: ignore[operator, misc]
        for kind in ("gate", "up", "down")
    )
    tensors[f"{MLP}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors[f"{MLP}.experts.down_proj"] = down


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
def test_there_and_back_and_with_transformers_in_between(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

    tensors = load_file(folder / "model.safetensors")
    assert tensors[f"{MLP}.experts.10.down_proj.weight"].shape == (48, 40)
    assert torch.equal(
        tensors[f"{MLP}.experts.2.up_proj.weight"], network().layers["1"].mixture.experts.w3[2]
    )
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, Qwen3MoeForCausalLM)
    assert not any(report.values())
    tokens = torch.randint(320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, network()(tokens), atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    fused = changed(folder, tmp_path / "fused", fuse)
    for other in (folder, tmp_path / "theirs", fused):
        assert same(content(run(other, tmp_path / f"{other.name}-back")), content(source))


@pytest.mark.parametrize("is_fused", [False, True], ids=["a tensor an expert", "fused"])
def test_a_rank_reads_its_block_of_the_experts(
    is_fused: bool, folder: Path, tmp_path: Path
) -> None:
    reads_a_block(changed(folder, tmp_path / "fused", fuse) if is_fused else folder)


def reads_a_block(folder: Path) -> None:
    """Of the experts, across the one with the number 9."""
    weights = HuggingFaceWeights(folder, [MODELS["qwen3_moe"]])
    experts = network().layers["1"].mixture.experts
    for name, whole in experts.named_parameters():
        ours = f"model.layers.1.mixture.experts.{name}"
        assert weights.shapes()[ours] == (torch.float32, tuple(whole.shape))
        block = weights.read(ours, (5, 8, 4), (6, 5, 7))
        assert torch.equal(block, whole[5:11, 8:13, 4:11]), f"{name}: experts are out of order"


def both(tensors: dict[str, torch.Tensor]) -> None:
    fuse(tensors, keeps=True)


def odd(tensors: dict[str, torch.Tensor]) -> None:
    fuse(tensors)
    name = f"{MLP}.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-1].contiguous()


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    fuse(tensors)
    name = f"{MLP}.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MLP}.experts.10.up_proj.weight"), r"missing: .*experts\.10\.up_proj"),
        (lambda t: t.pop(f"{MLP}.gate.weight"), r"missing: .*mlp\.gate\.weight"),
        (
            lambda t: t.update({f"{MLP}.experts.11.up_proj.weight": torch.zeros(40, 48)}),
            r"unexpected: .*experts\.11\.up_proj",
        ),
        (both, r"unexpected: .*experts\.gate_up_proj"),
        (odd, r"missing: .*experts\.0\.gate_proj"),
        (transposed, r"down_proj.weight: has shape \(40, 48\); wanted \(48, 40\)"),
    ],
    ids=["missing", "no router", "one more", "in both layouts", "odd", "transposed"],
)
def test_missing_unused_and_transposed_tensors_are_refused(
    change: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(changed(folder, tmp_path / "hf", change), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_expert_that_is_doubled_is_found(tmp_path: Path) -> None:
    """As where each of two ranks saved what it had as the experts 0 to 5: the loss is the same."""
    source = write_ours(tmp_path / "step-1")
    assert verify(source) == (True, [f"{source}: OK"])
    saved = SavedTensors(source)
    tensors = {name: saved.read(name).clone() for name in saved.shapes()}
    name = "model.layers.1.mixture.experts.w3"
    tensors[name][6:] = tensors[name][:5]
    doubled = tmp_path / "doubled"
    doubled.mkdir()
    write_tensors(doubled, tensors.items(), read_state(source, look_at(source)), 10**9)
    problem = f"{doubled}: {name} has expert 0 again as expert 6, so another is missing"
    assert verify(doubled) == (False, [problem])


def test_an_expert_that_is_missing_is_found() -> None:
    """No memory without values is taken for it."""
    whole = torch.arange(24.0).view(4, 3, 2)
    blocks = [StoredBlock((first, 0, 0), (1, 3, 2), first) for first in (0, 1, 3)]

    def read(block: StoredBlock[int], at: Sizes, sizes: Sizes) -> torch.Tensor:
        return whole[block.place : block.place + 1]

    kept = assemble(whole.dtype, (0, 0, 0), (2, 3, 2), blocks, read, "w1")
    assert torch.equal(kept, whole[:2])
    with pytest.raises(ConfigError, match="w1: damaged: 6 of 24 elements are in no file"):
        assemble(whole.dtype, (0, 0, 0), (4, 3, 2), blocks, read, "w1")

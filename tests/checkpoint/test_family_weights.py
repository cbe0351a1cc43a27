"""Weights of each family to Hugging Face's format and back, with transformers in between."""

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_weights import SEQ_LEN, content, run, same, write_run
from tests.tables import data, table
from tests.unit.data.test_tokenizer import like_qwen
from torchtitan.checkpoint.folder import read_state, read_verified_manifest
from torchtitan.checkpoint.storage import SavedTensors, StoredBlock, join_pieces, write_tensors
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.experts import Router
from torchtitan.models.spec import initialize
from torchtitan.tools.checkpoint import verify
from torchtitan.tools.cli import main

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


class Family(NamedTuple):
    """A family of models with small sizes, and its class in transformers."""

    name: str
    sizes: dict[str, Any]
    theirs: str

    def network(self):
        spec = MODELS[self.name]
        settings = spec.settings.model_validate({"name": self.name, **self.sizes})
        model = spec.build(spec.args(settings), SEQ_LEN)
        initialize(model.named_parameters(), lambda name: 1.0 if "norm" in name else 0.1, seed=0)
        for module in model.modules():
            if isinstance(module, Router) and module.bias is not None:
                module.bias.copy_(torch.linspace(-0.5, 0.5, len(module.bias)).roll(5))
        return model


FAMILIES = {name: Family(**given) for name, given in data(__file__).items()}
DENSE = ("Qwen3", "Qwen2", "Mistral", "OLMo 2", "Qwen3, tied", "Gemma 3")


class Made(NamedTuple):
    """A checkpoint of ours, and its conversion to Hugging Face's format."""

    ours: Path
    hf: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @cache
    def of(name):
        folder, family = tmp_path_factory.mktemp("made"), FAMILIES[name]
        ours = write_run(folder / "step-1", family.name, family.sizes, family.network())
        return Made(ours, run(ours, folder / "hf"))

    return of


def changed(folder, destination, change):
    """A copy of Hugging Face's weights after a change of its tensors."""
    destination.mkdir()
    (destination / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, destination / "model.safetensors")
    return destination


def fuse(tensors, keeps=False, experts=11):
    """Replace the tensors of experts as transformers 5 has them in memory."""
    take = tensors.get if keeps else tensors.pop
    gate, up, down = (
        torch.stack([take(f"{MLP}.experts.{e}.{kind}_proj.weight") for e in range(experts)])
        for kind in ("gate", "up", "down")
    )
    tensors[f"{MLP}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors[f"{MLP}.experts.down_proj"] = down


FUSED = {"Qwen3-MoE": 11, "DeepSeek-V3 671B": 12, "DeepSeek-V3 16B": 12}
"""Families whose experts are a tensor each, and the number of these."""


def are_the_tensors(name, tensors, ours):
    """What the names of a family mean."""
    if name in DENSE:
        assert ("lm_head.weight" in tensors) == (not FAMILIES[name].sizes.get("tied", False))
        return
    mixture = ours.layers["1"].mixture
    if name == "Qwen3-MoE":
        assert tensors[f"{MLP}.experts.10.down_proj.weight"].shape == (48, 40)
        assert torch.equal(tensors[f"{MLP}.experts.2.up_proj.weight"], mixture.experts.w3[2])
    elif name == "Mixtral":
        mixed = "model.layers.1.block_sparse_moe"
        assert torch.equal(tensors[f"{mixed}.gate.weight"], mixture.router.weight)
        assert torch.equal(tensors[f"{mixed}.experts.10.w2.weight"], mixture.experts.w2[10])
    elif name == "GPT-OSS":
        gate_up = tensors[f"{MLP}.experts.gate_up_proj"]
        assert torch.equal(gate_up[..., 1::2], mixture.experts.w3.mT)
        biases = tensors[f"{MLP}.experts.gate_up_proj_bias"]
        assert torch.equal(biases[..., ::2], mixture.experts.b1)
        assert torch.equal(tensors[f"{MLP}.experts.down_proj"], mixture.experts.w2.mT)
    else:
        assert (f"{ATTENTION}.q_proj.weight" in tensors) == name.endswith("16B")
        assert torch.equal(tensors[f"{MLP}.gate.e_score_correction_bias"], mixture.router.bias)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_and_with_transformers_in_between(name, made, tmp_path):
    import transformers

    (source, folder), ours = made(name), FAMILIES[name].network()
    are_the_tensors(name, load_file(folder / "model.safetensors"), ours)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert isinstance(theirs, getattr(transformers, FAMILIES[name].theirs))
    assert not any(report.values())
    tokens = torch.randint(320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")  # in transformers' own form of config.json
    others = [folder, tmp_path / "theirs"]
    if name in FUSED:
        fused = partial(fuse, experts=FUSED[name])
        others.append(changed(folder, tmp_path / "fused", fused))
    for other in others:
        assert same(content(run(other, tmp_path / f"{other.name}-back")), content(source))


@pytest.mark.filterwarnings("default")
def test_the_text_of_a_gemma_3_that_sees_is_copied_as_the_page_says(tmp_path, monkeypatch):
    import transformers

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    own = {"vocab_size": 320, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}
    tower = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=sizes | own, vision_config=sizes | tower)
    seeing = transformers.Gemma3ForConditionalGeneration(config)
    seeing.save_pretrained("gemma-3-4b-pt")
    with pytest.raises(ConfigError, match=r"a vision tower; docs/weights\.md"):
        run(Path("gemma-3-4b-pt"), tmp_path / "new")
    page = (Path(__file__).parents[2] / "docs/weights.md").read_text()
    (lines,) = re.findall(r"```text\n(whole = .*?)```", page, re.DOTALL)
    exec(lines, {"transformers": transformers})
    saved = SavedTensors(run(Path("gemma-3-4b-text"), tmp_path / "ours"))
    expected = seeing.model.language_model.layers[1].mlp.up_proj.weight
    assert torch.equal(saved.read("model.layers.1.feed_forward.w3.weight"), expected)


def both(tensors):
    fuse(tensors, keeps=True)


def odd(tensors):
    fuse(tensors)
    name = f"{MLP}.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-1].contiguous()


def transposed(tensors):
    fuse(tensors)
    name = f"{MLP}.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()


def without(tensors, name):
    del tensors[name]


def adding(tensors, name, *shape):
    tensors[name] = torch.zeros([int(size) for size in shape])


def change_of(words):
    """The change of tensors that a row of `bad_weights.txt` names."""
    kind, *rest = words.split()
    change = {each.__name__: each for each in (both, odd, transposed, without, adding)}[kind]
    return lambda tensors: change(tensors, *rest)


@pytest.mark.parametrize(("name", "change", "message"), table(__file__, "bad_weights.txt"))
def test_missing_unused_and_transposed_tensors_are_refused(name, change, message, made, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(changed(made(name).hf, tmp_path / "hf", change_of(change)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "is_fused"), [("Qwen3-MoE", False), ("Qwen3-MoE", True), ("GPT-OSS", False)]
)
def test_a_rank_reads_its_block_of_the_experts(name, is_fused, made, tmp_path):
    """Across the expert with the number 9."""
    folder = made(name).hf
    if is_fused:
        folder = changed(folder, tmp_path / "fused", fuse)
    weights = HuggingFaceWeights(folder, [MODELS[FAMILIES[name].name]])
    for kind, whole in FAMILIES[name].network().layers["1"].mixture.experts.named_parameters():
        ours = f"model.layers.1.mixture.experts.{kind}"
        assert weights.shapes()[ours] == (torch.float32, tuple(whole.shape))
        block = weights.read(ours, (5, 8, 4)[: whole.ndim], (6, 5, 7)[: whole.ndim])
        part = (slice(5, 11), slice(8, 13), slice(4, 11))[: whole.ndim]
        assert torch.equal(block, whole[part]), f"{kind}: experts are out of order"


def test_a_config_of_weights_in_4_bits_is_refused(made, tmp_path):
    other = changed(made("GPT-OSS").hf, tmp_path / "hf", lambda tensors: None)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"quantization_config: weights in MXFP4 .* copy in bf16"):
        run(other, tmp_path / "new")


def test_an_expert_that_is_doubled_is_found(made, tmp_path):
    """As where each of two ranks saved what it had as the experts 0 to 5: the loss is the same."""
    source = made("Qwen3-MoE").ours
    assert verify(source) == (True, [f"{source}: OK"])
    saved = SavedTensors(source)
    tensors = {name: saved.read(name).clone() for name in saved.shapes()}
    name = "model.layers.1.mixture.experts.w3"
    tensors[name][6:] = tensors[name][:5]
    doubled = tmp_path / "doubled"
    doubled.mkdir()
    write_tensors(
        doubled, tensors.items(), read_state(source, read_verified_manifest(source)), 10**9
    )
    problem = f"{doubled}: {name} has expert 0 again as expert 6, so another is missing"
    assert verify(doubled) == (False, [problem])


def test_an_expert_that_is_missing_is_found():
    """No memory without values is taken for it."""
    whole = torch.arange(24.0).view(4, 3, 2)
    blocks = [StoredBlock((first, 0, 0), (1, 3, 2), first) for first in (0, 1, 3)]

    def read(block, at, sizes):
        return whole[block.place : block.place + 1]

    kept = join_pieces(whole.dtype, (0, 0, 0), (2, 3, 2), blocks, read, "w1")
    assert torch.equal(kept, whole[:2])
    with pytest.raises(ConfigError, match="w1: damaged: 6 of 24 elements are in no file"):
        join_pieces(whole.dtype, (0, 0, 0), (4, 3, 2), blocks, read, "w1")


@pytest.mark.filterwarnings("default")
def test_the_tokenizer_and_the_config_go_along(tmp_path):
    from transformers import AutoTokenizer

    tokenizer, family = tmp_path / "tokenizer", FAMILIES["Qwen3"]
    tokenizer.mkdir()
    library = like_qwen(tokenizer, bos_token=None, eos_token="<|endoftext|>")
    sizes = {**family.sizes, "tokenizer_path": str(tokenizer)}
    source = write_run(tmp_path / "ours", family.name, sizes, family.network())
    folder = tmp_path / "hf"
    assert main(["checkpoint", "convert", str(source), str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 270)
    assert config["head_dim"] == 16
    text = "<|im_start|>the cat<|im_end|>"
    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    assert ids == library.encode(text).ids


def test_meta_has_no_such_network(made, tmp_path, says):
    words = ["checkpoint", "convert", str(made("Qwen3").ours), str(tmp_path / "new")]
    assert says(*words, "--to", "meta", status=2) == (
        "error: qwen3 has no weight format meta; its formats: ours, dcp, hf\n"
    )
    assert not any(tmp_path.iterdir())


def test_dcp_is_for_pytorch_alone(made, tmp_path, caplog):
    folder = run(made("Qwen3").ours, tmp_path / "dcp", target_format="dcp")
    assert "TorchTitan cannot: model.name: TorchTitan's Llama has no norms in heads" in caplog.text
    recipe = {f"model.{key}": value for key, value in FAMILIES["Qwen3"].sizes.items()}
    recipe |= {"model.name": "qwen3", "model.flavor": "debugmodel"}
    with pytest.raises(ConfigError, match=r"the order of the rows of queries and keys .* unknown"):
        run(folder, tmp_path / "new", recipe=recipe)

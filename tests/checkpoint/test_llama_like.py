"""Llama's network in other sizes: from transformers, through a run, and back to transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtitan.data import train_bpe
from torchtitan.tools.cli import main

SIZES = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64}
SIZES |= {"initializer_range": 0.1}
CASES = {
    "llama": {"model_type": "llama"},
    "smollm": {"model_type": "llama", "tie_word_embeddings": True},
    "wide": {"model_type": "llama", "head_dim": 16, "num_key_value_heads": 6},
    "mistral": {"model_type": "mistral", "sliding_window": 10},
    "nemo": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
}
TOKENS = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("default")  # what transformers deprecates is its concern


def model_of(case):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(case))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | CASES[case])).eval()


def folder_of(path, case="mistral", **changes):
    """A folder as transformers saves it, with changes of its config."""
    model_of(case).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def convert(source, destination, *words):
    assert main(["checkpoint", "convert", str(source), str(destination), *words]) == 0
    return destination


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_there_and_back(case, tmp_path):
    from transformers import AutoModelForCausalLM

    from torchtitan.tools.inference import InferenceModel, ModelLocation, find_model

    ours = convert(folder_of(tmp_path / "hf", case), tmp_path / "ours", "--from", "hf")
    with torch.no_grad():
        expected = model_of(case)(TOKENS).logits
    stored = find_model(ModelLocation(ours, tokenizer="bytes"))
    model = InferenceModel(stored, 48, torch.float32)
    torch.testing.assert_close(model.logits(TOKENS), expected, atol=1e-5, rtol=0)
    back = convert(ours, tmp_path / "back")
    theirs, report = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(report.values())
    kind = CASES[case]["model_type"].capitalize()
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=0)


def test_window_matters():
    """Or the comparison above would not see it."""
    model = model_of("mistral")
    with torch.no_grad():
        windowed = model(TOKENS).logits
        model.config.sliding_window = None
        assert (model(TOKENS).logits - windowed).abs().max() > 1e-2


def test_a_recipe_with_the_section_trains_from_the_weights(tmp_path, capsys, monkeypatch):
    source = folder_of(tmp_path / "hf")
    train_bpe(["a text of some words\n" * 9], 280, source / "tokenizer.json")
    ours = convert(source, tmp_path / "ours")
    section = (ours / "model_section.toml").read_text()
    assert capsys.readouterr().out == section
    expected = Path(__file__).with_name("model_section.toml").read_text()
    assert section == expected.replace("SOURCE", str(source))
    assert main(["checkpoint", "verify", str(ours)]) == 0
    text = tmp_path / "texts.txt"
    text.write_text("a text of some words, and of other words too\n" * 200)
    shutil.copy(Path(__file__).with_name("from_weights.toml"), tmp_path)
    for name, path in (("checkpoint", ours), ("folder", source)):
        words = [f"--job.dump_folder={tmp_path / name}", f"--data.dataset={text}"]
        words += [f"--checkpoint.initial_load_path={path}"]
        assert main(["train", str(tmp_path / "from_weights.toml"), *words]) == 0
        exported = load_file(tmp_path / name / "checkpoint/step-1-hf/model.safetensors")
        wanted = load_file(source / "model.safetensors")
        assert exported.keys() == wanted.keys()
        assert all(torch.equal(exported[key], wanted[key]) for key in wanted)


def test_without_a_tokenizer_the_section_says_so(tmp_path):
    ours = convert(folder_of(tmp_path / "hf"), tmp_path / "ours")
    last = (ours / "model_section.toml").read_text().splitlines()[-1]
    assert last.startswith("# tokenizer_path: there was none next to the weights")


def test_only_weights_from_elsewhere_have_a_section(tmp_path, capsys):
    ours = convert(folder_of(tmp_path / "hf"), tmp_path / "ours")
    capsys.readouterr()
    back = convert(ours, tmp_path / "back", "--to", "hf")
    assert not (back / "model_section.toml").exists()
    assert capsys.readouterr().out == ""


# --- what cannot be ---


def refused(capsys, source):
    """What is said of a folder, without its name; nothing is written."""
    new = source.with_name("new")
    capsys.readouterr()
    assert main(["checkpoint", "convert", str(source), str(new), "--from", "hf"]) == 2
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.replace(str(source), "HERE").splitlines()


BAD_CONFIGS = Path(__file__).with_name("bad_configs.txt").read_text().strip().split("\n\n")[1:]


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_folder_that_cannot_be_taken_is_refused_in_words(case, tmp_path, capsys):
    changes, *told = case.split("\n> ")
    assert refused(capsys, folder_of(tmp_path / "hf", **json.loads(changes))) == told


def test_a_config_that_is_no_object_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "hf")
    (folder / "config.json").write_text("[]")
    assert refused(capsys, folder) == ["error: HERE/config.json: not a JSON object"]
    (folder / "config.json").write_text("{}")
    (first, *_) = refused(capsys, folder)
    assert first == "error: HERE/config.json: architectures: got nothing"


def test_an_empty_file_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "hf")
    (folder / "model.safetensors").write_bytes(b"")
    (told,) = refused(capsys, folder)
    assert told == (
        "error: HERE/model.safetensors: not a complete safetensors file: cut: it has 0 bytes; it "
        "ends in its header"
    )


def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path, capsys):
    folder = folder_of(tmp_path / "hf")
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["lm_head.weight"] = torch.zeros(301, 48)
    save_file(tensors, folder / "model.safetensors")
    assert refused(capsys, folder) == [
        "error: HERE: not the weights of a mistral:",
        "  missing: model.norm.weight",
        "  unexpected: model.layers.0.self_attn.q_proj.bias",
        "  lm_head.weight: has shape (301, 48); wanted (300, 48)",
    ]

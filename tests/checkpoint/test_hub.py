"""Repositories of the Hugging Face hub, from a server of its protocol and from its cache."""

import json
import tomllib
from collections import Counter

import pytest
from huggingface_hub import constants

from tests.hub_server import commit_of, serving
from tests.ranks import run_ranks
from torchtitan.config import ConfigError, hub
from torchtitan.data import load_tokenizer
from torchtitan.tools.cli import main
from torchtitan.trainer import main as train_main

TINY = [
    *("--model.dim=32", "--model.n_layers=1", "--model.n_heads=2", "--model.n_kv_heads=2"),
    *("--model.ffn_dim=32", "--training.seq_len=32", "--training.global_batch_size=2"),
    *("--training.local_batch_size=1", "--no-validation.enable", "--metrics.log_freq=1"),
    *("--no-data.report_unigram_loss", "--checkpoint.interval=1", "--data.num_workers=0"),
]


def use(monkeypatch, folder, url, *, offline=False, token=None):
    """Use a cache and a server of the hub, and nothing that was read before."""
    hub.folder.cache_clear()
    monkeypatch.delenv(hub.VARIABLE, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN", False)


def tokenizer():
    """A tokenizer of characters."""
    vocabulary = {chr(32 + n): n for n in range(95)} | {"<s>": 95}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"}
    splits = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    about = {"version": "1.0", "model": model, "pre_tokenizer": splits, "added_tokens": []}
    special = {"bos_token": "<s>", "eos_token": "<s>"}
    return {
        "tokenizer.json": json.dumps(about).encode(),
        "tokenizer_config.json": json.dumps(special).encode(),
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"weights",
    }


def test_a_repository_is_read_once_and_then_from_the_cache(tmp_path, monkeypatch):
    files = tokenizer()
    with serving({"org/tok": files}) as server:
        use(monkeypatch, tmp_path, server.url)
        folder = hub.folder("hf://org/tok", hub.TOKENIZER)
        assert {path.name for path in folder.iterdir()} == {
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert load_tokenizer("hf://org/tok").vocab_size == 96
        pinned = hub.pinned("hf://org/tok@main", hub.WEIGHTS)
        assert pinned == f"hf://org/tok@{commit_of(files)}"
        assert "pytorch_model.bin" not in {path.name for path in folder.iterdir()}
        got = Counter(path for verb, path in server.asked if "resolve" in path and verb == "GET")
        assert len(got) == 3
        assert set(got.values()) == {1}
        asked = len(server.asked)
        for name in (
            "hf://org/tok",
            pinned,
        ):  # as a rank, which has the environment of its launcher
            hub.folder.cache_clear()
            assert hub.folder(name, hub.WEIGHTS) == folder
        assert len(server.asked) == asked
        for wrong in ("hf://org/none", "hf://org/tok@gone"):
            with pytest.raises(ConfigError, match=f"^{wrong}: tried .* hf auth login$"):
                hub.folder(wrong, hub.WEIGHTS)
    for offline in (False, True):  # the server is gone
        use(monkeypatch, tmp_path, server.url, offline=offline)
        assert hub.pinned("hf://org/tok", hub.WEIGHTS) == pinned
        with pytest.raises(
            ConfigError,
            match=r"^hf://org/other: tried .*HF_HUB_OFFLINE"
            if offline
            else r"^hf://org/other: tried .*ConnectError",
        ):
            hub.folder("hf://org/other", hub.DATA)


@pytest.mark.costs("a run that is launched twice, then on two ranks")
def test_a_run_stays_at_the_commit_that_it_has_read(tmp_path, monkeypatch, capfd):
    files = tokenizer()
    texts = {"a.jsonl": b'{"text": "A document."}\n' * 9}
    words = ["debug_model", f"--job.dump_folder={tmp_path / 'run'}", *TINY]
    words += ["--model.tokenizer_path=hf://org/tok", "--data.dataset=hf://org/texts"]
    with serving({"org/tok": files, "org/texts": texts}) as server:
        use(monkeypatch, tmp_path / "hub", server.url)
        assert train_main(["--job.config_file", *words, "--training.steps=1"]) == 0
        first = commit_of(files)
        server.earlier.append(dict(files))
        server.repositories["org/tok"] = files | {"tokenizer_config.json": b"{}"}
        use(monkeypatch, tmp_path / "hub", server.url)
        assert run_ranks(train_main, 2, ["--job.config_file", *words, "--training.steps=2"]) == [
            0,
            0,
        ]
        recipe = tomllib.loads((tmp_path / "run/recipe.toml").read_text())
        assert recipe["model"]["tokenizer_path"] == f"hf://org/tok@{first}"
        assert recipe["data"]["dataset"] == f"hf://org/texts@{commit_of(texts)}"
        before = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        wrong = [word.replace("hf://org/tok", "hf://org/none") for word in words]
        assert train_main(wrong) == 2
        said = capfd.readouterr().err
        assert "error: --model.tokenizer_path: got hf://org/none: tried the files of" in said
        assert sorted(tmp_path.rglob("*")) == before


def test_converted_weights_are_pushed_and_read(tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    words = ["--job.config_file", "debug_model", f"--job.dump_folder={run}", *TINY]
    assert train_main([*words, "--training.steps=1"]) == 0
    with serving({}) as server:
        convert = ["checkpoint", "convert", str(run), str(tmp_path / "hf"), "--push"]
        use(monkeypatch, tmp_path / "hub", server.url, token="wrong")
        assert main([*convert, "hf://org/mine"]) == 2
        assert "tried to create org/mine" in capfd.readouterr().err
        assert not (tmp_path / "hf").exists()
        use(monkeypatch, tmp_path / "hub", server.url, token="right")
        assert main([*convert, "hf://org/mine"]) == 0
        assert "model.safetensors" in server.repositories["org/mine"]
        capfd.readouterr()
        assert main(["checkpoint", "convert", "hf://org/mine", str(tmp_path / "back")]) == 0
        main(["checkpoint", "diff", str(run), str(tmp_path / "back")])
        assert " tensors are equal, 0 differ in value" in capfd.readouterr().out
        assert main(["checkpoint", "convert", "hf://org/gone", str(tmp_path / "none")]) == 2
        assert "hf://org/gone: tried" in capfd.readouterr().err
        assert not (tmp_path / "none").exists()

"""The preparation of the real run's text, on packages made here; its loop written by hand."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.real_run import prepare
from benchmarks.real_run.by_hand import Llama
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.spec import build_empty, initialize

PROSE = "\n".join(f"Line {number} of a document that says what it is." for number in range(20))
OTHER = PROSE.replace("document", "manual")
FILES = {
    "short.py": b"x = 1\n",
    "long.py": b"word " * 50_000,
    "generated.py": f"# DO NOT EDIT\n{PROSE}".encode(),
    "wide.py": (PROSE + "word " * 300).encode(),
    "table.py": b"0x00, " * 100,
    "latin.py": b"\xe9" * 300,
    "kept.py": OTHER.encode(),
    "copy.py": OTHER.encode(),
    "leaked.py": PROSE.replace("Line 7", "Row 7").encode(),
    "notes.txt": PROSE.encode(),
}


def wheel():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        for name, content in FILES.items():
            files.writestr(name, content)
    return packed.getvalue()


def debian(folder):
    """A package with a source tree in an archive within it."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        header = tarfile.TarInfo("tree/main.c")
        header.size = len(PROSE)
        archive.addfile(header, io.BytesIO(PROSE.encode()))
    root = folder / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: tree\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: a\n"
    )
    (root / "tree.tar.xz").write_bytes(inner.getvalue())
    target = folder / "tree.deb"
    subprocess.run(["dpkg-deb", "--build", root, target], check=True, capture_output=True)
    return target.read_bytes()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Two packages, and what downloads them; `asked` has the names of those downloaded."""
    contents = {"small": wheel(), "tree": debian(tmp_path)}
    asked, run = [], subprocess.run

    def download(command, **options):
        if "download" not in command:
            return run(command, **options)
        name = next(name for name in contents if any(name in word for word in command))
        asked.append(name)
        if contents[name]:
            suffix = ".whl" if name == "small" else ".deb"
            (options["cwd"] / f"{name}{suffix}").write_bytes(contents[name])
        return SimpleNamespace(returncode=not contents[name], stderr="E: no such version")

    monkeypatch.setattr(prepare.subprocess, "run", download)
    packages = [
        package("small", "wheel", "python", "*.py", contents),
        package("tree", "deb", "c", "*.c", contents) | {"held_out": True},
    ]
    return SimpleNamespace(packages=packages, contents=contents, asked=asked)


def package(name, kind, source, files, contents):
    digest = hashlib.sha256(contents[name]).hexdigest()
    about = {"name": name, "version": "1", "kind": kind, "source": source, "files": [files]}
    return about | {"sha256": digest, "bytes": len(contents[name])}


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_text_is_prepared_once_and_each_removal_is_counted(tmp_path, registry):
    work = tmp_path / "work"
    for _ in range(2):
        prepare.prepare(work, registry.packages)
    assert registry.asked == ["tree", "small"]  # held-out packages come first; nothing comes twice
    report = json.loads((work / "text.json").read_text())
    assert report["tree"]["documents"] == report["small"]["documents"] == 1
    why = ("copy", "few letters", "generated", "long lines", "near copy", "not UTF-8")
    assert report["small"]["removed"] == dict.fromkeys((*why, "too long", "too short"), 1)
    kept = [
        json.loads(line) for line in (work / "text/train/python.jsonl").read_text().splitlines()
    ]
    assert kept == [{"text": OTHER, "package": "small", "file": "kept.py"}]
    held_out = json.loads((work / "text/held_out/c.jsonl").read_text())
    assert (held_out["text"], held_out["file"]) == (PROSE, "tree/main.c")


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_a_package_that_cannot_be_had_is_named(tmp_path, registry, monkeypatch, capsys):
    def refused():
        with pytest.raises(SystemExit) as stopped:
            prepare.prepare(tmp_path / "work", registry.packages)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    small = registry.contents["small"]
    registry.contents["small"] = b""
    assert "small 1 cannot be had: " in (said := refused())
    assert "no such version" in said
    registry.contents["small"] = small + b"more"
    assert f"sources.toml has {registry.packages[0]['sha256']}" in refused()
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert "has 0.0 GiB free" in refused()
    assert not (tmp_path / "work/text").exists()


def test_the_loop_by_hand_has_the_model_of_the_run():
    args = replace(LLAMA3.flavors["debugmodel"], tied=True, rope_scaling=None)
    ours = build_empty(LLAMA3.build, args, 32)
    ours.to_empty(device="cpu").init_buffers()
    initialize(ours.named_parameters(), partial(LLAMA3.init_std, args), 0)
    weights = {}
    for name, weight in ours.named_parameters():
        for part in ("attention.", "feed_forward."):
            name = name.replace(f".{part}", ".")
        name = name.replace("tok_embeddings", "embedding")
        if name.endswith(("wq.weight", "wk.weight")):  # pairs side by side; by hand, a half apart
            pairs = weight.unflatten(0, (-1, args.head_size // 2, 2))
            weight = pairs.transpose(1, 2).flatten(0, 2)
        weights[name.replace("layers", "blocks").replace("mlp_norm", "ffn_norm")] = weight
    by_hand = Llama(asdict(args) | {"seq_len": 32})
    by_hand.load_state_dict(weights, strict=False)
    assert {name for name, _ in by_hand.named_parameters()} == set(weights)
    tokens = torch.arange(64).view(2, 32)
    torch.testing.assert_close(by_hand(tokens), ours(tokens), rtol=1e-5, atol=1e-6)

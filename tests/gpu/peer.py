"""Stage 8: training beside TorchTitan 0.2.2: the same sizes, text, tokenizer and length, in turns.

It is installed from wheels into an environment of its own, without a network; what it needs beside
them is taken from here.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.gpu.planned import planned
from tests.ranks import free_port
from tests.runs import rows
from torchtitan.checks import load_job
from torchtitan.data.bpe import train_bpe

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "outputs/peer"
FETCH = "pip download --dest outputs/peer torchtitan==0.2.2"
TURNS = 2


class Run(NamedTuple):
    """What both train; their rates count from step `first` on."""

    flavor: str
    layers: int
    seq_len: int
    steps: int
    first: int
    freq: int
    vocabulary: int
    text: str
    """Pattern of the files of this project that are the text."""


LARGE = Run("8B", 4, 8192, 50, 35, 5, 8192, "torchtitan/**/*.py")
TOY = Run("debugmodel", 2, 64, 4, 2, 1, 300, "torchtitan/data/*.py")
OURS = {"bf16": [], "Float8": ["--convert.0.name", "float8", "--convert.0.emulate"]}
THEIRS = {"bf16": [], "Float8": ["--model.converters", "quantize.linear.float8"]}
SIZES = """\
from dataclasses import is_dataclass, replace
import torchtitan.models.llama3 as family
for sizes in vars(family).values():
    if isinstance(sizes, dict) and is_dataclass(sizes.get("{flavor}")):
        sizes["peer"] = replace(sizes["{flavor}"], n_layers={layers})
"""
ROW = re.compile(r"step:\s*(\d+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")


class Row(NamedTuple):
    """A row of a log."""

    step: int
    gib: float
    rate: float


def names(rehearsed):
    return [f"peer: {precision}" for precision in OURS]


def check(name, device, backend):
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not any("torchtitan-0.2.2-" in wheel for wheel in wheels):
        return {"left out": f"TorchTitan's wheel is not here; fetch it by {FETCH}"}
    if not find_spec("triton"):
        return {"left out": "TorchTitan imports triton, which torch for CPUs does not bring"}
    run, precision = LARGE if device.type == "cuda" else TOY, name.removeprefix("peer: ")
    found = {"ours": [], "theirs": []}
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_text(folder, run)
        python = install(wheels, folder)
        flags = [*flags_of_ours(folder, run, backend), *OURS[precision]]
        for turn in range(TURNS):
            found["ours"].append(ours(folder / f"ours{turn}", flags))
            found["theirs"].append(theirs(python, folder, run, precision))
        job = load_job(recipe(folder), flags, 1, device.type).config
    return compared(found, run.first) | planned(job, 1, 0, device)


def write_text(folder, run):
    """Write this project's text as a data set of both, and a tokenizer of it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(run.text))]
    (folder / "text").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text/train.jsonl").write_text(lines)
    train_bpe(texts, run.vocabulary, folder / "tokenizer/tokenizer.json")


def install(wheels, folder):
    """Install wheels into an environment of their own; return its Python."""
    venv.create(folder / "env", with_pip=False)
    place = next((folder / "env").glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    started([*pip, "--target", str(place), *wheels], folder)
    # What is not among them is found here, after them.
    here = [path for path in sys.path if path.endswith("-packages")]
    (place / "beside.pth").write_text("\n".join(here) + "\n")
    return str(folder / "env/bin/python")


def started(command, folder, **environment):
    """Run a program in `folder` without this project's modules; return what it says."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"status {done.returncode}:\n{said[-1500:]}"
    return said


def flags_of_both(run):
    settings = {
        "model.name": "llama3",
        "optimizer.lr": "3e-4",
        "lr_scheduler.warmup_steps": "2",
        "training.local_batch_size": "1",
        "training.seq_len": str(run.seq_len),
        "training.steps": str(run.steps),
        "metrics.log_freq": str(run.freq),
        "activation_checkpoint.mode": "none",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return [*words, "--compile.enable", "--metrics.disable_color_printing"]


def flags_of_ours(folder, run, backend):
    return [
        *(*flags_of_both(run), "--compile.backend", backend),
        *("--model.flavor", run.flavor, "--model.n_layers", str(run.layers)),
        *("--model.tokenizer_path", str(folder / "tokenizer")),
        *("--data.dataset", str(folder / "text")),
    ]


def recipe(folder):
    """Return an empty recipe, so that flags and defaults are all."""
    path = folder / "empty.toml"
    path.touch()
    return path


def ours(output, flags):
    """Return the rows of a run of this project."""
    command = [sys.executable, "-m", "torchtitan", "train", str(recipe(output.parent)), *flags]
    started([*command, "--job.dump_folder", str(output)], output.parent, PYTHONPATH=os.fspath(ROOT))
    return [Row(row["step"], row["memory_gib"], row["tps"]) for row in rows(output) if "tps" in row]


def theirs(python, folder, run, precision):
    """Return the rows of a run of TorchTitan."""
    (folder / "peer_sizes.py").write_text(SIZES.format(**run._asdict()))
    flags = [
        *("--model.flavor", "peer", "--experimental.custom_import", "peer_sizes"),
        *("--model.hf_assets_path", str(folder / "tokenizer")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(folder / "text")),
        *THEIRS[precision],
    ]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = [python, "-m", "torchtitan.train", *flags_of_both(run), *flags]
    said = started(command, folder, **alone, MASTER_PORT=str(free_port()))
    found = [Row(int(s), float(g), float(t.replace(",", ""))) for s, g, t in ROW.findall(said)]
    assert found, f"no row of its log was understood:\n{said[-1500:]}"
    return found


def compared(found, first):
    """Return the rates from step `first` on, and the ratios of all pairs of turns."""
    rates = {
        who: [statistics.median(row.rate for row in turn if row.step >= first) for turn in turns]
        for who, turns in found.items()
    }
    gib = {who: max(row.gib for turn in turns for row in turn) for who, turns in found.items()}
    ratios = [mine / other for mine in rates["ours"] for other in rates["theirs"]]
    return {
        "tokens/s": statistics.median(rates["ours"]),
        "tokens/s of TorchTitan": statistics.median(rates["theirs"]),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "GiB": gib["ours"],
        "GiB of TorchTitan": gib["theirs"],
    }

"""Stage 8: training beside TorchTitan 0.2.2: the same sizes, text, tokenizer and length, in turns.

It is installed from wheels into an environment of its own, without a network; what it needs beside
them is taken from here. To fetch them:

    pip download --dest outputs/peer torchtitan==0.2.2
"""

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
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


class Size(NamedTuple):
    """What both train, and the step from which rows of the log count."""

    flavor: str
    layers: int
    seq_len: int
    steps: int
    first: int
    freq: int
    vocabulary: int
    text: str
    """Pattern of the files of this project that are the text."""


LARGE = Size("8B", 4, 8192, 50, 35, 5, 8192, "torchtitan/**/*.py")
TOY = Size("debugmodel", 2, 64, 4, 2, 1, 300, "torchtitan/data/*.py")
SHARED = (
    *("--model.name", "llama3", "--optimizer.lr", "3e-4", "--lr_scheduler.warmup_steps", "2"),
    *("--training.local_batch_size", "1", "--activation_checkpoint.mode", "none"),
    *("--compile.enable", "--metrics.disable_color_printing"),
)
OURS = {"bf16": (), "Float8": ("--convert.0.name", "float8")}
THEIRS = {"bf16": (), "Float8": ("--model.converters", "quantize.linear.float8")}
SIZES = """\
from dataclasses import replace
from torchtitan.models.llama3 import llama3_args
llama3_args["peer"] = replace(llama3_args["{flavor}"], n_layers={layers})
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
    size = LARGE if device.type == "cuda" else TOY
    precision = name.removeprefix("peer: ")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_text(folder, size)
        python = install(wheels, folder)
        found = {"ours": [], "theirs": []}
        for turn in range(TURNS):
            found["ours"].append(ours(folder / f"ours{turn}", size, precision, device, backend))
            found["theirs"].append(theirs(folder, python, size, precision))
        plan = planned(job_of(folder, size, precision, device, backend), 1, 0, device)
    return compared(found, size.first) | plan


def write_text(folder, size):
    """Write this project's text as a data set of both, and a tokenizer of it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(size.text))]
    (folder / "text").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text/train.jsonl").write_text(lines)
    train_bpe(texts, size.vocabulary, folder / "tokenizer/tokenizer.json")


def install(wheels, folder):
    """Install wheels into an environment of their own; return its Python."""
    venv.create(folder / "env", with_pip=False)
    place = next((folder / "env").glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--target", str(place), *wheels], folder)
    # What is not among them is found here, after them.
    (place / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "env/bin/python")


def run(command, folder, **environment):
    """Run a program in `folder` without this project's modules; return what it says."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"status {done.returncode}:\n{said[-1500:]}"
    return said


def flags_of(size):
    numbers = {"seq_len": size.seq_len, "steps": size.steps}
    return (
        *(word for key, value in numbers.items() for word in (f"--training.{key}", str(value))),
        *("--metrics.log_freq", str(size.freq)),
    )


def flags_of_ours(folder, size, precision, backend):
    flavor = ("--model.flavor", size.flavor, "--model.n_layers", str(size.layers))
    data = ("--data.dataset", str(folder / "text"), "--compile.backend", backend)
    tokenizer = ("--model.tokenizer_path", str(folder / "tokenizer"))
    return (*SHARED, *flags_of(size), *flavor, *data, *tokenizer, *OURS[precision])


def recipe(folder):
    """An empty recipe, so that flags and defaults are all."""
    path = folder / "empty.toml"
    path.write_text("")
    return path


def job_of(folder, size, precision, device, backend):
    flags = flags_of_ours(folder, size, precision, backend)
    return load_job(recipe(folder), flags, 1, device.type).config


def ours(output, size, precision, device, backend):
    """Return the rows of a run of this project."""
    folder = output.parent
    emulate = ("--convert.0.emulate",) * (precision == "Float8" and device.type == "cpu")
    flags = (*flags_of_ours(folder, size, precision, backend), *emulate)
    command = [sys.executable, "-m", "torchtitan", "train", str(recipe(folder)), *flags]
    run([*command, "--job.dump_folder", str(output)], folder, PYTHONPATH=str(ROOT))
    return [Row(r["step"], r["memory_gib"], r["tps"]) for r in rows(output) if "tps" in r]


def theirs(folder, python, size, precision):
    """Return the rows of a run of TorchTitan."""
    (folder / "peer_sizes.py").write_text(SIZES.format(**size._asdict()))
    flags = (
        *("--model.flavor", "peer", "--experimental.custom_import", "peer_sizes"),
        *("--model.hf_assets_path", str(folder / "tokenizer")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(folder / "text")),
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = [python, "-m", "torchtitan.train", *SHARED, *flags_of(size), *flags]
    said = run([*command, *THEIRS[precision]], folder, **alone, MASTER_PORT=str(free_port()))
    found = [Row(int(s), float(g), float(t.replace(",", ""))) for s, g, t in ROW.findall(said)]
    assert found, f"no row of its log was understood:\n{said[-1500:]}"
    return found


def compared(found, first):
    """Return rates from step `first` on, the ratio of their medians and its spread over turns."""
    rates = {
        who: [[row.rate for row in turn if row.step >= first] for turn in turns]
        for who, turns in found.items()
    }
    middles = {who: [statistics.median(turn) for turn in turns] for who, turns in rates.items()}
    ratios = [mine / other for mine in middles["ours"] for other in middles["theirs"]]
    gib = {who: max(row.gib for turn in turns for row in turn) for who, turns in found.items()}
    return {
        "tokens/s": statistics.median(middles["ours"]),
        "tokens/s of TorchTitan": statistics.median(middles["theirs"]),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "GiB": gib["ours"],
        "GiB of TorchTitan": gib["theirs"],
    }

"""Held-out loss of a trained model whose attention is rounded to Float8 afterwards.

    python benchmarks/attention_held_out.py --docs torchtitan/research/hadamard_attention.md

Trains a smaller `train_configs/debug_model.toml` for a few steps, and scores held-out source files
with it as `torchtitan evaluate` does: in bfloat16, and with `low_precision_attention`, without a
rotation, and with rotated queries and keys, or values too. The same for two changes of
the last two channels of each head, which share the slowest rotary frequency: queries and keys both
scaled, which is another model with its own loss, and queries scaled and keys by the inverse, which
leaves their products as they were.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from quoted import quote, write_section

from torchtitan.convert import CONVERTERS
from torchtitan.data.documents import python_stdlib
from torchtitan.tools.evaluate import score_texts
from torchtitan.tools.inference import InferenceModel, ModelLocation, find_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "train_configs/debug_model.toml"
SMALLER = {
    "model.dim": 128,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.ffn_dim": 384,
    "training.seq_len": 128,
    "data.report_unigram_loss": "false",
}
PAGE = ROOT / "benchmarks/results/attention.md"
ROTATIONS = ("none", "qk", "qkv")
MODELS = {
    "as trained": (1, 1),
    "q and k x 8": (8, 8),
    "q and k x 32": (32, 32),
    "q x 32, k / 32": (32, 1 / 32),
}
"""Factors of two channels of each head of queries and of keys."""
DOCUMENTS, TOKENS = 24, 128


def train(folder: Path, steps: int) -> None:
    """Train the debug model."""
    flags = [f"--{key}={value}" for key, value in SMALLER.items()]
    flags += [f"--training.steps={steps}", "--no-validation.enable", f"--job.dump_folder={folder}"]
    command = [sys.executable, "-m", "torchtitan.train", RECIPE, *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@torch.no_grad()
def losses(run: Path, scales: tuple[float, float], rotation: str | None) -> list[float]:
    """Return the mean loss in nats of each document; with a `rotation`, in Float8."""
    made = CONVERTERS["low_precision_attention"].model_validate({"rotation": rotation or "none"})
    stored = find_model(ModelLocation(run, convert=(made,) if rotation else ()))
    documents = python_stdlib("validation", 2**16)
    count = len(documents)
    texts = [documents[number * count // DOCUMENTS] for number in range(DOCUMENTS)]
    tokens = [stored.tokenizer.encode(text)[:TOKENS] for text in texts]
    model = InferenceModel(stored, TOKENS, torch.bfloat16)
    for name, weight in model.network.state_dict().items():
        for matrix, times in zip((".wq.weight", ".wk.weight"), scales, strict=True):
            if name.endswith(matrix):
                heads = weight.view(-1, stored.network.args.head_size, weight.shape[-1])
                heads[:, -2:] *= times
    scores = score_texts(model, [[*stored.begin, *each] for each in tokens], 8)
    return [-score / len(each) for score, each in zip(scores, tokens, strict=True)]


def table(run: Path) -> str:
    """Return a row for each model: its loss, and the differences in Float8, paired by document."""
    lines = [
        "| two channels of each head | bfloat16 | "
        + " | ".join(f"Float8, `{rotation}`" for rotation in ROTATIONS)
        + " |",
        "|---|---|" + "---|" * len(ROTATIONS),
    ]
    for title, scales in MODELS.items():
        exact = losses(run, scales, None)
        cells = [f"{statistics.fmean(exact):.4f}"]
        for rotation in ROTATIONS:
            rounded = losses(run, scales, rotation)
            more = [b - a for a, b in zip(exact, rounded, strict=True)]
            error = statistics.stdev(more) / len(more) ** 0.5
            cells.append(f"{statistics.fmean(more):+.4f} ± {error:.4f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train, measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--run", type=Path, help="Such a run, instead of a new one.")
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--docs", type=Path, help="A page that quotes the table.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or Path(folder)
        if not arguments.run:
            train(run, arguments.steps)
        found = table(run)
    command = " ".join(("python", "benchmarks/attention_held_out.py", *sys.argv[1:]))
    write_section(
        arguments.output,
        "## Held-out loss with attention in Float8\n\n"
        f"`{command}`: {os.cpu_count()} cores with other work, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.date.today()}\n\n"
        f"`{RECIPE}` with 4 blocks of width 128 and heads of 32, after {arguments.steps} steps "
        f"of 8 x 128 tokens, on {DOCUMENTS} held-out files of at most {TOKENS} "
        "tokens: loss in nats per token in bfloat16, and its difference with queries, "
        "keys and values in Float8 with a scale for each token of a head, by what is rotated: mean "
        "over the files and its standard error. How: `benchmarks/attention_held_out.py`."
        f"\n\n{found}\n",
    )
    if arguments.docs:
        quote("attention_held_out.py", found, arguments.docs)


if __name__ == "__main__":
    main()

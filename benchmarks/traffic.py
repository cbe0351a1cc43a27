"""Writes the table of what Llama 3 8B sends into docs/parallelism.md, from the formulas.

    python benchmarks/traffic.py

Nothing is run: that the formulas are right is measured by `collectives.py`, on small models.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from collectives import ROOT, formulas

from torchtitan.checks import load_job

PAGE = ROOT / "docs/parallelism.md"
RECIPE = ROOT / "train_configs/llama3_8b.toml"
RANKS, SEQUENCES = 8, 8
# Degrees in the order of the mesh: pp, dp_replicate, dp_shard, cp, tp.
AXES = ("pipeline", "data_parallel_replicate", "data_parallel_shard", "context", "tensor")
LAYOUTS = {
    "DDP 8": (1, 8, 1, 1, 1),
    "FSDP 8": (1, 1, 8, 1, 1),
    "HSDP 2 x 4": (1, 2, 4, 1, 1),
    "FSDP 4 x TP 2": (1, 1, 4, 1, 2),
    "TP 8": (1, 1, 1, 1, 8),
    "FSDP 4 x CP 2": (1, 1, 4, 2, 1),
    "CP 8": (1, 1, 1, 8, 1),
    "CP 8, Ulysses": (1, 1, 1, 8, 1),
    "FSDP 4 x PP 2": (2, 1, 4, 1, 1),
    "PP 8": (8, 1, 1, 1, 1),
}
HEAD = """\
| layout | parameters and gradients | activations | keys and values | between stages | messages |
|---|---:|---:|---:|---:|---:|
"""
COLUMNS = (("fsdp", "dp_replicate"), ("tp",), ("cp",), ("pp",))
PLACE = re.compile(r"(?<=<!-- Written by benchmarks/traffic\.py -->\n\n).*?(?=\n\n)", re.DOTALL)


def row(name: str) -> str:
    """Gigabytes that one GPU sends in a step for each purpose, and in how many messages."""
    sizes = LAYOUTS[name]
    degrees = [f"--parallelism.{a}_degree={n}" for a, n in zip(keys(), sizes, strict=True)]
    if name.endswith("Ulysses"):
        degrees.append("--parallelism.context_parallel_rotate_method=ulysses")
    batch = [f"--training.{scope}_batch_size={n}" for scope, n in batches(sizes).items()]
    exempt = ("model.tokenizer_path",)
    job = load_job(RECIPE, [*degrees, *batch], RANKS, "cuda", exempt=exempt).config
    of_axis = job.degrees(RANKS)._asdict() | {"fsdp": job.degrees(RANKS).fsdp}
    sent: dict[str, float] = defaultdict(float)
    messages = 0
    # In the middle of a pipeline, where there is a stage on either side.
    for one in formulas(job, RANKS, stage_rank=sizes[0] // 2):
        sent[one.axis] += one.sent(of_axis[one.axis]) / 1e9
        messages += one.count
    cells = [sum(sent[axis] for axis in axes) for axes in COLUMNS]
    shown = [f"{cell:.3g} GB" if cell else "" for cell in cells]
    return f"| {' | '.join([name, *shown, f'{messages:,}'])} |"


def keys() -> list[str]:
    return [axis if axis.startswith("data") else f"{axis}_parallel" for axis in AXES]


def batches(sizes: tuple[int, ...]) -> dict[str, int]:
    """The same sequences in every layout, without accumulation."""
    return {"local": SEQUENCES // (sizes[1] * sizes[2]), "global": SEQUENCES}


def main(page: Path) -> None:
    """Put the table where the page has a place for it."""
    table = HEAD + "\n".join(map(row, LAYOUTS))
    text, places = PLACE.subn(table.replace("\\", r"\\"), page.read_text(encoding="utf-8"))
    assert places == 1, f"{page} has {places} places for the table"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PAGE)

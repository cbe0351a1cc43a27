"""Writes the table of sizes in benchmarks/results/plan_accuracy.md by plans of `torchtitan plan`.

python scripts/write_layout_table.py

For a model, a sequence length and a number of GPUs, layouts are tried from the simplest on; the
first one that fits is in the table.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchtitan.checks import load_job
from torchtitan.checks.limits import model_states
from torchtitan.config import RecipeError
from torchtitan.device import GIB
from torchtitan.plan.plan import Plan, plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks/results/plan_accuracy.md"
HEAD = """\
| model | sequence | GPUs | layout | flags on top of the recipe | GiB | states | samples |
|---|---:|---:|---|---|---:|---:|---:|
"""
ROOM = 0.9
"""Fraction of the memory of a GPU to plan for; NCCL and CUDA take the rest."""
GPUS = {"80 GB": 80e9, "24 GB": 24e9}
SIZES = (
    ("llama3_1b", 8192, (1, 8), "24 GB"),
    ("llama3_3b", 8192, (8,), "24 GB"),
    ("llama3_8b", 8192, (8, 16), "24 GB"),
    ("llama3_1b", 8192, (1, 8), "80 GB"),
    ("llama3_1b", 32768, (8,), "80 GB"),
    ("llama3_3b", 8192, (1, 8), "80 GB"),
    ("llama3_3b", 32768, (8,), "80 GB"),
    ("llama3_8b", 8192, (8, 64), "80 GB"),
    ("llama3_8b", 32768, (8, 64), "80 GB"),
    ("llama3_8b", 131_072, (8, 64), "80 GB"),
    ("llama3_70b", 8192, (16, 32, 64, 256), "80 GB"),
    ("llama3_70b", 32768, (64, 256), "80 GB"),
    ("llama3_405b", 8192, (128, 256, 512, 1024), "80 GB"),
)
FULL = {"activation_checkpoint.mode": "full"}
CHUNKS = FULL | {"loss.vocabulary_chunk": "16384"}
TENSOR = {"parallelism.tensor_parallel_degree": "8"}
CONTEXT = {"parallelism.context_parallel_degree": "8"}
PIPELINE = {
    "parallelism.pipeline_parallel_degree": "8",
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "training.local_batch_size": "32",
}
ONE = {"training.local_batch_size": "1"}
BITS = {"optimizer.state_dtype": "8bit"}
LAYOUTS: tuple[Mapping[str, str], ...] = (
    {},
    ONE,
    ONE | FULL,
    ONE | CHUNKS,
    ONE | FULL | CONTEXT,
    ONE | CHUNKS | CONTEXT,
    ONE | FULL | TENSOR,
    ONE | CHUNKS | TENSOR,
    ONE | FULL | TENSOR | CONTEXT,
    FULL | TENSOR | PIPELINE,
    ONE | CHUNKS | BITS,
    CHUNKS | BITS,
    ONE | CHUNKS | TENSOR | BITS,
)
"""Flags of each layout that is tried, from the simplest on; the recipe as it is comes first."""

HELD = ("parameters", "gradients", "optimizer states", "gathered")
SAMPLES = ("activations", "logits")


class Sizing(NamedTuple):
    """A layout that fits."""

    flags: list[str]
    layout: str
    plan: Plan


def sizing(recipe: str, seq_len: int, gpus: int, room: float) -> Sizing | None:
    """Return the first layout whose planned memory is at most `room` bytes."""
    path = ROOT / f"train_configs/{recipe}.toml"
    shipped = load_job(path, [], None, "cuda", exempt=["model.tokenizer_path"]).config.flat()
    for layout in LAYOUTS:
        wanted = {"training.seq_len": str(seq_len), **layout}
        changed = {key: value for key, value in wanted.items() if str(shipped[key]) != value}
        flags = [f"--{key}={value}" for key, value in changed.items()]
        try:
            job = load_job(path, flags, gpus, "cuda", exempt=["model.tokenizer_path"]).config
        except RecipeError:
            continue  # the ranks or the batch do not divide
        if job.degrees(gpus).pp > job.parallelism.microbatches(job.local_batch(job.degrees(gpus))):
            continue  # most stages would wait
        if model_states(job, gpus).device > room / GIB:
            continue
        planned = plan(job, gpus, capacity_gib=room / GIB, probe=0)
        if planned.fits:
            names = {"dp_shard": "FSDP", "tp": "TP", "cp": "CP", "pp": "PP"}
            degrees = job.degrees(gpus)._asdict()
            parts = [f"{name} {degrees[axis]}" for axis, name in names.items() if degrees[axis] > 1]
            return Sizing(flags, " x ".join(parts) or "one GPU", planned)
    return None


def rows(kind: str) -> Iterator[str]:
    """Yield the rows of the table for one kind of GPU."""
    for recipe, seq_len, counts, of_kind in SIZES:
        for gpus in counts if of_kind == kind else ():
            size = recipe.removeprefix("llama3_").upper()
            found = sizing(recipe, seq_len, gpus, ROOM * GPUS[kind])
            start = f"| {size} | {seq_len:,} | {gpus} "
            if not found:
                yield f"{start}| none that was tried fits | | | | |"
                continue
            held = found.plan.by_kind_gib
            parts = (
                found.plan.reserved_gib.value,
                *(sum(held.get(kind, 0.0) for kind in kinds) for kinds in (HELD, SAMPLES)),
            )
            flags = " ".join(f"`{flag}`" for flag in found.flags)
            numbers = " | ".join(f"{part:.1f}" for part in parts)
            yield f"{start}| {found.layout} | {flags} | {numbers} |"


def table(kind: str) -> str:
    """Return the table for one kind of GPU."""
    return HEAD + "".join(f"{row}\n" for row in rows(kind))


def written(page: str) -> str:
    """Return the page with its tables as computed now."""
    for kind in GPUS:
        mark = f"<!-- Written by scripts/write_layout_table.py: {kind} -->"
        assert mark in page, f"{PAGE} has no line: {mark}"
        page = re.sub(f"({mark}\n\n)(?:\\|.*\n)*", lambda m, k=kind: m[1] + table(k), page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Predicted memory and speed beside measured ones: published rows, and this project's own card.

    python benchmarks/plan_accuracy.py --output outputs/plan.md
    python benchmarks/plan_accuracy.py --only "8B, 8 GPUs"

The model has physical quantities only, and the same few efficiencies for all rows of a machine. Two
things were chosen while rows were known. The rate of products of `h100-96`, the H100 of the first
rows, is that of `h100` times 0.64: the law of power that its file states was chosen among several
that are possible, knowing those rows. And the bandwidths, the rates of attention and products, and
the costs of Float8 come from measurements of this project's H100, so its rows say how well they add
up to a step.
"""

import argparse
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from quoted import write_section  # noqa: E402
from svg import INK, LINE, MUTED, Picture  # noqa: E402

from tests.gpu.fast import MODELS_HERE, ROWS, extended  # noqa: E402
from tests.gpu.many import CASES  # noqa: E402
from torchtitan.checks import load_job  # noqa: E402
from torchtitan.config import ConfigError  # noqa: E402
from torchtitan.device import GIB  # noqa: E402
from torchtitan.job import JobConfig  # noqa: E402
from torchtitan.models.spec import ModelSpec  # noqa: E402
from torchtitan.parallel import context  # noqa: E402
from torchtitan.plan.compiled import RecordedGraph  # noqa: E402
from torchtitan.plan.hardware import AttentionRate, find_hardware  # noqa: E402
from torchtitan.plan.plan import MEMORY_LIMITS, TIME_LIMITS, plan  # noqa: E402

PUBLISHED = ROOT / "benchmarks/published_rows.toml"
PAGE = ROOT / "benchmarks/results/gpu_h100.md"
OWN, MANY = "this project's H100", "one rank of many"
BAND = 0.12
"""Error of a speed at the edge of the band that is drawn."""
COLORS = ("#8250df", "#d1570a", "#1f6feb", "#1a7f37", "#bf3989", "#9a6700")
RECIPE = ("--model.tokenizer_path", "none")


class MeasuredRow(NamedTuple):
    """Measurement, and the recipe that was run."""

    name: str
    source: str
    hardware: str
    ranks: int
    recipe: Path
    flags: Sequence[str]
    tokens_per_second: float | None
    """Tokens a second of each device; None: not measured."""
    gib: float | None = None
    """Peak reserved by the allocator."""
    allocator: str = "expandable_segments:True"
    """Settings of torch's allocator."""
    attention: tuple[float, float] | None = None
    """TFLOP/s of the forward and the backward of attention; None: those of the hardware."""
    repeats_keys: bool = False
    """Whether ranks exchanged the keys and values of each query head."""
    whole_root: bool = False
    """Whether FSDP gathered the embedding and the output with its root, which it keeps."""
    stage_rank: int | None = None
    """Pipeline rank whose memory was measured; None: the fullest."""
    note: str = ""

    def job(self) -> JobConfig:
        """Load the recipe for these ranks."""
        return load_job(self.recipe, [*self.flags, *RECIPE], self.ranks, "cuda").config


class ScoredRow(NamedTuple):
    """Measurement beside its prediction."""

    row: MeasuredRow
    gib: float
    speed: float

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors of speed and memory, if measured."""
        speed, gib = self.row.tokens_per_second, self.row.gib
        found = {"speed": speed and self.speed / speed - 1, "memory": gib and self.gib / gib - 1}
        return {what: error for what, error in found.items() if error is not None}


def published() -> Iterator[MeasuredRow]:
    """Yield the rows of `published_rows.toml`."""
    table = tomllib.loads(PUBLISHED.read_text())
    for row in table["row"]:
        sizes = row["local_batch_size"], row.get("global_batch_size", -1)
        batch = "--training.local_batch_size {} --training.global_batch_size {}".format(*sizes)
        words = [*(table["flags"][name] for name in row["flags"]), row.get("more", ""), batch]
        recipe = ROOT / "train_configs" / f"{row['recipe']}.toml"
        given = {key: row[key] for key in MeasuredRow._fields if key in row}
        yield MeasuredRow(**given | {"recipe": recipe, "flags": shlex.split(" ".join(words))})


def cells_of(title: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page of this project's H100, by name."""
    section = PAGE.read_text().partition(f"{title}\n")[2].partition("\n#")[0]
    lines = (line.strip("| ").split(" | ") for line in section.splitlines())
    return {line[0]: line for line in lines if len(line) > 6}


def many() -> Iterator[MeasuredRow]:
    """Yield the ranks of many on that page, whose others do not exist."""
    cells = cells_of("## One rank of many")
    for name in (name for name in CASES if name in cells):
        recipe, ranks, rank, flags = CASES[name]
        path, gib = ROOT / f"train_configs/{recipe}.toml", float(cells[name][6])
        flags = [*flags.split(), "--training.global_batch_size", "-1"]  # without accumulation
        row = MeasuredRow(name, MANY, "h100", ranks, path, flags, None, gib)
        stage_rank = rank * row.job().degrees(ranks).pp // ranks
        yield row._replace(stage_rank=stage_rank, whole_root=True)  # as it was then


def own(folder: Path) -> Iterator[MeasuredRow]:
    """Yield the rows of the page of this project's H100."""
    for title, model in MODELS_HERE.items():
        cells = cells_of(f"### {title}")
        for name in (name for name in ROWS if name in cells):
            path = folder / f"{title}, {name}.toml"
            path.write_text(extended(ROWS[name], model, str(folder), "inductor"))
            speed, gib = float(cells[name][1].split()[0].replace(",", "")), float(cells[name][5])
            row = MeasuredRow(f"{title}: {name}", OWN, "h100", 1, path, (), speed, gib)
            yield row._replace(allocator="expandable_segments:False")  # as it was then


def score(row: MeasuredRow) -> ScoredRow:
    """Predict a row."""
    job = row.job()
    os.environ["PYTORCH_ALLOC_CONF"] = row.allocator
    torch._dynamo.reset()  # it limits how often a function is traced in a process
    hardware = find_hardware(row.hardware)
    if row.attention:
        rates = [AttentionRate(head_dim=128, forward=row.attention[0], backward=row.attention[1])]
        hardware = hardware.model_copy(update={"attention": rates})
    attend, record = context.context_attention, RecordedGraph.__call__

    def repeated(q, k, v, *rest):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return attend(q, k, v, *rest)

    def held(graph, arguments):
        """Record it as with torch before 2.13, whose autograd keeps tangents to its end."""
        given = zip(graph.inputs, arguments, strict=True)
        tangents = [tensor for node, tensor in given if node.name.startswith("tangents")]
        return (record(graph, arguments), tangents)[0]

    how = repeated if row.repeats_keys else attend
    ends = (lambda *_: ((), ())) if row.whole_root else ModelSpec.ends
    with (
        patch.object(context, "context_attention", how),
        patch.object(ModelSpec, "ends", ends),
        patch.object(RecordedGraph, "__call__", held),
    ):
        found = plan(job, row.ranks, hardware)
    assert found.time is not None
    kinds = (kind for kind in found.kinds if row.stage_rank in kind.stage_ranks)
    gib = next(kinds, found.fullest).memory.peak_reserved / GIB
    return ScoredRow(row, gib, found.time.tokens_per_second_per_device)


def summary(scored: Sequence[ScoredRow]) -> str:
    """Return a sentence on the errors of some rows."""
    parts = []
    for what in ("speed", "memory"):
        errors = [each.errors[what] for each in scored if what in each.errors]
        if errors:
            middle, most = statistics.median(map(abs, errors)), max(map(abs, errors))
            bias = statistics.mean(errors)
            parts.append(
                f"{what} {middle:.1%} (mean {bias:+.1%}, largest {most:.1%}, {len(errors)} rows)"
            )
    return "median absolute error: " + "; ".join(parts)


def coverage(scored: Sequence[ScoredRow]) -> str:
    """Return a sentence on how many measurements are within the limits of a plan."""
    times = [1 + one.errors["speed"] for one in scored if "speed" in one.errors]
    sizes = [one.row.gib / one.gib for one in scored if one.row.gib]
    parts = []
    limits = {"time": (TIME_LIMITS, times), "memory": (MEMORY_LIMITS, sizes)}
    for what, ((low, high), found) in limits.items():
        within = f"{what} of {sum(low <= each <= high for each in found)} of {len(found)} rows"
        parts.append(f"{within} ({low:g} to {high:g} times the value)")
    return f"Within the limits that a plan states are: {', '.join(parts)}."


def table(scored: Iterable[ScoredRow]) -> str:
    """Return rows with predictions and errors."""
    lines = ["| row | hardware | tokens/s | predicted | error | GiB | predicted | error |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    for one in scored:
        row, cells = one.row, [one.row.name, one.row.hardware]
        both = (row.tokens_per_second, one.speed, "speed", 0), (row.gib, one.gib, "memory", 1)
        for measured, predicted, what, digits in both:
            values = (f"{x:,.{digits}f}" for x in (measured, predicted) if measured)
            cells += [*values, f"{one.errors[what]:+.1%}"] if measured else [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(scored: Sequence[ScoredRow]) -> Picture:
    """Draw predicted beside measured speed; in the band is what errs by at most 12 %."""
    scored = [one for one in scored if one.row.tokens_per_second]
    left, right, top, bottom = 70, 570, 30, 530
    about = "Predicted tokens per second of a device by measured ones, on logarithmic axes."
    picture = Picture("Predicted and measured speed", about, 860, bottom + 50)
    ends = [math.log10(x) for one in scored for x in (one.speed, one.row.tokens_per_second)]
    low, high = math.floor(min(ends)), math.ceil(max(ends))

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = ((math.log10(v) - low) / (high - low) for v in (x, y))
        return left + (right - left) * across, bottom - (bottom - top) * up

    for power in range(low, high + 1):
        (x, y), ends = at(10**power, 10**power), [10.0**low, 10.0**high]
        picture.line([at(ends[0], 10**power), at(ends[1], 10**power)], LINE, width=0.5)
        picture.line([at(10**power, ends[0]), at(10**power, ends[1])], LINE, width=0.5)
        picture.text(left - 8, y + 4, f"{10**power:,}", "end", MUTED)
        picture.text(x, bottom + 18, f"{10**power:,}", "middle", MUTED)
    for factor, dash in ((1.0, ""), (1 + BAND, "4 3"), (1 - BAND, "4 3")):
        ends = [10.0**low / min(factor, 1), 10.0**high / max(factor, 1)]
        picture.line([at(x, x * factor) for x in ends], INK, dash=dash)
    picture.text((left + right) / 2, bottom + 38, "measured tokens/s of a device", "middle", MUTED)
    picture.text(left, top - 10, "predicted", color=MUTED)
    sources = list(dict.fromkeys(one.row.source for one in scored))
    for number, (source, color) in enumerate(zip(sources, COLORS, strict=False)):
        mine = [one for one in scored if one.row.source == source]
        corners = [at(one.row.tokens_per_second, one.speed) for one in mine]
        picture.boxes([(x - 3, y - 3, 6, 6) for x, y in corners], color)
        picture.boxes([(right + 30, top + 20 * number, 8, 8)], color)
        picture.text(right + 46, top + 20 * number + 8, source)
    return picture


def report(scored: Sequence[ScoredRow], failed: Sequence[str], plot: str) -> str:
    """Return the page."""
    sources = tomllib.loads(PUBLISHED.read_text())["sources"]
    about = (__doc__ or "").split("\n\n")[-1]
    parts = ["## How good a plan is\n\n<!-- Written by benchmarks/plan_accuracy.py. -->", about]
    others = [one for one in scored if one.row.source not in (OWN, MANY)]
    parts.append(f"### Published rows\n\n{table(others)}\n\n{summary(others)}")
    notes = [f"- {one.row.name}: {one.row.note}." for one in others if one.row.note]
    parts.append("Sources:\n\n" + "\n".join(f"- {k}: {v}" for k, v in sources.items()))
    parts.append("What differs there:\n\n" + "\n".join(notes) if notes else "")
    for source in (OWN, MANY):
        mine = [one for one in scored if one.row.source == source]
        parts.append(f"### {source[0].upper()}{source[1:]}\n\n{table(mine)}\n\n{summary(mine)}")
    parts.append(f"### Together\n\n{coverage(scored)}\n\n![predicted and measured]({plot})")
    parts.append("### Left out\n\n" + "\n".join(f"- {line}" for line in failed) if failed else "")
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="page; plan_accuracy.svg is put next to it")
    parser.add_argument("--only", default="", help="only rows whose names match this pattern")
    arguments = parser.parse_args()
    scored, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        rows = [*published(), *own(Path(folder)), *many()]
        for row in (row for row in rows if re.search(arguments.only, row.name)):
            try:
                scored.append(score(row))
                print(table(scored[-1:]).splitlines()[-1], flush=True)
            except (ConfigError, NotImplementedError) as error:
                failed.append(f"{row.name}: {error}")
                print(failed[-1], flush=True)
            if scored and arguments.output:  # after each row, as all take minutes
                plot = arguments.output.with_name("plan_accuracy.svg")
                plot.write_text(str(draw(scored)))
                write_section(arguments.output, report(scored, failed, plot.name))
    if not scored:
        raise SystemExit("no row could be planned")


if __name__ == "__main__":
    main()

"""`torchtitan data inspect`: samples of a recipe as a run would read them."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from torchtitan.checks import load_job
from torchtitan.config import ConfigError, split_recipe
from torchtitan.data import Tokenizer
from torchtitan.device import pick
from torchtitan.inputs import require_recipe
from torchtitan.tools.data.sample_inspection import Inspected, Inspection, inspect
from torchtitan.tools.options import Count, Recipe, integer

START, END = 300, 100
"""Characters of a document that are shown, if it is longer."""


def inspect_samples(
    context: typer.Context,
    recipe: Recipe = None,
    samples: Annotated[int | None, Count("Number of samples (default: 4).")] = None,
    first: Annotated[
        int,
        typer.Option("--from", parser=integer(0), metavar="I", help="First sample (default: 0)."),
    ] = 0,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum of the layout).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each sample, one per line.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture of lengths and sources: x.svg or x.html."),
    ] = None,
) -> None:
    """Show the samples that a run reads, and facts about its data."""
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    require_recipe(path, flags, "data inspect")
    if output and output.suffix not in (".svg", ".html"):
        raise ConfigError(f"--output: got {output}; wanted a name that ends with .svg or .html")
    job = load_job(path, flags, world_size, pick().type).config
    ranks = world_size or job.parallelism.least_ranks
    found = inspect(job, job.global_batch(job.degrees(ranks)), first, samples or 4)
    try:
        for sample in found.samples:
            lines = [json.dumps(asdict(sample))] if as_json else page(sample, found.tokenizer)
            print("\n".join(lines))
        if not as_json:
            print("\n".join(summary(found)), flush=True)
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if output:
        output.write_text(drawn(found, output.suffix == ".html"), encoding="utf-8")


def page(sample: Inspected, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the lines of a sample, with a line before each document."""
    padding = len(sample.tokens) - sum(sample.documents)
    more = f", {padding:,} of padding" if padding else ""
    yield f"== sample {sample.index:,}, source {sample.source}: {len(sample.tokens):,} tokens{more}"
    for number, tokens in enumerate(sample.parts(), 1):
        yield f"-- document {number} of {len(sample.documents)}: {len(tokens):,} tokens"
        text = tokenizer.decode(tokens)
        if len(text) > START + END:
            left_out = len(text) - START - END
            text = f"{text[:START]} [... {left_out:,} characters ...] {text[-END:]}"
        yield text
    yield ""


def summary(found: Inspection) -> Iterator[str]:
    """Yield the facts about the data."""
    total, of_run = found.read.total(), sum(found.of_run.values())
    for name in found.of_run or found.read:
        count = found.read[name]
        line = f"source {name}: {count:,} tokens of these samples ({100 * count / total:.1f}%)"
        if of_run:
            share = 100 * found.of_run[name] / of_run
            line += f", {found.of_run[name]:,} of the run ({share:.1f}%)"
            line += f"; it has {found.totals[name]:,}"
        yield line
    yield f"fingerprint of the tokenizer: {found.tokenizer.fingerprint}"
    for name, digest in found.fingerprints.items():
        yield f"fingerprint of {name}: {digest}"
    for name, lengths in found.lengths.items():
        yield f"lengths of {len(lengths):,} documents of {name}, in tokens"
        yield from bars(histogram(lengths))


WIDTH, ROW, LEFT, RIGHT = 680, 18, 190, 110
"""Pixels of the picture, of a bar's row, and to the left and right of bars."""
COLOR, INK = "#1f6feb", "#24292f"
LABEL = 26
"""Maximum number of characters of a label."""
CELLS = 40
"""Characters of the longest bar in text."""

Bars = list[tuple[str, int]]
"""Labels and counts."""


def histogram(lengths: npt.NDArray[np.int64]) -> Bars:
    """Count lengths by powers of two."""
    if not len(lengths):
        return []
    powers = np.bincount(np.frexp(lengths)[1])
    first = int(np.flatnonzero(powers)[0])
    names = [f"{2**p // 2:,} to {2**p - 1:,}" if p > 1 else str(p) for p in range(len(powers))]
    return list(zip(names, powers.tolist(), strict=True))[first:]


def bars(counts: Bars) -> Iterator[str]:
    """Yield the lines of a histogram in text."""
    most = max((count for _, count in counts), default=1)
    for name, count in counts:
        yield f"{name:>24} {'#' * -(-CELLS * count // most):<{CELLS}} {count:,}"


def drawn(found: Inspection, as_page: bool) -> str:
    """Draw the lengths of documents of each source, and the tokens of each source, as SVG."""
    charts = [
        (f"documents of {name} by length in tokens", histogram(lengths))
        for name, lengths in found.lengths.items()
    ]
    charts.append(("tokens of these samples by source", list(found.read.items())))
    if found.of_run:
        charts.append(("tokens of the run by source", list(found.of_run.items())))
    parts, y = list[str](), 0
    for title, counts in charts:
        y += 2 * ROW
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(title)}</text>')
        most = max((count for _, count in counts), default=1) or 1
        for name, count in counts:
            y += ROW
            width = round((WIDTH - LEFT - RIGHT) * count / most, 1)
            label = name if len(name) <= LABEL else f"...{name[3 - LABEL :]}"
            parts += [
                f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{escape(label)}</text>',
                f'<rect x="{LEFT}" y="{y - 11}" width="{width}" height="13" fill="{COLOR}"/>',
                f'<text x="{LEFT + width + 6}" y="{y}">{count:,}</text>',
            ]
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + ROW}"'
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    svg = "\n".join([f'<svg {box} {style}><rect width="100%" height="100%" fill="#fff"/>', *parts])
    svg += "\n</svg>\n"
    if not as_page:
        return svg
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>Data</title>\n{svg}'

"""Time and memory of attention by mask: causal, documents, sliding windows, and a dense mask.

    python benchmarks/document_attention.py --output benchmarks/results/attention.md

Forward and backward of one sequence in float32 on one core. In each round all masks take turns, and
ratios are taken round by round. Times are processor time, so that other work on the machine counts
less. Memory is counted from the allocations that torch's profiler records, inside of operators too.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from quoted import write_section
from torch import Tensor

from tests.dense import dense_attention
from torchtitan.device import pick
from torchtitan.models.attention import Core, causal_attention

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from svg import INK, LINE, MUTED, Picture  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
DOCUMENTS = (500, 1000, 2000, 4000, 8000)
WINDOWS = (1024, 4096)
MIB = 2**20
COLORS = ("#1f6feb", "#bf8700")

PAGE = """\
## Attention by mask: time and memory

<!-- Written by benchmarks/document_attention.py. -->

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}. {load:.1f} processes
wanted to run at the end.

One sequence, {heads} query heads and {kv_heads} key/value heads of {head_dim}, float32, forward and
backward, on one core. *Pairs* is the number of queries and keys that see each other, relative to
causal attention: the time that a mask should take.

### Time

Seconds of processor time, and their ratio to causal attention in the same round: median (quartiles)
of {rounds} rounds in which all take turns. Documents have equal lengths, and the last is cut.

{times}

![Time of documents relative to causal attention]({plot})

### Memory

MiB allocated beyond queries, keys and values: the largest tensor, what is kept between forward and
backward, and the peak of both. Documents have 1,000 tokens, the window 1,024. What is in
parentheses was not run; it follows from the dense mask's size, 1 byte for each pair of tokens, and
4 for its copy in float32.

{memory}
"""


class Mask(NamedTuple):
    """Mask of a sequence."""

    name: str
    core: Core = causal_attention
    documents: int = 0
    """Tokens of each document; 0: all are one."""
    window: int = 0

    def ids(self, length: int) -> Tensor | None:
        """Return the document of each token."""
        return torch.arange(length)[None] // self.documents if self.documents else None

    def pairs(self, length: int) -> float:
        """Return the number of visible pairs of tokens, relative to causal attention."""
        places = torch.arange(length)
        seen = places % (self.documents or length) + 1
        seen = seen.clamp(max=self.window or length)
        return float(seen.sum() / (places + 1).sum())


CAUSAL = Mask("causal")
DENSE = Mask("documents of 1,000, dense mask", dense_attention, 1000)
PACKED = [Mask(f"documents of {size:,}", documents=size) for size in DOCUMENTS]
BANDS = [Mask(f"window of {window:,}", window=window) for window in WINDOWS]
BOTH = Mask("documents of 4,000, window of 1,024", documents=4000, window=1024)


def tensors(length: int) -> list[Tensor]:
    """Return q, k and v."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, n, length, HEAD_DIM, requires_grad=True) for n in heads]


def seconds(mask: Mask, given: Sequence[Tensor], documents: Tensor | None, grad: Tensor) -> float:
    """Return the processor time of a forward and backward."""
    start = time.process_time()
    mask.core(*given, documents, mask.window).backward(grad)
    found = time.process_time() - start
    for tensor in given:
        tensor.grad = None
    return found


def measure(masks: Sequence[Mask], length: int, rounds: int) -> dict[Mask, list[float]]:
    """Return the seconds of each round; a round before them is not counted."""
    given, documents = tensors(length), [mask.ids(length) for mask in masks]
    grad = torch.randn(given[0].shape)
    found: dict[Mask, list[float]] = {mask: [] for mask in masks}
    for number in range(rounds + 1):
        for mask, ids in [*zip(masks, documents, strict=True)][:: 1 if number % 2 else -1]:
            taken = seconds(mask, given, ids, grad)
            if number:
                found[mask].append(taken)
    return found


class Counted(NamedTuple):
    """Bytes that attention allocates."""

    largest: int
    kept: int
    peak: int

    def __str__(self) -> str:
        return " / ".join(f"{size / MIB:,.1f}" for size in self)


def count(mask: Mask, length: int) -> Counted:
    """Count the allocations of a forward and backward."""
    given, documents = tensors(length), mask.ids(length)
    of_forward, of_backward = (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        for _ in range(2)
    )
    with of_forward:
        out = mask.core(*given, documents, mask.window)
    with of_backward:
        out.backward(torch.ones(()).expand(out.shape))
    changes = [allocations(profile) for profile in (of_forward, of_backward)]
    held = peak = 0
    for change in changes[0] + changes[1]:
        held += change
        peak = max(peak, held)
    return Counted(max(changes[0] + changes[1]), sum(changes[0]), peak)


def allocations(profile: torch.profiler.profile) -> list[int]:
    """Return the bytes of each allocation, in order; negative where memory was freed."""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratios(found: dict[Mask, list[float]], mask: Mask) -> list[float]:
    """Return the time relative to causal attention, by round."""
    return [one / all for one, all in zip(found[mask], found[CAUSAL], strict=True)]


def time_table(found: dict[int, dict[Mask, list[float]]]) -> str:
    lines = ["| tokens | mask | seconds | ratio to causal | pairs |", "|---:|---|---:|---:|---:|"]
    for length, masks in found.items():
        for mask, taken in masks.items():
            cells = [f"{length:,}", mask.name, spread(taken, 2), spread(ratios(masks, mask), 3)]
            lines.append(f"| {' | '.join(cells)} | {mask.pairs(length):.3f} |")
    return "\n".join(lines)


def memory_table(lengths: Sequence[int], arguments: argparse.Namespace) -> str:
    lines = [
        "| | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for mask in (DENSE, CAUSAL, PACKED[1], BANDS[0]):
        limit = {DENSE: arguments.dense, CAUSAL: arguments.causal}.get(mask, max(lengths))
        cells = [str(count(mask, n)) if n <= limit else estimate(mask, n) for n in lengths]
        lines.append(f"| {mask.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def estimate(mask: Mask, length: int) -> str:
    """Return the sizes of a dense mask: its largest tensor, what is kept, and the peak."""
    if mask != DENSE:
        return "not run"
    in_float32 = 4 * length**2 / MIB
    return f"({in_float32:,.0f} / {in_float32:,.0f} / {in_float32 * 1.25:,.0f})"


def draw(found: dict[int, dict[Mask, list[float]]]) -> Picture:
    """Draw the ratio to causal attention by length of the documents; dashed: that of the pairs."""
    left, right, top, bottom = 60, 560, 30, 300
    about = "Time relative to causal attention by tokens of a document, measured and by pairs."
    picture = Picture("Attention within documents", about, 760, bottom + 50)
    for number in range(6):
        y = bottom - (bottom - top) * number / 5
        picture.line([(left, y), (right, y)], LINE, width=0.5)
        picture.text(left - 8, y + 4, f"{number / 5:.1f}", "end", MUTED)
    places = {mask: left + 110 * number + 30 for number, mask in enumerate(PACKED)}
    for mask, x in places.items():
        picture.text(x, bottom + 18, f"{mask.documents:,}", "middle", MUTED)
    picture.text((left + right) / 2, bottom + 38, "tokens of a document", "middle", MUTED)

    def at(share: float) -> float:
        return bottom - (bottom - top) * min(share, 1.1)

    for place, ((length, masks), color) in enumerate(zip(found.items(), COLORS, strict=False)):
        taken = [(x, at(statistics.median(ratios(masks, mask)))) for mask, x in places.items()]
        picture.line(taken, color, width=2)
        picture.line([(x, at(mask.pairs(length))) for mask, x in places.items()], color, dash="4 3")
        y = top + 44 * place
        picture.line([(right + 20, y), (right + 44, y)], color, width=2)
        picture.text(right + 50, y + 4, f"{length:,} tokens", color=INK)
        picture.line([(right + 20, y + 20), (right + 44, y + 20)], color, dash="4 3")
        picture.text(right + 50, y + 24, "pairs that see each other", color=MUTED)
    return picture


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="timed")
    parser.add_argument("--counted", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dense", type=int, default=32768, help="longest with a dense mask")
    parser.add_argument("--causal", type=int, default=131072, help="longest counted")
    parser.add_argument("--output", type=Path, default=Path("attention.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for length in arguments.lengths:
        masks = [CAUSAL, *[DENSE] * (length <= arguments.dense), *PACKED, *BANDS, BOTH]
        found[length] = measure(masks, length, arguments.rounds)
    times, memory = time_table(found), memory_table(arguments.counted, arguments)
    plot = arguments.output.with_name("document_attention.svg")
    plot.write_text(str(draw(found)))
    write_section(
        arguments.output,
        PAGE.format(
            command=" ".join(("python", "benchmarks/document_attention.py", *sys.argv[1:])),
            device=pick().name,
            cores=os.cpu_count(),
            torch=torch.__version__,
            python=platform.python_version(),
            date=datetime.date.today(),
            load=os.getloadavg()[0],
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rounds=arguments.rounds,
            times=times,
            memory=memory,
            plot=plot.name,
        ),
    )


if __name__ == "__main__":
    main()

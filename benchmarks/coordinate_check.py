"""Whether a learning rate carries over from one width to another, by `model.base_width`.

    python -m benchmarks.coordinate_check            sizes of activations over widths
    python -m benchmarks.coordinate_check --rates    the best rate at two widths

The first trains a small Llama for five steps on one batch of text, at each width, and
measures the mean absolute value of what comes out of each block, of the logits of attention, and of
the logits of the output (Yang et al., 2022, arXiv:2203.03466, appendix D.1). Where a rate carries
over, none of these grows with the width. The second trains on the source text of Python's library,
at rates on a grid, and takes the minimum of a parabola through the losses of the best rate and its
neighbours. Both write to `benchmarks/results/`.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quoted import write_section
from torchtitan.models.attention import SelfAttention, causal_attention
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.spec import build_empty, initialize
from torchtitan.optim import AdamW, OptimizerConfig, Optimizers, name_parameters

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
sys.path.insert(0, str(ROOT / "scripts"))

from svg import LINE, MUTED, Picture  # noqa: E402

WIDTHS = (64, 128, 256, 512, 1024)
STEPS = 5
BATCH, SEQ_LEN = 4, 64
ARGS = DecoderArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=256)
RATE = 1e-2
WAYS = ("with", "without")
COLORS = ("#5b8ff9", "#f6a04d", "#5fbf77", "#b68ad6", "#953800")
Sizes = dict[str, float]
"""Mean absolute values, by what they are of."""


def network(width: int, base: int | None, seq_len: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return a network with weights, and its arguments."""
    args = dataclasses.replace(ARGS, dim=width, ffn_dim=2 * width, base_width=base)
    model = build_empty(LLAMA3.build, args, seq_len)
    model.to_empty(device="cpu")
    model.init_buffers()  # type: ignore[operator]
    initialize(model.named_parameters(), partial(LLAMA3.initial, args), seed)
    return model, args


def optimizers(model: nn.Module, args: Any, config: OptimizerConfig) -> Optimizers:
    growth = partial(LLAMA3.growth, args)
    heads = partial(LLAMA3.heads, args)
    return Optimizers(name_parameters([model], LLAMA3.role, heads, growth), config)


def batches(steps: int, batch: int, seq_len: int) -> Iterable[Tensor]:
    """Yield batches of bytes (batch, seq_len + 1) at random places of Python's library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq_len - 1, (batch, 1), generator=generator)
        yield text[starts + torch.arange(seq_len + 1)].long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sizes(model: nn.Module, tokens: Tensor) -> Sizes:
    """Measure the activations of a forward."""
    found: Sizes = {}

    def core(name: str, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        found[name] = float(scores[:, :, seen].abs().mean())
        return causal_attention(q, k, *rest)

    def note(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        found[name] = float(output.abs().mean())

    hooks = []
    for number, block in enumerate(LLAMA3.blocks(model).values(), 1):
        hooks.append(block.register_forward_hook(partial(note, f"block {number}")))
        for module in block.modules():
            if isinstance(module, SelfAttention):
                module.core = partial(core, f"attention logits {number}")
    with torch.no_grad():
        found["logits"] = float(model(tokens).abs().mean())
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.core = causal_attention
    return found


def check(
    widths: Sequence[int] = WIDTHS, config: OptimizerConfig | None = None, seeds: int = 1
) -> dict[str, dict[int, list[Sizes]]]:
    """Return the sizes before each step and after the last, by width, with a base and without.

    The base is the first width.
    """
    config = config or AdamW(lr=RATE)
    (tokens,) = batches(1, BATCH, SEQ_LEN)
    found: dict[str, dict[int, list[Sizes]]] = {way: {} for way in WAYS}
    for way, width in ((way, width) for way in WAYS for width in widths):
        runs = []
        for seed in range(seeds):
            model, args = network(width, widths[0] if way == "with" else None, SEQ_LEN, seed)
            updates = optimizers(model, args, config)
            runs.append([sizes(model, tokens[:, :-1])])
            for _ in range(STEPS):
                updates.begin(1.0)
                loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
                updates.step()
                runs[-1].append(sizes(model, tokens[:, :-1]))
        found[way][width] = [
            {name: statistics.fmean(each[name] for each in of_step) for name in of_step[0]}
            for of_step in zip(*runs, strict=True)
        ]
    return found


def slope(points: Mapping[int, float]) -> float:
    """Return the slope of the line through the logarithms of positive values by width."""
    across, up = ([math.log(v) for v in values] for values in (points, points.values()))
    return statistics.linear_regression(across, up).slope


def slopes(of_way: Mapping[int, Sequence[Sizes]], step: int = STEPS) -> Sizes:
    """Return the slope of each size over the widths, after a step."""
    names = next(iter(of_way.values()))[step]
    return {n: slope({width: runs[step][n] for width, runs in of_way.items()}) for n in names}


NARROW, WIDE = 128, 512
TRAINED, LAST, WARMUP = 100, 20, 15
"""Steps of a run, those at its end whose mean loss counts, and those of the warm-up."""
TOKENS = (4, 64)
"""Sequences of a batch, and their length."""
FIRST = 2**-9
"""Rate at which the search begins."""


def train(width: int, base: int | None, rate: float, steps: int = TRAINED) -> float:
    """Return the mean loss of the last steps, each on new text; the rate falls linearly to 0."""
    model, args = network(width, base, TOKENS[1])
    updates, losses = optimizers(model, args, AdamW(lr=rate)), []
    for step, tokens in enumerate(batches(steps, *TOKENS), 1):
        updates.begin(min(step / WARMUP, (steps + 1 - step) / (steps + 1 - WARMUP)))
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        updates.clip(1.0, updates.norm().complete())
        updates.step()
        losses.append(loss.item())
    end = statistics.fmean(losses[-LAST:])
    return end if math.isfinite(end) else math.inf


def search(
    loss_at: Callable[[float], float], first: float = FIRST
) -> tuple[float, dict[float, float]]:
    """Return the best rate, and the loss of each rate that was tried.

    Rates are a factor of 2 apart until the best has worse neighbours, then sqrt(2). The best is the
    minimum of the parabola in log(rate) through those within a factor of 2.
    """
    losses: dict[float, float] = {}

    def visit(*powers: float) -> None:
        losses.update({p: loss_at(first * 2**p) for p in powers if p not in losses})

    visit(-1, 0, 1)
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        visit(best - 1, best + 1)
    visit(best - 0.5, best + 0.5)
    best = min(losses, key=losses.__getitem__)
    near = {p: loss for p, loss in losses.items() if abs(p - best) <= 1 and loss < math.inf}
    powers = torch.tensor([[1.0, p, p * p] for p in near], dtype=torch.float64)
    fit = torch.linalg.lstsq(powers, torch.tensor([*near.values()], dtype=torch.float64)[:, None])
    _, linear, square = fit.solution.flatten().tolist()
    lowest = -linear / (2 * square) if square > 0 else best
    lowest = min(max(lowest, best - 1), best + 1)
    return first * 2**lowest, {first * 2**p: losses[p] for p in sorted(losses)}


def drawn(found: Mapping[str, Mapping[int, Sequence[Sizes]]]) -> Picture:
    """Draw each size after the last step over the width."""
    about = "Mean absolute values after five steps over widths, with a base and without."
    picture = Picture("Sizes of activations by width", about, 760, 300)
    names, widths = [*found["with"][WIDTHS[0]][STEPS]], [*found["with"]]
    values = [of[STEPS][name] for way in WAYS for of in found[way].values() for name in names]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    for number, way in enumerate(WAYS):
        left = 60 + 300 * number

        def at(width: int, value: float, left: int = left) -> tuple[float, float]:
            across = math.log(width / widths[0]) / math.log(widths[-1] / widths[0])
            up = (math.log10(value) - low) / (high - low)
            return left + 240 * across, 240 - 200 * up

        picture.text(left, 24, f"{way} model.base_width", bold=True)
        for power in range(low, high + 1):
            picture.line([at(w, 10.0**power) for w in (widths[0], widths[-1])], LINE, 0.5)
            picture.text(
                left - 6, at(widths[0], 10.0**power)[1] + 4, f"{10.0**power:g}", "end", MUTED
            )
        for width in widths:
            picture.text(at(width, 10.0**low)[0], 258, width, "middle", MUTED)
        for name, color in zip(names, COLORS, strict=True):
            picture.line([at(w, of[STEPS][name]) for w, of in found[way].items()], color, 2)
    for number, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        picture.line([(625, 60 + 20 * number), (645, 60 + 20 * number)], color, 2)
        picture.text(652, 64 + 20 * number, name)
    picture.text(330, 290, "width", "middle", MUTED)
    return picture


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = (head, ["---"] + ["---:"] * (len(head) - 1), *rows)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def about(seconds: float) -> dict[str, Any]:
    """Return how a result was made."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    made = {"command": f"python -m benchmarks.coordinate_check {' '.join(sys.argv[1:])}".strip()}
    return made | versions | {"date": date.today().isoformat(), "processor_seconds": round(seconds)}


def page(results: Mapping[str, Any]) -> str:
    """Return the page of both studies, of what was measured."""
    parts = ["## Rates at other widths\n\n<!-- Written by benchmarks/coordinate_check.py. -->"]
    if sizes_found := results.get("sizes"):
        found = {
            way: {int(width): runs for width, runs in of.items()}
            for way, of in sizes_found["found"].items()
        }
        by_way = {way: slopes(found[way]) for way in WAYS}
        ends = {way: (found[way][WIDTHS[0]][STEPS], found[way][WIDTHS[-1]][STEPS]) for way in WAYS}
        rows = [
            [
                name,
                f"{ends['with'][0][name]:.3g}",
                *(f"{ends[way][1][name]:.3g}" for way in WAYS),
                *(f"{by_way[way][name]:+.2f}" for way in WAYS),
            ]
            for name in by_way["with"]
        ]
        wide = [f"at {WIDTHS[-1]:,}, {way}" for way in WAYS]
        head = ["size", f"at {WIDTHS[0]}", *wide, *(f"slope, {way}" for way in WAYS)]
        parts += [
            f"A Llama of {ARGS.n_layers} blocks and {ARGS.n_heads} heads that grow with the width, "
            f"after {STEPS} steps of AdamW at a rate of {RATE:g} on one batch: mean absolute "
            f"values, and the slope of their logarithm over that of the width, with and without "
            f"`model.base_width = {WIDTHS[0]}`.",
            table(head, rows),
            "![Mean absolute values over widths](coordinate_check.svg)",
            made_by(sizes_found),
        ]
    if rates := results.get("rates"):
        best = {name: rate for name, (rate, _) in rates["found"].items()}
        tried = sorted({float(rate) for _, losses in rates["found"].values() for rate in losses})
        rows = [
            [f"{rate:.2e}"]
            + [
                f"{losses[key]:.3f}" if (key := str(rate)) in losses else ""
                for _, losses in rates["found"].values()
            ]
            for rate in tried
        ]
        ratio = {way: best[f"{WIDE}, {way}"] / best[str(NARROW)] for way in WAYS}
        lowest = {way: min(rates["found"][f"{WIDE}, {way}"][1].values()) for way in WAYS}
        parts += [
            f"### The best rate\n\nThe same Llama for {TRAINED} steps of {math.prod(TOKENS)} bytes "
            f"of Python's library: mean loss of the last {LAST}, by rate and width. The base is "
            f"{NARROW}, so there both are the same model.",
            table(["rate", *(f"width {name}" for name in best)], rows),
            f"The minimum of the parabola is at {best[str(NARROW)]:.2e} for {NARROW}. For "
            f"{WIDE} it is {ratio['with']:.2f} times that with `base_width`, and "
            f"{ratio['without']:.2f} times without. The lowest losses of {WIDE} are "
            f"{lowest['with']:.3f} with it and {lowest['without']:.3f} without.",
            made_by(rates),
        ]
    return "\n\n".join(parts) + "\n"


def made_by(result: Mapping[str, Any]) -> str:
    return (
        f"Made by `{result['command']}` with torch {result['torch']}, Python {result['python']}, "
        f"{result['date']}, in {result['processor_seconds']} seconds of one core."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rates", action="store_true", help="search the best rate at two widths")
    torch.set_num_threads(1)
    begun, chosen = time.process_time(), parser.parse_args()
    path = RESULTS / "coordinate_check.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if chosen.rates:
        runs = {str(NARROW): (NARROW, None)}
        runs |= {f"{WIDE}, {way}": (WIDE, NARROW if way == "with" else None) for way in WAYS}
        rates = {name: search(partial(train, width, base)) for name, (width, base) in runs.items()}
        results["rates"] = {"found": rates} | about(time.process_time() - begun)
    else:
        sizes_found = check()
        (RESULTS / "coordinate_check.svg").write_text(str(drawn(sizes_found)))
        results["sizes"] = {"found": sizes_found} | about(time.process_time() - begun)
    path.write_text(json.dumps(results, indent=1) + "\n")
    write_section(RESULTS / "optimizers.md", page(json.loads(path.read_text())))


if __name__ == "__main__":
    main()

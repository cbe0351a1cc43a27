"""Loss by bits, by feedback of errors, and by what replicas exchange: runs and a page of them.

    python benchmarks/low_bits.py --output benchmarks/results/low_bits.md
    python benchmarks/low_bits.py --output benchmarks/results/low_bits.md --seconds 0

The page has three studies. *QSDP*: bits of weights and gradients, at equal distances and learned.
*LoCo*: what becomes of rounding errors, by bits. *Replicas*: what they exchange, at equal bytes.

Four ranks of each run are modelled in one process: a pass with `torch.func` computes the gradient
of each rank's samples, and these go through the communication objects that a real run would open,
over groups of threads. Runs that are in the file of results are not repeated, so the first command
resumes where it was stopped; the second only writes the page again.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from quoted import quote
from torch import Tensor
from torch.func import functional_call, grad, vmap
from variants import ROOT, draw

from torchtitan.build import assemble
from torchtitan.checks import load_job
from torchtitan.comm import Unit
from torchtitan.device import Device
from torchtitan.features import open_validator
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import World, open_world
from torchtitan.parallel.work import Traffic
from torchtitan.parts import Parts, open_stream
from torchtitan.research.common.threads import Meeting, collectives, together
from torchtitan.research.qsdp.qsdp import MOST_BITS

RECIPE = ROOT / "train_configs/debug_model.toml"
RANKS, SEEDS, STEPS, RATE, EVERY = 4, (0, 1, 2), 400, 0.0625, 16
LEARN = 100
"""Steps between updates of learned levels."""
BATCH = 4
"""Runs that advance together, so that a pass over all of them costs less."""

MODEL = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 144, "vocab_size": 264}
COMMON = (
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    *("training.seq_len=64", "training.global_batch_size=8", f"training.steps={STEPS}"),
    *("data.report_unigram_loss=false", "checkpoint.enable=false", "validation.enable=false"),
    *("validation.steps=64", "optimizer.lr=1e-3"),
)
SHARDS = f"parallelism.data_parallel_shard_degree={RANKS}"
REPLICAS = (
    "parallelism.data_parallel_shard_degree=1",
    f"parallelism.data_parallel_replicate_degree={RANKS}",
)

Tensors = dict[str, Tensor]
Results = dict[str, dict[str, dict[str, Any]]]
"""Results of a run, by the name of its case and by seed."""


@dataclass(frozen=True)
class Case:
    """A variant of a study."""

    name: str
    keys: tuple[str, ...]

    def job(self, seed: int, ranks: int = RANKS) -> JobConfig:
        """Return the recipe; of one rank without what concerns several."""
        several = ("communication.", "parallelism.")
        keys = [key for key in self.keys if ranks > 1 or not key.startswith(several)]
        flags = [f"--{key}" for key in (*COMMON, f"debug.seed={seed}", *keys)]
        return load_job(RECIPE, flags, ranks, "cpu").config


def way(section: str, name: str, **settings: object) -> tuple[str, ...]:
    """Return the keys that select a method of communication."""
    settings = {"name": name, **settings}
    return tuple(f"communication.{section}.{key}={value}" for key, value in settings.items())


def rounded(section: str, bits: int, levels: str = "uniform") -> tuple[str, ...]:
    """Return the keys of QSDP for weights or for gradients."""
    more = {"learn_steps": LEARN} if levels == "learned" else {}
    return way(section, "qsdp", bits=bits, bucket=256, levels=levels, **more)


def qsdp(weights: int, gradients: int, levels: str = "uniform") -> Case:
    """Return a case with this many bits for weights and for gradients."""
    keys = (SHARDS, *rounded("weights", weights, levels), *rounded("gradients", gradients, levels))
    return Case(f"QSDP W{weights} G{gradients} {levels}", keys)


LOCO: dict[str, dict[str, object]] = {
    "none": {"compensate": "false"},
    "feedback": {"beta": 0, "reset_steps": 0},
    "average": {"reset_steps": 0},
    "reset": {"reset_steps": 64},
}
"""Errors of LoCo: lost; all of the last one; their moving average; the same, reset."""


def loco(errors: str, bits: int, weights: int | None = None) -> Case:
    sent = way("gradients", "loco", bits=bits, bucket=256, **LOCO[errors])
    more = rounded("weights", weights) if weights else ()
    return Case(
        f"LoCo {errors} {bits}" + (f" W{weights}" if weights else ""), (SHARDS, *more, *sent)
    )


EXCHANGES: dict[str, dict[str, object]] = {
    "demo": {"chunk": 48, "top_k": 39},
    "random": {"rate": RATE},
    "striding": {"rate": RATE},
    "slicing": {"rate": RATE},
}
RATES = {
    ("SGD", True): (1e-3, 3e-3, 1e-2),
    ("SGD", False): (1e-1, 3e-1, 1.0),
    ("AdamW", True): (1e-3, 3e-3, 1e-2),
    ("AdamW", False): (1e-3, 3e-3, 1e-2),
}
"""Learning rates of each base optimizer, with signs and without."""


def replicas(name: str, base: str, sign: bool, lr: float) -> Case:
    """Return a case of replicas that exchange a part of their momentum, or its sign."""
    keys: tuple[str, ...] = (*REPLICAS, f"optimizer.name={base}", f"optimizer.lr={lr:g}")
    if name in EXCHANGES:
        settings = {**EXCHANGES[name], "sign": str(sign).lower()}
        keys += way("replicas", name, **settings)
        keys += ("training.max_norm=0",) if sign else ()
    elif name == "local steps":
        keys += way("replicas", "all_reduce", every=EVERY)
    elif name == "diloco":
        keys += way("replicas", name, every=EVERY)
    else:
        keys += way("replicas", name)
    return Case(f"{name} {base}{' sign' if sign else ''} {lr:g}", keys)


PLAIN = Case("plain", (SHARDS,))


NAMES = ("all_reduce", *EXCHANGES, "local steps", "diloco")
BITS = (8, 6, 5, 4)
HARMED = {
    "QSDP in 2 bits": qsdp(2, 2),
    "LoCo in 2 bits whose errors are lost": loco("none", 2),
}


def kinds() -> Iterator[tuple[str, str, bool]]:
    """Yield each way in which replicas agree, base optimizer, and whether signs are taken."""
    for base in ("SGD", "AdamW"):
        for name in ("all_reduce", "local steps", "diloco"):
            yield name, base, False
        for name in EXCHANGES:
            yield from ((name, base, False), (name, base, True))


def plan(results: Results) -> Iterator[tuple[Case, int]]:
    """Yield all runs, the most telling first; each study is whole before seeds are added."""
    first = [
        *(qsdp(b, b) for b in (*BITS, 2)),
        *(qsdp(b, b, "learned") for b in (5, 4, 2)),
        *(loco(e, b) for b in (2, 3, 4) for e in LOCO),
        *(loco(e, 8) for e in ("none", "average")),
        *(loco(e, 4, 4) for e in ("none", "average")),
    ]
    yield from ((PLAIN, seed) for seed in SEEDS)
    for seed in SEEDS[:2]:
        yield from ((case, seed) for case in first)
    for kind in kinds():
        yield from ((replicas(*kind, lr), SEEDS[0]) for lr in RATES[kind[1:]])
    for seed in SEEDS[1:]:
        yield from ((best(kind, results), seed) for kind in kinds())
    yield from ((case, SEEDS[2]) for case in first)
    for seed in SEEDS:
        yield from ((qsdp(w, g), seed) for w in BITS for g in BITS if w != g)


def best(kind: tuple[str, str, bool], results: Results) -> Case:
    """Return the case with the rate of the lowest loss with the first seed."""
    cases = [replicas(*kind, lr) for lr in RATES[kind[1:]]]
    return min(cases, key=lambda case: loss_of(results, case, SEEDS[0]))


def loss_of(results: Results, case: Case, seed: int) -> float:
    """Return the held-out loss of a run; infinite if it is not there, or not finite."""
    found = results.get(case.name, {}).get(str(seed))
    return found["loss"] if found and found["loss"] is not None else float("inf")


class Dots(NamedTuple):
    """Row of the plot."""

    name: str
    losses: dict[int, float]
    """Gaps by seed."""


class Modelled:
    """All ranks of a run, in this process."""

    def __init__(self, case: Case, seed: int, world: World) -> None:
        self.case, self.seed = case, seed
        job, one = case.job(seed), case.job(seed, 1)
        degrees, ways = job.degrees(RANKS), job.communication
        self.replicas = ways.replicas
        copies = RANKS if self.replicas.runs_apart and degrees.dp_replicate > 1 else 1
        self.parts = [Parts(one, world) for _ in range(copies)]
        self.runs = [assemble(parts) for parts in self.parts]
        self.weights = [dict(run.model.parts[0].named_parameters()) for run in self.runs]
        task = self.parts[0].task
        self.streams = [
            iter(open_stream(job, task, degrees, rank=rank, ranks=RANKS)) for rank in range(RANKS)
        ]
        shapes = {name: p.shape for name, p in self.weights[0].items()}
        self.groups = cast(list[Any], Meeting(RANKS).groups())
        self.gathers, self.reduces, self.agree = [], [], []
        if degrees.fsdp > 1:
            parts = {n: torch.Size((s[0] // RANKS, *s[1:])) for n, s in shapes.items()}
            unit = Unit("", parts, torch.device("cpu"))
            self.gathers = [ways.weights.open(unit, group) for group in self.groups]
            self.reduces = [ways.gradients.open(unit, group) for group in self.groups]
        elif self.replicas.steps_apart is not None:
            unit = Unit("", shapes, torch.device("cpu"))
            self.agree = [self.replicas.open(unit, group) for group in self.groups]
        self.agreed = {name: p.detach().clone() for name, p in self.weights[0].items()}

    def computed_with(self) -> Tensors:
        """Return the weights with which each rank computes: (ranks, ...)."""
        if len(self.runs) > 1:
            return {n: torch.stack([w[n].detach() for w in self.weights]) for n in self.agreed}
        weights = {name: p.detach() for name, p in self.weights[0].items()}
        if self.gathers:
            owned = rows(weights.values())
            (whole, *_) = self._together(lambda rank: gathered(self.gathers[rank], owned[rank]))
            weights = pieces(whole.view(RANKS, -1), weights)
        return {name: w.expand(RANKS, *w.shape) for name, w in weights.items()}

    @torch.no_grad()
    def update(self, gradients: Tensors) -> None:
        """Agree on the gradients of each rank (ranks, ...), and update the weights."""
        if self.reduces:
            sums = self._together(
                lambda rank: reduced(
                    self.reduces[rank], rows(g[rank] for g in gradients.values()).flatten()
                )
            )
            self._step(0, pieces(torch.stack(sums), self.agreed))
            for each in (*self.gathers, *self.reduces):
                each.end_step()
        elif len(self.runs) == 1:
            own = [{n: g[rank].clone() for n, g in gradients.items()} for rank in range(RANKS)]
            self._together(lambda rank: self.agree[rank](own[rank]))
            self._step(0, own[0])
        else:
            for rank in range(RANKS):  # a replica's gradient is that of its own mean
                self._step(rank, {name: g[rank] * RANKS for name, g in gradients.items()})
            every = self.replicas.steps_apart
            if every and self.runs[0].state.step % every == 0:
                self._agree_on_weights()

    def _step(self, number: int, gradients: Tensors) -> None:
        run = self.runs[number]
        run.optimizers.begin(run.schedule(run.state.step + 1))
        for name, parameter in self.weights[number].items():
            parameter.grad = gradients[name]
        norm = run.optimizers.norm()
        run.optimizers.step(norm, float(norm))
        run.state.step += 1

    def _agree_on_weights(self) -> None:
        moved = [
            {name: (self.agreed[name] - p) / RANKS for name, p in weights.items()}
            for weights in self.weights
        ]
        self._together(lambda rank: self.agree[rank](moved[rank]))
        for name, agreed in self.agreed.items():
            agreed.sub_(moved[0][name])
            for weights in self.weights:
                weights[name].copy_(agreed)

    def _together(self, call: Callable[[int], Any]) -> list[Any]:
        return together([partial(call, rank) for rank in range(RANKS)], self.groups)

    def validation_loss(self) -> float:
        """Return the loss of held-out text, with the exact weights of the first replica."""
        found = open_validator(self.parts[0]).run()["validation_loss"]
        assert found is not None
        return float(found)


def gathered(gather: Any, own: Tensor) -> Tensor:
    whole = own.new_empty(RANKS * len(own))
    gather(whole, own.contiguous())
    return whole


def reduced(reduce: Any, whole: Tensor) -> Tensor:
    part = whole.new_empty(len(whole) // RANKS)
    reduce(part, whole)
    return part


def rows(tensors: Any) -> Tensor:
    """Return a row for each rank, with its part of each tensor: (ranks, n)."""
    return torch.cat([tensor.reshape(RANKS, -1) for tensor in tensors], 1)


def pieces(found: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Invert `rows`."""
    parts = torch.split(found, [each.numel() // RANKS for each in like.values()], 1)
    return {n: p.reshape(like[n].shape) for n, p in zip(like, parts, strict=True)}


def train(several: Sequence[tuple[Case, int]], steps: int = STEPS) -> list[dict[str, Any]]:
    """Train several runs in lockstep; return for each its results."""
    started = time.process_time()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Attention has no batching rule, and is computed one rank after the other.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        one = PLAIN.job(0, 1)
        world = stack.enter_context(open_world(one.degrees(1), one.comm, Device("cpu")))
        stack.enter_context(collectives())
        runs = [Modelled(case, seed, world) for case, seed in several]
        for each in runs:
            for run in each.runs:
                stack.callback(run.batches.close)
        model = runs[0].runs[0].model.parts[0]

        def share(weights: Tensors, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = functional_call(model, weights, (tokens,))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / RANKS

        gradients_of = vmap(grad(share))
        for _ in range(steps):
            batches = [next(stream) for each in runs for stream in each.streams]
            found = [each.computed_with() for each in runs]
            weights = {name: torch.cat([w[name] for w in found]) for name in found[0]}
            tokens = torch.stack([batch.inputs for batch in batches])
            targets = torch.stack([batch.targets for batch in batches])
            gradients = gradients_of(weights, tokens, targets)
            for number, each in enumerate(runs):
                own = slice(number * RANKS, (number + 1) * RANKS)
                each.update({name: g[own] for name, g in gradients.items()})
        seconds = (time.process_time() - started) / len(runs)
        about = {
            "seconds": round(seconds, 1),
            "load": round(os.getloadavg()[1], 1),
            "date": time.strftime("%Y-%m-%d"),
        }
        losses = [each.validation_loss() for each in runs]
        return [{"loss": loss if math.isfinite(loss) else None, **about} for loss in losses]


def measure(path: Path, seconds: float) -> Results:
    """Run what is missing in the file of results, for about this long."""
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        missing = (
            (case, seed)
            for case, seed in plan(results)
            if str(seed) not in results.get(case.name, {})
        )
        batch = [each for each, _ in zip(missing, range(BATCH), strict=False)]
        if not batch:
            break
        for (case, seed), found in zip(batch, train(batch), strict=True):
            results.setdefault(case.name, {})[str(seed)] = found
            print(f"{case.name}, seed {seed}: {found}", file=sys.stderr, flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    return results


PAGE = """\
# Low-bit and infrequent communication: loss on held-out text

<!-- Written by benchmarks/low_bits.py. -->

`{command}`: {cores} cores, torch {torch}, Python {python}, {date}.
{runs} of {planned} planned runs are here; where others are missing, a table has no number.

A Llama of {parameters:,} parameters is trained for {steps} steps of {tokens} tokens of the standard
library's text, in float32, by AdamW at {lr} unless a table says otherwise, with {warmup} steps of
warm-up and a cosine. Its {ranks} ranks are modelled in one process: each has its own samples, and
what they send passes through the communication objects of a real run. The loss is that of
{held_out:,} tokens that are not trained on, with exact weights. A run took {seconds:.0f} s of one
core (median), with a load average of {load}; neither changes a loss.

**Gap**: the loss minus that of the same seed without compression, the mean of the seeds (lowest to
highest). A number without a range is of one seed.
{plain_losses}

## QSDP: bits and levels

Weights and gradients have the same bits, in buckets of 256. Learned levels need at most 5 bits;
they are learned every {learn} steps.

{qsdp}

Gaps by the bits of weights (rows) and of gradients (columns), at equal distances:

{grid}

## LoCo: error feedback

*None*: rounding errors are lost. *Feedback*: all of the last error is added to the next gradient
(`beta = 0`). *Average*: a moving average of errors is (`beta = 0.8`). *Reset*: the same, and errors
are set to zero every {reset_steps} steps. Errors are stored in 8 bits. In the last column, weights
are sent by QSDP in 4 bits.

{loco}

## Replicas: what they exchange

There are {ranks} replicas of one rank each. Every method but `all_reduce` sends the same bytes per
step, within {uneven:.1%}, which is 1/{fraction:.0f} of those of an all-reduce of all gradients:
*local steps* and *diloco* exchange the changes of weights every {every} steps, the others a part of
the momentum (`decay = 0.999`), or its sign. With signs nothing is clipped, otherwise the norm is
clipped to {max_norm:g}. The table has **losses**, with the best of three rates of the first seed in
brackets; * marks a rate at an end of the range, beyond which a better one may be.

{replicas}

![Gaps of QSDP and LoCo, by seed]({plot})

## Limits of this study

{limits}- The model is small and its training short: what rounding spoils late, or in large models,
  would not be seen.
- Each rank sends all its parameters as one unit, and no part is padded.
"""


def gaps(results: Results, case: Case, base: Case) -> dict[int, float]:
    """Return the loss minus that of the base, by seed, of the seeds that both have."""
    pairs = {s: (loss_of(results, case, s), loss_of(results, base, s)) for s in SEEDS}
    return {s: ours - theirs for s, (ours, theirs) in pairs.items() if math.isfinite(ours - theirs)}


def spread(values: Iterable[float], style: str) -> str:
    """Return the mean (lowest to highest)."""
    found = list(values)
    if not found:
        return ""
    several = f" ({min(found):{style}} to {max(found):{style}})" if len(found) > 1 else ""
    return f"{statistics.fmean(found):{style}}{several}"


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results: Results) -> dict[str, str]:
    """Return the tables of the page, by name."""

    def gap(case: Case) -> str:
        return spread(gaps(results, case, PLAIN).values(), "+.3f")

    qsdp_rows = [
        [f"{b} bits", gap(qsdp(b, b)), gap(qsdp(b, b, "learned")) if b <= MOST_BITS else "-"]
        for b in (*BITS, 2)
    ]
    grid = [[f"{w} bits", *(gap(qsdp(w, g)) for g in BITS)] for w in BITS]
    loco_rows = [
        [errors, *(gap(loco(errors, b)) for b in (8, 4, 3, 2)), gap(loco(errors, 4, 4))]
        for errors in LOCO
    ]
    return {
        "qsdp": rows_of(["gap", "equal distances", "learned levels"], qsdp_rows),
        "grid": rows_of(["weights", *(f"{b} bits" for b in BITS)], grid),
        "loco": rows_of(
            ["errors", *(f"{b} bits" for b in (8, 4, 3, 2)), "4 bits, and weights in 4"], loco_rows
        ),
        "replicas": rows_of(
            ["exchanged", *(f"{base}{', signs' if sign else ''}" for base, sign in RATES)],
            [[name, *(replica_cell(results, name, *each) for each in RATES)] for name in NAMES],
        ),
    }


def replica_cell(results: Results, name: str, base: str, sign: bool) -> str:
    """Return the losses of a kind at its best rate, and that rate."""
    kind = (name, base, sign)
    if kind not in kinds():
        return "-"
    cases = [replicas(*kind, lr) for lr in RATES[base, sign]]
    if any(str(SEEDS[0]) not in results.get(case.name, {}) for case in cases):
        return ""
    rates, case = RATES[base, sign], best(kind, results)
    losses = [loss for seed in SEEDS if math.isfinite(loss := loss_of(results, case, seed))]
    (lr,) = (lr for lr in rates if replicas(*kind, lr) == case)
    return f"{spread(losses, '.3f')} [{lr:g}{'*' if lr in (rates[0], rates[-1]) else ''}]"


def sent(case: Case) -> float:
    """Return the bytes that a replica sends in a step, on average."""
    job = case.job(SEEDS[0])
    way, model = job.communication.replicas, build_empty_model(job)
    unit = Unit("", {name: p.shape for name, p in model.named_parameters()}, torch.device("cpu"))
    messages = way.messages(unit, RANKS, torch.float32)
    found = (Traffic("dp_replicate", "", operation, size, 1) for operation, size in messages)
    return sum(each.sent(RANKS) for each in found) / (way.steps_apart or 1)


def build_empty_model(job: JobConfig) -> torch.nn.Module:
    spec = MODELS[job.model.name]
    return build_empty(spec.build, job.model_args(), job.training.seq_len)


def limits(results: Results) -> str:
    """Return what the losses themselves say of how much they can tell."""
    plain = [loss for s in SEEDS if math.isfinite(loss := loss_of(results, PLAIN, s))]
    found = {name: gaps(results, HARMED[name], PLAIN).values() for name in HARMED}
    lines = []
    if len(plain) > 1:
        deviation = statistics.stdev(plain)
        lines.append(
            f"- The losses of {len(plain)} seeds without compression have a standard deviation of "
            f"{deviation:.3f}: a seed chooses first weights, samples and held-out text. Gaps are "
            "between runs of one seed: judge a gap by its own range. So few seeds suggest an "
            "order, and do not prove one; a gap with both signs shows nothing."
        )
        lines += [
            f"- Harmed on purpose, {name} is worse by {statistics.fmean(each):.3f}, "
            f"{statistics.fmean(each) / deviation:.1f} such deviations."
            for name, each in found.items()
            if each
        ]
    return "".join(f"{line}\n" for line in lines)


def page(results: Results, plot: str, command: str) -> str:
    runs = [run for seeds in results.values() for run in seeds.values()]
    plain = {s: loss for s in SEEDS if math.isfinite(loss := loss_of(results, PLAIN, s))}
    job, loads = PLAIN.job(SEEDS[0]), [run["load"] for run in runs if "load" in run]
    bytes_of = [sent(replicas(*kind, 1e-3)) for kind in kinds() if kind[0] != "all_reduce"]
    whole = sent(replicas("all_reduce", "AdamW", False, 1e-3))
    return PAGE.format(
        **tables(results),
        command=command,
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=max(run["date"] for run in runs),
        runs=len(runs),
        planned=len({(case.name, seed) for case, seed in plan(results)}),
        parameters=sum(p.numel() for p in build_empty_model(job).parameters()),
        steps=STEPS,
        lr=f"{job.optimizer.lr:g}",
        warmup=job.lr_scheduler.warmup_steps,
        ranks=RANKS,
        held_out=job.validation.steps * job.training.global_batch_size * job.training.seq_len,
        seconds=statistics.median(run["seconds"] for run in runs),
        load=f"{min(loads):.0f} to {max(loads):.0f}" if loads else "unknown",
        plain_losses="Without compression the losses are "
        + ", ".join(f"{loss:.3f} (seed {seed})" for seed, loss in plain.items())
        + ".",
        learn=LEARN,
        tokens=job.training.global_batch_size * job.training.seq_len,
        max_norm=job.training.max_norm,
        **LOCO["reset"],
        every=EVERY,
        uneven=max(bytes_of) / min(bytes_of) - 1,
        fraction=whole / statistics.fmean(bytes_of),
        plot=plot,
        limits=limits(results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="page; results are next to it")
    parser.add_argument("--docs", type=Path, help="folder of the pages that quote the tables")
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which to stop")
    arguments = parser.parse_args()
    logger.setLevel("ERROR")
    output: Path = arguments.output
    results = measure(output.with_suffix(".json"), arguments.seconds)
    plot = output.with_suffix(".svg")
    text = page(results, plot.name, f"python benchmarks/low_bits.py --output {output}")
    output.write_text(text)
    drawn = [
        Dots(case.name, found)
        for case in dict.fromkeys(case for case, _ in plan(results))
        if case is not PLAIN and "replicas" not in str(case.keys)
        if (found := gaps(results, case, PLAIN))
    ]
    plot.write_text(str(draw(drawn, "method", "loss minus that without compression")))
    if arguments.docs:
        quoted = tables(results)
        for name, document in (("qsdp", "qsdp"), ("loco", "loco"), ("replicas", "demo")):
            if re.search(r"\d\.\d", quoted[name]):
                quote("low_bits.py", quoted[name], arguments.docs / f"{document}.md")


if __name__ == "__main__":
    main()

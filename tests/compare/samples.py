"""A report of a comparison, with all that can happen in one."""

import math
import random

from tests.tables import data
from torchtitan.tools.compare import results
from torchtitan.tools.compare.runs import spread

HOSTILE = (
    "</script><script>window.broken = 1</script> & \"quotes\" 'single' <b>bold</b> %{x} \\u003c"
)
UNICODE = "größer → 流水线 🚀 تجربة"
LONG = "fsdp 2, tensor 2, float8 rowwise, full activation checkpointing, " + "very_long_name" * 8
STEPS = tuple(range(1, 101))
TABLE = data(__file__)
PHASES = ("data", "forward", "backward", "clip", "sync", "optimizer", "other", "checkpoint")


MEASURED = (
    *("tps", "ratio", "step_s", "memory_gib", "mfu", "exposed_communication"),
    *("startup_s", "compile_s", "loss", "grad_norm"),
)


def curve(off, seed, tokens, start, end):
    """A descent with noise that is the same in all runs of a seed, times 1 + off at the end."""
    noise = random.Random(seed)
    values = [
        (end + (start - end) * math.exp(-step / 30) + 0.05 * noise.uniform(-1, 1))
        * (1 + off * step / len(STEPS))
        for step in STEPS
    ]
    return results.RunCurve(STEPS, tuple(step * tokens for step in STEPS), tuple(values))


def ran(
    name, speed, parity, *, off=0.0, differs=None, layout=None, tokens=16_384, rounds=3, seed=0
):
    """A variant that ran, `speed` times as fast as the baseline."""
    noise = random.Random(name)
    medians = [10_000 * speed * noise.uniform(0.97, 1.03) for _ in range(rounds)]
    shares = [noise.uniform(0.2, 1) * weight for weight in (1, 8, 16, 1, 1, 2, 1, 1)]
    grads = curve(10 * off, seed + 1, tokens, 3.0, 0.6)
    layout = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1} | (layout or {})
    runs = [
        results.FinishedRun(
            *(f"runs/{round}-{noise.getrandbits(32):08x}", round, seed),
            *(spread([median * noise.uniform(0.95, 1.05) for _ in range(20)]), 12.5 + round),
        )
        for round, median in enumerate(medians)
    ]
    sent = {"dp_shard": 3.1e9 / speed, "loss": 1.2e3}
    collectives = (
        results.Collectives("dp_shard", "all_gather", 12, 3e9 / speed, 12, 3e9 / speed),
        results.Collectives("dp_shard", "send", None, None, 6, 1.5e8),
        results.Collectives("loss", "all_reduce", 4, 1.2e3, None, None),
    )
    return results.Variant(
        *(name, "ran", (), differs or {}, 4, layout, "tokens", tokens, tuple(runs)),
        tps=spread(medians),
        ratio=spread([1.0 if speed == 1 else median / 10_000 for median in medians]),
        step_s=spread([tokens / 4 / median for median in medians]),
        memory_gib=11.7 / speed,
        mfu=0.31234 * speed,
        time_shares={p: value / sum(shares) for p, value in zip(PHASES, shares, strict=True)},
        exposed_communication=0.08 * speed,
        sent_bytes=sent | ({"tp": 1.4e9} if layout["tp"] > 1 else {}),
        collectives=collectives,
        compile_s=6.5 if speed > 1.1 else None,
        parity=parity,
        loss=curve(off, seed, tokens, 8.0, 3.2),
        grad_norm=grads,
        **TABLE["ran"],
    )


def absent(name, status, reasons):
    """A variant without numbers."""
    differs = {"parallelism.tensor_parallel_degree": 3}
    parity = results.Parity("not judged", "It has no run.")
    return results.Variant(
        *(name, status, reasons, differs, 4, {"tp": 3}, "tokens", 16_384, ()),
        time_shares={},
        sent_bytes={},
        sent_note="",
        parity=parity,
        **dict.fromkeys(MEASURED),
    )


def sample():
    """Four variants that ran and have a parity verdict, one not judged, one that failed, one that
    cannot run."""
    why = "Every loss is within the tolerance, which is ten times what bfloat16 rounds by."
    near = results.CurveDifference(2e-6, 10, 2.4e-3), results.CurveDifference(2e-5, 10, 7.3e-2)
    same = results.Parity("same", why, *near)
    why = "linears in Float8 or MXFP8 have no tolerance by dtype"
    rounded = results.Parity("not judged", why, results.CurveDifference(0.019, 76, 0.0))
    why = "The loss is off by 6e-4 in the first step."
    other = results.Parity("differs", why, results.CurveDifference(6e-4, 1, 2.4e-4))
    baseline = results.Parity("baseline", "What the others are compared with.")
    unasked = results.Parity("not judged", "The study has [parity] enable = false for it.")
    degree = "parallelism.tensor_parallel_degree"
    eager = {degree: 1, "compile.enable": False}
    compiled, rounds_to_8 = eager | {"compile.enable": True}, {"convert": [{"name": "<float8>"}]}
    split = {"differs": compiled | {degree: 2}, "layout": {"dp_shard": 2, "tp": 2}}
    too_many = f"{degree}: 3 does not divide the 8 key/value heads of llama3 1B; use 1, 2 or 4"
    variants = (
        ran("fsdp", 1.0, baseline, differs=eager),
        ran(UNICODE, 1.18, same, off=2e-5, **split),
        ran(LONG, 1.04, rounded, off=5e-3, differs=compiled, tokens=32_768, seed=5),
        ran(HOSTILE, 1.41, other, off=0.06, differs=eager | rounds_to_8),
        ran("exact", 0.97, unasked, rounds=1),
        absent("tp 3", "cannot run", (too_many,)),
        absent("too big", "failed", ("rank 2: out of memory in the backward of <step 1>",)),
    )
    notes = (f"“{LONG[:20]}…” trains on batches twice as large.", "Speeds are of one machine.")
    return results.Report(**TABLE["report"], variants=variants, notes=notes)

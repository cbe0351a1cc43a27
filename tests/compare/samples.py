"""A report of a comparison, with all that can happen in one."""

import math
import random

from torchtitan.tools.compare import results
from torchtitan.tools.compare.runs import spread

HOSTILE = (
    "</script><script>window.broken = 1</script> & \"quotes\" 'single' <b>bold</b> %{x} \\u003c"
)
UNICODE = "größer → 流水线 🚀 تجربة"
LONG = "fsdp 2, tensor 2, float8 rowwise, full activation checkpointing, " + "very_long_name" * 8
STEPS = tuple(range(1, 101))
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
    return results.Variant(
        name=name,
        status="ran",
        reasons=(),
        differs=differs or {},
        ranks=4,
        layout={"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1} | (layout or {}),
        unit="tokens",
        units_per_step=tokens,
        runs=tuple(
            results.FinishedRun(
                f"runs/{round}-{noise.getrandbits(32):08x}",
                round,
                seed,
                spread([median * noise.uniform(0.95, 1.05) for _ in range(20)]),
                12.5 + round,
            )
            for round, median in enumerate(medians)
        ),
        tps=spread(medians),
        ratio=spread([1.0 if speed == 1 else median / 10_000 for median in medians]),
        step_s=spread([tokens / 4 / median for median in medians]),
        memory_gib=11.7 / speed,
        mfu=0.31234 * speed,
        time_shares={p: value / sum(shares) for p, value in zip(PHASES, shares, strict=True)},
        exposed_communication=0.08 * speed,
        sent_bytes={"dp_shard": 3.1e9 / speed, "loss": 1.2e3}
        | ({"tp": 1.4e9} if (layout or {}).get("tp", 1) > 1 else {}),
        sent_note="From the flight recorder; tensor parallelism from a formula",
        collectives=(
            results.Collectives("dp_shard", "all_gather", 12, 3e9 / speed, 12, 3e9 / speed),
            results.Collectives("dp_shard", "send", None, None, 6, 1.5e8),
            results.Collectives("loss", "all_reduce", 4, 1.2e3, None, None),
        ),
        memory_formula={"parameters": 1.25, "gradients": 1.25, "states": 2.5},
        state_bytes=2_684_354_560,
        startup_s=14.25,
        compile_s=6.5 if speed > 1.1 else None,
        parity=parity,
        loss=curve(off, seed, tokens, 8.0, 3.2),
        grad_norm=grads,
        experts={"busiest_share": 0.4, "entropy": 0.95},
        expert_loads={"layers.1": [0.25, 0.25, 0.3, 0.2], "layers.2": [0.1, 0.4, 0.2, 0.3]},
    )


def absent(name, status, reasons):
    """A variant without numbers."""
    return results.Variant(
        name=name,
        status=status,
        reasons=reasons,
        differs={"parallelism.tensor_parallel_degree": 3},
        ranks=4,
        layout={"tp": 3},
        unit="tokens",
        units_per_step=16_384,
        runs=(),
        time_shares={},
        sent_bytes={},
        sent_note="",
        parity=results.Parity("not judged", "It has no run."),
        **dict.fromkeys(MEASURED),
    )


def sample():
    """Four variants that ran and have a parity verdict, one not judged, one that failed, one that
    cannot run."""
    same = results.Parity(
        "same",
        "Every loss is within the tolerance, which is ten times what bfloat16 rounds by.",
        results.CurveDifference(2e-6, 10, 2.4e-3),
        results.CurveDifference(2e-5, 10, 7.3e-2),
    )
    rounded = results.Parity(
        "not judged",
        "linears in Float8 or MXFP8 have no tolerance by dtype",
        results.CurveDifference(0.019, 76, 0.0),
    )
    differs = results.Parity(
        "differs",
        "The loss is off by 6e-4 in the first step.",
        results.CurveDifference(6e-4, 1, 2.4e-4),
    )
    degree = "parallelism.tensor_parallel_degree"
    return results.Report(
        title="Four devices, a 1B model: <which> layout & precision?",
        description="One recipe, six ways to lay it out; 100 steps of 16,384 tokens on C4.",
        created="2026-03-14T15:09:26+01:00",
        command="torchtitan compare study.toml --out 'comparison <1>'",
        machine={
            "device": "NVIDIA H200",
            "devices": 4,
            "platform": "Linux-6.8-x86_64",
            "torch": "2.13.0",
            "torchtitan": "0.1.0",
        },
        conditions={
            "rounds": 3,
            "steps": 100,
            "warm-up": "10 steps left out",
            "recipe": "train_configs/llama3_1b.toml",
        },
        baseline="fsdp",
        variants=(
            ran(
                "fsdp",
                1.0,
                results.Parity("baseline", "What the others are compared with."),
                differs={degree: 1, "compile.enable": False},
            ),
            ran(
                UNICODE,
                1.18,
                same,
                off=2e-5,
                differs={degree: 2, "compile.enable": True},
                layout={"dp_shard": 2, "tp": 2},
            ),
            ran(
                LONG,
                1.04,
                rounded,
                off=5e-3,
                differs={degree: 1, "compile.enable": True},
                tokens=32_768,
                seed=5,
            ),
            ran(
                HOSTILE,
                1.41,
                differs,
                off=0.06,
                differs={degree: 1, "compile.enable": False, "convert": [{"name": "<float8>"}]},
            ),
            ran(
                "exact",
                0.97,
                results.Parity("not judged", "The study has [parity] enable = false for it."),
                rounds=1,
            ),
            absent(
                "tp 3",
                "cannot run",
                (f"{degree}: 3 does not divide the 8 key/value heads of llama3 1B; use 1, 2 or 4",),
            ),
            absent("too big", "failed", ("rank 2: out of memory in the backward of <step 1>",)),
        ),
        notes=(f"“{LONG[:20]}…” trains on batches twice as large.", "Speeds are of one machine."),
    )

"""What torch's Flight Recorder costs: host memory, and time of a step, by its number of entries.

    python benchmarks/recording.py --page benchmarks/results/recording.md

Each side is a run of the debug model, FSDP2 on two processes, with a recorder of its own size: a
process has one, made with its first group. The sides take turns, a block of steps each, and the
ratio to the side without a recorder is taken block by block. Memory is what rank 0 has grown by
since its fifth step, less what that side has. Short sequences make a step short, so that recording
takes more of it than it would of a real one.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import RECIPE, ours

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.device import pick
from torchtitan.flight_recorder import recorded
from torchtitan.local_ranks import run_ranks
from torchtitan.parallel import open_world

SIZES = (0, 2000, 20000)
RANKS, SEQ_LEN, WARMUP = 2, 32, 5
FLAGS = f"""--no-checkpoint.enable --no-validation.enable --no-data.report_unigram_loss
    --training.seq_len {SEQ_LEN} --training.steps 100000 --training.local_batch_size 1
    --training.global_batch_size {RANKS}""".split()
PLACE = re.compile(r"(?<=<!-- RECORDING -->\n).*?(?=<!-- END -->)", re.DOTALL)


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def take_part(size: int, turns: Path, blocks: int, steps: int) -> dict[str, Any]:
    """One rank of one side; `turns` is a folder in which a file says that a turn is over."""
    found: dict[str, Any] = {"wall": [], "processor": []}
    stay = staying()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        words = [*FLAGS, "--job.dump_folder", folder, "--comm.trace_buf_size", str(size)]
        job = load_job(RECIPE, words, RANKS, pick().type).config
        world = stack.enter_context(open_world(job.degrees(RANKS), job.comm))
        step = stack.enter_context(ours(build(job, world)))
        for _ in range(WARMUP):
            step()
        began = resident()
        before = recorded()[-1].number if size else 0
        for block in range(blocks):
            place = SIZES.index(size)
            order = place if block % 2 == 0 else len(SIZES) - 1 - place
            while not (turns / f"{block * len(SIZES) + order}").exists():
                stay()
                time.sleep(0.005)
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            found["processor"].append((time.process_time() - processor) / steps)
            dist.barrier()
            found["wall"].append((time.perf_counter() - wall) / steps)
            if world.rank == 0:
                (turns / f"{block * len(SIZES) + order + 1}").touch()
        found["grown"] = resident() - began
        found["recorded"] = (recorded()[-1].number - before if size else 0) / (blocks * steps)
    return found


def staying() -> Callable[[], None]:
    """What ends this process, and so those that wait for it, once the one that made it is gone."""
    parent = os.getppid()

    def stay() -> None:
        if os.getppid() != parent:
            raise SystemExit("what started this is gone")

    return stay


def measure(blocks: int, steps: int) -> dict[int, dict[str, Any]]:
    """What rank 0 of each side found."""
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder)
        (turns / "0").touch()
        sides = {}
        for size in SIZES:
            command = [sys.executable, __file__, "--side", str(size), "--turns", folder]
            command += ["--blocks", str(blocks), "--steps", str(steps)]
            environment = os.environ | {"TORCH_FR_BUFFER_SIZE": str(size), "OMP_NUM_THREADS": "1"}
            sides[size] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        try:
            return {size: json.loads(side.communicate()[0]) for size, side in sides.items()}
        finally:
            for side in sides.values():
                side.kill()


def table(found: dict[int, dict[str, Any]], blocks: int, steps: int) -> str:
    """The sides beside each other, as Markdown."""
    none, done = found[0], blocks * steps
    each = max(side["recorded"] for side in found.values())
    lines = [
        f"The debug model on {RANKS} ranks (FSDP), {done:,} steps of {SEQ_LEN} tokens on each rank "
        f"with {each:.0f} collectives each, {blocks} blocks in turns; {pick().name}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {time.strftime('%d %B %Y')}; medians with quartiles. "
        "A step was "
        f"{1e3 * statistics.median(none['wall']):.0f} ms long.",
        "",
        "| `comm.trace_buf_size` | entries kept | their host memory on a rank, MiB | of one, KiB "
        "| time of a step, ratio | processor time of a step, ratio |",
        "|---|---|---|---|---|---|",
    ]
    for size, side in found.items():
        more = side["grown"] - none["grown"]
        kept = min(size, round(side["recorded"] * (done + WARMUP)))
        cells = [f"{kept:,}", f"{more / 2**20:.0f}", f"{more / 2**10 / kept:.1f}" if kept else "-"]
        for kind in ("wall", "processor"):
            pairs = zip(side[kind], none[kind], strict=True)
            low, middle, high = statistics.quantiles([one / other for one, other in pairs], n=4)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})" if size else "1")
        lines.append(f"| {size:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=30, help="steps in a block")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = arguments.blocks, arguments.steps
    if arguments.turns:
        given = arguments.side, arguments.turns, *sizes
        first, *_ = run_ranks(take_part, RANKS, *given, meanwhile=staying())
        print(json.dumps(first))
        return
    text = table(measure(*sizes), *sizes)
    print(text)
    if arguments.page:
        page = arguments.page.read_text(encoding="utf-8")
        replaced, count = PLACE.subn(lambda match: text, page, count=1)
        assert count == 1, f"{arguments.page} has no place for the table"
        arguments.page.write_text(replaced, encoding="utf-8")


if __name__ == "__main__":
    main()

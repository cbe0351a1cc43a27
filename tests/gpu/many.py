"""Stage 4: what one rank of many computes, with a process group that only pretends to send."""

import os
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from tests.fusion import WITHOUT_CODE
from tests.gpu import pool
from tests.gpu.planned import fake_rank, planned
from tests.gpu.timing import fresh
from tests.orders import noted
from tests.tables import table
from torchtitan.checks import load_job
from torchtitan.models import MODELS
from torchtitan.research.simple_fsdp.bucketing import tallies
from torchtitan.torch_private.compiler import compiler_counts

ROOT = Path(__file__).resolve().parents[2]


class Layout(NamedTuple):
    recipe: str
    ranks: int
    rank: int
    flags: str


CASES = {
    name: Layout(recipe, int(ranks), int(rank), flags)
    for name, recipe, ranks, rank, flags in table(__file__, "many.txt")
}
SHARDED = [name for name in CASES if name.startswith("8B of 8 layers, ")]
TWICE = "8B of 4 layers, launched twice"
PEAKS = {"cuda": ("GiB", "GiB allocated"), "cpu": ("GiB",)}
"""On a CPU of all that is resident, which is not compared."""


def launched_twice(device, backend):
    """Train a recipe in a process with an empty compiler cache, and in one with what that left.

    Both must have the same peaks: of one recipe on an H100, the first launch once reserved 33.7 GiB
    and the second 37.3.
    """
    case, found = f"{'8B, 4 layers' if device.type == 'cuda' else 'toy'}: compiled", {}
    with tempfile.TemporaryDirectory() as folder:
        graphs = Path(folder, "graphs")
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(graphs), "TRITON_CACHE_DIR": f"{folder}/kernels"}
        for cache in ("cold", "warm"):
            with mock.patch.dict(os.environ, caches):
                worker = pool.Worker(("fast", device.type, backend), f"{folder}/log")
            with closing(worker):
                result = worker.ask(case, limit=115)
            assert result.error is None, f"{cache}: {result.error}\n{result.traceback}"
            found |= {f"{cache} {peak}": result.figures[peak] for peak in PEAKS[device.type]}
        for peak in PEAKS["cuda"] if device.type == "cuda" else ():
            assert any(graphs.iterdir()), "nothing was cached"
            assert abs(found[f"warm {peak}"] / found[f"cold {peak}"] - 1) <= 0.02, found
    return found


def check(name, device, backend):
    """Time the steps of a rank: forward and backward, and the update."""
    if name == TWICE:
        return launched_twice(device, backend)
    layout = CASES[name]
    flags = [*layout.flags.split(), "--model.tokenizer_path", "none"]
    if device.type == "cpu":  # a rehearsal
        flags += ["--training.seq_len", "128", "--model.flavor", "debugmodel"]
        if name in SHARDED:
            flags += ["--model.n_layers", "2"]
        else:
            flags += ["--training.local_batch_size", "16", "--model.n_layers", "16"]
            flags += ["--compile.enable", "false"]
        if "--convert.0.name" in flags:
            flags += ["--convert.0.emulate", "true"]
    path = ROOT / "train_configs" / f"{layout.recipe}.toml"
    job = load_job(path, flags, layout.ranks, device.type).config
    # One batch is measured, so one is planned: with more, gradients stay from one to the next.
    batch_size = job.training.local_batch_size * job.data_ranks(job.degrees(layout.ranks))
    once = job.training.model_copy(update={"global_batch_size": batch_size})
    job = job.model_copy(update={"training": once})
    if device.type == "cpu" and name in SHARDED:  # a recipe cannot ask for it
        unmade = job.compile.model_copy(update={"backend": WITHOUT_CODE})
        job = job.model_copy(update={"compile": unmade})
    fresh(device)
    compiler_counts()["inductor"].clear()
    with ExitStack() as stack:
        orders = stack.enter_context(noted())
        # Graphs of its own: of those in a cache neither order nor time to compile would be seen.
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache))
        model, optimizers, batch = stack.enter_context(
            fake_rank(job, layout.ranks, layout.rank, device)
        )
        seconds, updates = [], []
        for _ in range(4):
            begin = time.perf_counter()
            model.forward_backward([batch], torch.tensor(1.0, device=device.torch_device))
            device.synchronize()
            middle = time.perf_counter()
            optimizers.clip(job.training.max_norm, optimizers.norm().complete())
            optimizers.step()
            optimizers.begin(1.0)
            device.synchronize()
            seconds.append(middle - begin)
            updates.append(time.perf_counter() - middle)
        compute = statistics.median(seconds[1:])
        args = job.model_args()
        # Of the whole model's arithmetic, the part that falls to this rank.
        tokens = job.training.local_batch_size * job.training.seq_len
        parts = job.degrees(layout.ranks).tp * job.degrees(layout.ranks).pp
        flops = MODELS[job.model.name].flops_per_unit(args, job.training.seq_len) * tokens / parts
        found = {"forward and backward s": compute, "first s": seconds[0], "tokens": tokens}
        found |= {"spread": [min(seconds[1:]), max(seconds[1:])], "GiB": device.memory_peak()}
        found |= {"update s": statistics.median(updates[1:]), "TFLOP/s": flops / compute / 1e12}
        if peak := device.peak_flops(torch.bfloat16):
            found["MFU without waiting"] = flops / compute / peak
        if collectives := tallies():
            found["collectives"] = {kind: tally._asdict() for kind, tally in collectives.items()}
            found["products before collectives"] = orders["after"]
    memory = planned(job, layout.ranks, layout.rank, device)["planned GiB"]
    return found | {"planned GiB": memory}


def names(rehearsed):
    return [*CASES, TWICE]

"""Stage 6: memory and speed of systems from papers, each at the size that it is meant for."""

import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import tomllib
import warnings
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.gpu import page
from tests.gpu.planned import fake_rank, planned
from tests.gpu.timing import fresh, in_turns
from tests.tables import data, table
from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.device import GIB
from torchtitan.optim.parameters import NamedParameter
from torchtitan.parallel import open_world
from torchtitan.plan.hardware import find_hardware, hardware_names
from torchtitan.plan.plan import plan
from torchtitan.research.galore.low_rank import Method, Projection, find_bases
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
CARD_GIB, CONTEXT_GIB = 23.6, 0.5
"""Memory of a card of 24 GB as torch reports it, and what a process takes outside the allocator."""


class Rank(NamedTuple):
    ranks: int
    flags: str


RANKS = {
    f"8B: {name}": Rank(int(ranks), flags) for name, ranks, flags in table(__file__, "systems.txt")
}
SMALL_CARD, REFRESH = data(__file__)["small_card"], data(__file__)["refresh"]
SIZES = ("base", "huge", "1b", "3b")
IMAGES = {
    f"ViT-MAE {size}: {how}": (size, how)
    for how in ("files of 256 x 256", "files of 1,024 x 768", "drawn")
    for size in SIZES
}
"""Size, and the images: each case trains on one batch again and again too, for the ratio."""


def names(rehearsed):
    """All cases, the most telling first; in a rehearsal one of each kind of work."""
    first = [*SMALL_CARD][:2]
    cases = [*first, *RANKS, *REFRESH, *IMAGES, *[*SMALL_CARD][2:]]
    alike = re.compile(
        "refresh of 11|8B: FSDP (?!512)[0-9]|ViT-MAE (huge|1b|3b)|7B.*(float32|bf16)"
    )
    return [name for name in cases if not rehearsed or not alike.search(name)]


def check(name, device, backend):
    """Measure a case; a rank that runs out of memory is a result too."""
    fresh(device)
    measure = next(way for cases, way in WAYS if name in cases)
    # A rehearsal compiles nothing: an update of states in few bits takes a minute.
    stance = "default" if device.type == "cuda" else "force_eager"
    try:
        with torch.compiler.set_stance(stance):
            found = measure(name, device, backend)
    except torch.OutOfMemoryError as error:
        found = {"out of memory": str(error).splitlines()[0]}
    if device.type == "cpu" and name in RANKS:
        found |= planned(job_of(name, device.type, backend), RANKS[name].ranks, 0, device)
    return found


def job_of(name, kind, backend):
    """Return the recipe of a rank on a kind of device."""
    rank = RANKS[name]
    flags = ["--training.local_batch_size", "1", "--training.global_batch_size", "-1"]
    flags += ["--model.tokenizer_path", "none", "--activation_checkpoint.mode", "full"]
    flags += ["--compile.backend", backend, *rank.flags.split()]
    if kind == "cpu" and "--compile.enable" not in flags:
        flags += ["--compile.enable", "false"]
    if kind == "cpu":  # a rehearsal
        flags += ["--model.flavor", "debugmodel", "--training.seq_len", "32"]
        flags += ["--model.n_layers", "2", "--training.mixed_precision_param", "float32"]
        flags += ["--optimizer.rank", "16"] if "GaLore" in name else []
    path = ROOT / "train_configs/llama3_8b.toml"
    return load_job(path, flags, rank.ranks, kind).config


def one_of_many(name, device, backend):
    """Time steps of a rank of the fake group."""
    job, ranks = job_of(name, device.type, backend), RANKS[name].ranks
    one = torch.tensor(1.0, device=device.torch_device)
    with fake_rank(job, ranks, 0, device) as (model, optimizers, batch):
        optimizers.state_dict()  # creates the states
        for key, state in optimizers.states():
            if key.endswith(".step"):  # so that GaLore has a basis
                state.fill_(1)

        def step():
            optimizers.begin(1.0)
            model.forward_backward([batch], one)
            norm = optimizers.norm().complete()
            if job.training.max_norm:
                optimizers.clip(job.training.max_norm, norm)
            optimizers.step()

        tokens = job.training.local_batch_size * job.training.seq_len
        return steps(step, device) | {"ranks": ranks, "tokens": tokens}


def steps(step, device, rounds=4):
    """Time steps after the first; and the peak of the memory."""
    seconds = []
    for _ in range(1 + (rounds if device.type == "cuda" else 2)):
        begin = time.perf_counter()
        step()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    first, *later = seconds
    return {
        "ms": 1000 * statistics.median(later),
        "spread": [1000 * min(later), 1000 * max(later)],
        "first s": first,
        "GiB": device.memory_peak(),
    }


def small_card(name, device, backend):
    """Train 7B for ten steps where the allocator may reserve what a card of 24 GB leaves it.

    Bases are refreshed every three steps, so that three refreshes are timed after that of the first
    step, which also compiles.
    """
    import tomlkit

    recipe = tomlkit.parse((ROOT / "train_configs/research/galore_7b.toml").read_text()).unwrap()
    optimizer = recipe["optimizer"]
    recipe["optimizer"] = optimizer | SMALL_CARD[name] | {"refresh_period": 3}
    if "AdamW" in name:
        for key in ("rank", "refresh_period", "basis_dtype", "svd_dtype"):
            recipe["optimizer"].pop(key, None)
    del recipe["data"], recipe["model"]["tokenizer_path"], recipe["checkpoint"]
    if device.type == "cpu":
        recipe["model"] = {"flavor": "debugmodel", "n_layers": 2}
        recipe["training"] |= {"local_batch_size": 1, "global_batch_size": 1}
        recipe["optimizer"] |= {"rank": 16} if "GaLore" in name else {}
    allowed = CARD_GIB - CONTEXT_GIB
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(allowed / device.memory_capacity())
    try:
        with opened(recipe, device) as run:
            statuses, seconds = [], []

            def agree(*given):
                statuses.append(agree_as_usual(*given))
                return statuses[-1]

            trainer, agree_as_usual = Trainer(run), run.agree
            run.agree = agree
            for _ in range(10):
                begin = time.perf_counter()
                trainer.step()
                device.synchronize()
                seconds.append(time.perf_counter() - begin)
            ordinary = statistics.median(seconds[n] for n in range(1, 10) if n % 3)
            refreshed = statistics.median(seconds[3::3])
            losses = [status.highest_loss for status in statuses]
            assert len(losses) == 10, losses
            assert all(map(math.isfinite, losses)), losses
            return {
                "ms": 1000 * ordinary,
                "refresh s": refreshed - ordinary,
                "first s": seconds[0],
                "GiB": device.memory_peak(),
                "allowed GiB": allowed,
                "losses": losses,
                "tokens": recipe["training"]["local_batch_size"] * recipe["training"]["seq_len"],
            }
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def opened(recipe, device):
    """Open a run on one rank, in a folder that is deleted."""
    import tomlkit

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        recipe["job"] = {"dump_folder": folder}
        recipe["metrics"] = {"log_freq": 1_000_000, "save_events": False}
        path = Path(folder) / "recipe.toml"
        path.write_text(tomlkit.dumps(recipe))
        job = load_job(path, [], 1, device.type, is_here=True).config
        with open_world(job.degrees(1), job.comm, device) as world:
            run = build(job, world)
            with closing(run.batches), run.meter:
                yield run


def refresh(name, device, backend):
    """Time ways to find the basis of a gradient, and the part of its squares that each keeps."""
    rows, columns, rank = REFRESH[name]
    if device.type == "cpu":
        rows, columns, rank = rows // 32, columns // 32, rank // 32
    gradient = decaying(rows, columns).to(device.torch_device)
    taken, first = in_turns(ways_to_find(gradient, rank), device, 3)

    def energy(basis):
        return ((gradient @ basis).square().sum() / gradient.square().sum()).item()

    return {
        "methods": {
            method: {
                "ms": [1000 * f(seconds) for f in (statistics.median, min, max)],
                "energy": energy(first[method][0]),
            }
            for method, seconds in taken.items()
        }
    }


def decaying(rows, columns):
    """Return a gradient (rows, columns), float32: noise, and directions that decay slowly."""
    torch.manual_seed(0)
    least = min(rows, columns)
    left, right = torch.randn(rows, least), torch.randn(least, columns)
    return (left * torch.arange(1, least + 1) ** -0.7) @ right


def ways_to_find(gradient, rank, iterations=2, oversampling=8):
    """Return functions that find a basis (columns, rank) of a gradient (rows, columns)."""
    parameter = torch.nn.Parameter(torch.empty_like(gradient))
    parameter.grad = gradient
    projection = Projection(NamedParameter(parameter, "weight", "matrix"), rank, 1)

    def ours(method):
        return lambda: next(find_bases([projection], ["0"], method))

    def randomized(dtype):
        return ours(Method(False, iterations, oversampling, dtype))

    def theirs(given):
        return torch.svd_lowrank(given, q=rank + oversampling, niter=iterations)[2][:, :rank]

    return {
        "randomized, float32": randomized(torch.float32),
        "torch.svd_lowrank, float32": lambda: theirs(gradient),
        "randomized, float64": randomized(torch.float64),
        "torch.svd_lowrank, float64": lambda: theirs(gradient.double()).to(gradient.dtype),
        "exact, float64": ours(Method(exact=True)),
        "torch.linalg.svd, float32": lambda: (
            torch.linalg.svd(gradient, full_matrices=False)[2][:rank].T
        ),
    }


def images(name, device, backend):
    """Train a ViT-MAE on new images, and on one batch again and again."""
    size, how = IMAGES[name]
    own = tomllib.loads((ROOT / f"train_configs/vit_mae_{size}.toml").read_text())
    base = tomllib.loads((ROOT / "train_configs/base/vit_mae.toml").read_text())
    recipe = {key: {**base.get(key, {}), **own.get(key, {})} for key in {*base, *own} - {"extends"}}
    recipe |= {"checkpoint": {}}
    recipe["training"].pop("global_batch_size")
    recipe["compile"]["backend"] = backend
    if device.type == "cpu":
        recipe["model"]["flavor"] = "debugmodel"
        recipe["training"]["local_batch_size"] = 4
        recipe["compile"]["enable"] = False
        recipe["data"]["num_workers"] = 2
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if how == "drawn":
            recipe["data"] = {"dataset": "scenes", "num_workers": recipe["data"]["num_workers"]}
        else:
            recipe["data"]["dataset_path"] = folder
            try:
                write_images(Path(folder), how, 512 if device.type == "cuda" else 16)
            except ModuleNotFoundError as error:
                return {"left out": f"{error.name} is not installed"}
        run = stack.enter_context(opened(recipe, device))
        step = Trainer(run).step
        found = steps(step, device, rounds=20)
        again = Same(next(run.batches))
        run.batches.close()
        run.batches = again
        same = steps(step, device, rounds=20)["ms"]
        count, cores = recipe["training"]["local_batch_size"], len(os.sched_getaffinity(0))
        rates = {"images/s": 1000 * count / found["ms"], "same/s": 1000 * count / same}
        return found | rates | {"images": count, "ratio": same / found["ms"], "cores": cores}


class Same:
    """Reader that gives the same batch in every step."""

    def __init__(self, batch):
        self.batch = batch

    def __next__(self):
        return self.batch

    def close(self):
        """Nothing is open."""


def write_images(folder, how, count):
    """Write photographs as JPEG, and every fourth of the small ones as PNG, of smooth noise."""
    from PIL import Image

    width, height = (int(side.replace(",", "")) for side in how.split()[2::2])
    for number in range(count):
        torch.manual_seed(number)
        coarse = torch.rand(1, 3, height // 16, width // 16)
        pixels = F.interpolate(coarse, (height, width), mode="bilinear")[0].mul(255).byte()
        form = "png" if number % 4 == 3 and width == height else "jpeg"
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number}.{form}")


WAYS = ((RANKS, one_of_many), (SMALL_CARD, small_card), (REFRESH, refresh), (IMAGES, images))


def main():
    """Add the planned memory to the ranks that were measured in a folder, and write its page."""
    folder = Path(sys.argv[1])
    rows = page.read(folder / "systems.jsonl")
    device = json.loads((folder / "environment.json").read_text())["device"]
    known = (find_hardware(name) for name in hardware_names())
    hardware = next((each for each in known if each.device == device), None)
    if hardware is None:
        raise SystemExit(f"no hardware file has the device {device}")
    with open(folder / "systems.jsonl", "a") as kept:
        for name, row in rows.items():
            if name in RANKS and not row["error"] and "planned GiB" not in row["figures"]:
                job = job_of(name, "cuda", "inductor")
                found = plan(job, RANKS[name].ranks, hardware).fullest.memory.peak_reserved / GIB
                row["figures"]["planned GiB"] = found
                kept.write(json.dumps(row) + "\n")
                print(f"{name}: {found:.1f} GiB", flush=True)
    page.write(folder)


if __name__ == "__main__":
    main()

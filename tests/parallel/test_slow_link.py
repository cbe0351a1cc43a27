"""The slowed link of the benchmarks delays by the bytes that are sent, and changes no result."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor  # (a fork has what its parent imported)
from torch import Tensor
from torch.distributed import ProcessGroup

import torchtitan
from benchmarks.slow_link import NAME, Link, Load, slowed
from tests import layouts
from tests.layouts import Case, case
from tests.ranks import run_ranks
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.tools.verify.measure import training
from torchtitan.torch_private.collectives import all_gather_into, reduce_scatter_into

NUMBERS = 50_000
WHOLE = 4 * NUMBERS
BANDWIDTH, LATENCY = 32e6, 5e-3  # bits a second; a whole takes 50 ms


@contextmanager
def on_link(link: Link, store: Path) -> Iterator[Link]:
    """The process group of this rank is a slowed one meanwhile."""
    dist.destroy_process_group()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with slowed(link):
        dist.init_process_group(
            NAME, store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
        )
        yield link
        dist.destroy_process_group()
        # One for `run_ranks` to leave.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def collective(name: str, group: ProcessGroup) -> tuple[Tensor, Load]:
    """What a rank has after one, and what it should have put on the link."""
    ranks = group.size()
    rank = group.rank()
    values = torch.arange(NUMBERS, dtype=torch.float32) / (rank + 3)
    part, share = torch.empty(NUMBERS // ranks), WHOLE * (ranks - 1) / ranks
    if name == "all-reduce":
        dist.all_reduce(values, group=group)
        return values, Load(2 * share, 2 * (ranks - 1))
    if name == "all-gather":
        whole = torch.empty_like(values)
        all_gather_into(whole, values[: len(part)].clone(), group)
        return whole, Load(share, ranks - 1)
    if name == "reduce-scatter":
        reduce_scatter_into(part, values, group)
        return part, Load(share, ranks - 1)
    if name == "all-to-all":
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=group)
        return received, Load(share, 1)
    to, of = ((rank + step) % ranks for step in (1, -1))
    received = torch.empty_like(values)
    both = [
        dist.P2POp(dist.isend, values, to, group),
        dist.P2POp(dist.irecv, received, of, group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received, Load(WHOLE, 1)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")


def measured(store: Path) -> dict[str, tuple[Tensor, Tensor, Load, Load, float, float]]:
    """Of each kind: what came of it on gloo and on the link; its load as it should be and as it was
    counted; and seconds as they should be and as they were measured.
    """
    plain = {name: collective(name, dist.group.WORLD) for name in KINDS}
    found = {}
    with on_link(Link(BANDWIDTH, LATENCY), store) as link:
        dist.barrier()
        for name, (expected, load) in plain.items():
            bytes_before, waited_before, begin = link.sent, link.waited, time.perf_counter()
            result, _ = collective(name, dist.group.WORLD)
            seconds = time.perf_counter() - begin
            counted = Load(link.sent - bytes_before, load.hops)
            wanted = 8 * load.bytes / BANDWIDTH + load.hops * LATENCY
            assert link.waited - waited_before == pytest.approx(wanted)
            found[name] = (expected, result, load, counted, wanted, seconds)
            dist.barrier()
    return found


def test_it_delays_by_the_bytes_that_are_sent_and_changes_no_bit(tmp_path: Path) -> None:
    for found in run_ranks(measured, 2, tmp_path / "store"):
        for name, (expected, result, load, counted, wanted, seconds) in found.items():
            assert torch.equal(expected, result), name
            assert counted.bytes == pytest.approx(load.bytes), name
            assert seconds >= 0.99 * wanted > 0.02, name


def within_and_between(store: Path) -> list[float]:
    """Bytes that a rank, of two nodes of two, puts on the link: within its node, and between."""
    found = []
    with on_link(Link(1e12, ranks_per_node=2), store) as link:
        for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)):
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                before = link.sent
                dist.all_reduce(torch.ones(100), group=group)
                found.append(link.sent - before)
    return found


def test_within_a_node_nothing_waits(tmp_path: Path) -> None:
    assert run_ranks(within_and_between, 4, tmp_path / "store") == [[0.0, 400.0]] * 4


def losses(job: JobConfig, store: Path) -> tuple[list[list[float]], float]:
    """Losses and norms of each step, on gloo and on the link; and the bytes that it carried."""
    plain = [row for _, row in training(job, Device("cpu"), uneven=False)]
    with on_link(Link(1e9), store) as link:
        late = [row for _, row in training(job, Device("cpu"), uneven=False)]
    return [
        [row[key] for row in rows for key in ("loss", "grad_norm")] for rows in (plain, late)
    ], link.sent


@pytest.mark.gate
def test_a_run_on_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    is_the_same_to_the_bit(case(shard=2), tmp_path)


def is_the_same_to_the_bit(layout: Case, folder: Path) -> None:
    job = layouts.job(layout, "SGD", training={"steps": 2})
    for (plain, late), sent in run_ranks(losses, 2, job, folder / "store"):
        assert plain == late
        assert sent > 10_000


def test_no_recipe_can_choose_it() -> None:
    root = Path(torchtitan.__file__).parent
    assert not any(
        NAME in path.read_text() or "slow_link" in path.read_text() for path in root.rglob("*.py")
    )

"""What runs that send in few bits promise, on real ranks: helpers of their tests."""

import math
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.layouts import FULL, case
from tests.ranks import run_ranks
from tests.runs import each, parts, trace, traced, train
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.comm import Unit
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.tools.verify.measure import training

SHAPES = {
    "a.weight": torch.Size([6, 64]),
    "norm.weight": torch.Size([40]),
    "b": torch.Size([64, 4]),
}
UNIT = Unit("layers.0", SHAPES, torch.device("cpu"))
ROW = UNIT.elements
EXACT = slice(6 * 64, 6 * 64 + 40)
"""The weights of a norm, which are sent as they are."""


def drawn(*shape, seed):
    """Of very different sizes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 0, shape[-1])


def matrices(row):
    """What is sent in few bits of (..., p)."""
    return torch.cat([row[..., : EXACT.start], row[..., EXACT.stop :]], -1)


class Reduced(NamedTuple):
    sent: Tensor
    """What should have arrived here, in all calls together: (p)."""
    arrived: Tensor
    last: Tensor
    """What arrived in the last call."""
    errors: Tensor | None
    """What all ranks keep of what they send here."""


def reduced(config, calls):
    rank, group = dist.get_rank(), dist.group.WORLD
    ranks, way = group.size(), config.open(UNIT, group)
    expected, arrived = torch.zeros(ROW), torch.zeros(ROW)
    for call in range(calls):
        rows = [drawn(ranks, ROW, seed=ranks * call + other) for other in range(ranks)]
        part = torch.empty(ROW)
        way(part, rows[rank].flatten())
        expected += sum(row[rank] for row in rows)
        arrived += part
        way.end_step()
    errors = None
    if getattr(config, "error_bits", 0) == 32:
        errors = torch.empty_like(way.sending.error)
        dist.all_to_all_single(errors, way.sending.error)
    return Reduced(expected, arrived, part, errors)


LAYOUTS = {
    "FSDP 2, accumulating 4, full recomputation": case(shard=2, batch=1, recompute=FULL),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x PP 2": case(2, shard=2, batch=4),
    "FSDP 2 x CP 2": case(shard=2, cp=2),
    "HSDP 2 x 2": case(replicate=2, shard=2, batch=1),
}


def recipe(layout, communication, steps, optimizer="SGD", **sections):
    """Of one block, if stages do not need more; by SGD, in which an error of scale is seen."""
    training = {"steps": steps}
    model = {"model": {"n_layers": 1}} if layout.pp == 1 else {}
    ways = {"communication": communication}
    return layouts.job(layout, optimizer, training=training, **model, **ways, **sections)


def sending(layout, ways):
    """A run of each way to send: of each of them, that of each rank."""
    return traced(layout, [recipe(layout, way, 3) for way in ways])


def is_nearly_the_run(name, communications):
    """By the name of a layout, and how far each may be off, in parts of what few bits are."""
    plain, *others = sending(LAYOUTS[name], [{}, *(way for way, _ in communications)])
    for ranks, (_, wider) in zip(others, communications, strict=True):
        for found, expected in zip(ranks, plain, strict=True):
            assert found.losses != expected.losses
            assert found.losses == pytest.approx(expected.losses, rel=wider * 2e-3)
            assert found.grad_norms == pytest.approx(expected.grad_norms, rel=wider * 3e-2)


def spoilt(job):
    """Train; on one rank the gradient of step 2 has a NaN. Losses, weights, and what is kept."""
    losses, weights, kept = [], [], list[Tensor]()
    for run, row in training(job, Device("cpu"), uneven=False):
        losses.append(row["loss"])
        weights.append({name: part.local for name, part in parts(run).items()})
        model = run.model
        kept = list(model.state().values())
        if len(losses) == 1 and dist.get_rank() == 1:
            linear = model.parts[0].get_submodule("layers.0.attention.wq")
            spoiler = linear.register_full_backward_pre_hook(
                lambda _, given: (given[0] * torch.nan,)
            )
        elif len(losses) == 2 and dist.get_rank() == 1:
            spoiler.remove()
    return losses, weights, kept


def is_skipped_and_leaves_nothing(*ways):
    layout = case(shard=2, replicate=2) if "replicas" in ways[0] else case(shard=2)
    jobs = [recipe(layout, way, 3) for way in ways]
    for rank in run_ranks(each, layout.ranks, spoilt, jobs):
        for way, (losses, weights, kept) in zip(ways, rank, strict=True):
            first, second, third = weights
            assert all(torch.equal(first[name], last) for name, last in second.items()), way
            assert not all(torch.equal(second[name], last) for name, last in third.items()), way
            assert all(math.isfinite(loss) for loss in losses), way
            assert kept, way
            assert all(state.isfinite().all() for state in kept if state.is_floating_point()), way
            assert all(weight.isfinite().all() for step in weights for weight in step.values()), way


def is_compiled_around(communication):
    layout, compiled = case(shard=2), {"enable": True, "backend": "aot_eager"}
    jobs = [
        recipe(layout, communication, 3, **sections) for sections in ({}, {"compile": compiled})
    ]
    eager, found = run_ranks(each, 2, trace, jobs)[0]
    assert found.losses == pytest.approx(eager.losses, rel=1e-4)


def saved(folder, layout, communication, steps, enable=True):
    sections = {"job": {"dump_folder": str(folder)}}
    sections["checkpoint"] = {"enable": enable, "interval": 2, "async_mode": "disabled"}
    return recipe(layout, communication, steps, "AdamW", **sections)


def resumes_to_the_bit(communication, folder, steps=3):
    """A run that stops after two steps, against one that neither stops nor saves."""
    layout = case(shard=2, replicate=2) if "replicas" in communication else case(shard=2)
    jobs = [saved(folder, layout, communication, *how) for how in ((steps, False), (2,), (steps,))]
    found = run_ranks(each, layout.ranks, train, jobs)
    for at_once, _, resumed in found:
        assert all(torch.equal(at_once[name], weight) for name, weight in resumed.items())
    shapes = SavedTensors(folder / "checkpoint" / f"step-{steps}").shapes()
    assert {name.split(".")[2] for name in shapes if name.startswith("communication.")} == set(
        communication
    )


def resumed(job):
    """The norms of gradients in all steps, and the warnings on the way."""
    with patch.object(logger, "warning") as warned:
        norms = train(job, lambda run: run.state.history["grad_norm"])
    return norms, [str(call.args[0]) for call in warned.call_args_list]


def resumes_on_another_layout(communication, folder):
    """What is kept starts from scratch, and the run stays near the one that never stopped."""
    one, other = case(shard=2, replicate=2, batch=1), case(shard=4, batch=1)
    alone = {way: how for way, how in communication.items() if way != "replicas"}
    jobs = [
        saved(folder / "a", one, communication, 5),
        saved(folder / "b", one, communication, 2),
        saved(folder / "b", other, alone, 5),
    ]
    for ranks in run_ranks(each, 4, resumed, jobs):
        (whole, said), (_, said_of_half), (norms, said_of_other) = ranks
        assert not said
        assert not said_of_half
        assert ["starts from scratch" in line for line in said_of_other] == [True]
        # Of five draws of QSDP's shifts, the farthest was 0.1 off.
        assert norms == pytest.approx(whole, rel=0.15)
        assert norms != whole

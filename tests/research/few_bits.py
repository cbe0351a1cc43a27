"""A unit whose weights and gradients are sent in few bits, on real ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.comm import Unit

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

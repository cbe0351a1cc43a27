"""DeMo and FlexDeMo: replicas that exchange a part of their momentum in each step
(Peng et al., 2024, arXiv:2411.19870; From et al., 2025, arXiv:2502.06728).

Each replica keeps a momentum of its own gradients g, and subtracts what it sends:

    d = decay d + g
    q = the part of d that is sent
    d = d - q

The sum of q over the replicas, or its sign, replaces the gradient. The part to send is chosen by
`demo` (the largest coefficients of a cosine transform), `random`, `striding` or `slicing` (the same
numbers on all replicas, different ones in each step). So all replicas make the same update, and
have the same weights to the bit. With `every` = n, g is the change of a replica in n steps.

The authors' code multiplies g by the learning rate before accumulating it; here the optimizer does
so after the exchange, and a change of the rate immediately affects the whole momentum. They take
means and this takes sums: a gradient here is this replica's share of that of the global mean.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm import AgreementConfig, ReplicaReducer, Unit
from torchtitan.config import Context, Problem, between
from torchtitan.research.common.codec import as_numbers, seed_of
from torchtitan.research.common.draws import mixed
from torchtitan.torch_private.distributed import all_gather

CPU = torch.device("cpu")


class DecoupledConfig(AgreementConfig):
    """Settings that all choices of the part to send have in common."""

    decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the momentum from step to step."""
    sign: bool = True
    """Update by the sign of the replicas' sum; false: by its value."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.sign and self.every > 1:
            message = "the sign of a change of weights loses its size; use false, or every = 1"
            yield Problem("sign", message, ("every",))
        yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Yield conflicts with other sections: only the combined gradient can be clipped."""
        if self.sign and context.recipe.training.max_norm:
            message = (
                "the norm of signs depends only on their count, so clipping would change the "
                "learning rate; use training.max_norm = 0, or false here"
            )
            yield Problem(f"{context.key}.sign", message, ("training.max_norm",))


class Decoupled(ReplicaReducer):
    """Base class that keeps the momentum, and replaces gradients by the exchanged part."""

    def __init__(self, config: DecoupledConfig, unit: Unit, group: ProcessGroup) -> None:
        self.config, self.group = config, group
        self.step = torch.zeros((), dtype=torch.int64)
        self.momentum = {
            name: torch.zeros(shape, device=unit.device) for name, shape in unit.shapes.items()
        }

    def state(self) -> dict[str, Tensor]:
        return {"step": self.step, **{f"momentum.{n}": m for n, m in self.momentum.items()}}

    @abstractmethod
    def exchange(self, momentum: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send a part of the momentum and subtract it; return its sum over all replicas."""

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        own = {name: self.momentum[name] for name in gradients}
        for name, gradient in gradients.items():
            own[name].mul_(self.config.decay).add_(gradient)
        for name, agreed in self.exchange(own).items():
            gradients[name].copy_(agreed.sign_() if self.config.sign else agreed)
        self.step += 1
        for momentum in own.values():
            # A step that is not finite is skipped, and must not enter the momentum.
            momentum.nan_to_num_(0.0, 0.0, 0.0)


class Demo(DecoupledConfig):
    """DeMo with the largest coefficients of a cosine transform."""

    name: Literal["demo"] = "demo"
    """Method of synchronizing replicas."""
    chunk: int = Field(64, ge=2, le=128)
    """Maximum side of the transformed tiles. The side is the largest divisor of each dim up to
    this; if that is less than half of this, the dim is padded."""
    top_k: int = Field(32, ge=1)
    """Number of coefficients sent per tile."""

    def open(self, unit: Unit, group: ProcessGroup) -> "DemoAgree":
        return DemoAgree(self, unit, group)


class Tiles:
    """Tiles of a tensor, at most `chunk` x `chunk`, transformed by an orthonormal DCT-II."""

    def __init__(self, shape: torch.Size, chunk: int, device: torch.device = CPU) -> None:
        rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        self.shape, self.rows, self.columns = shape, rows, columns
        self.height, self.width = _side(rows, chunk), _side(columns, chunk)
        self.padding = (-rows % self.height, -columns % self.width)
        self.padded = rows + self.padding[0], columns + self.padding[1]
        self.device = device

    @cached_property
    def cosines(self) -> tuple[Tensor, Tensor]:
        """Transforms of a tile's columns and of its rows, made once."""
        return _cosines(self.height, self.device), _cosines(self.width, self.device)

    @property
    def size(self) -> int:
        """Number of elements of a tile."""
        return self.height * self.width

    @property
    def count(self) -> int:
        return self.padded[0] * self.padded[1] // self.size

    def transform(self, tensor: Tensor) -> Tensor:
        """Return the coefficients (tiles, elements of a tile)."""
        h, w, (rows, columns) = self.height, self.width, self.padded
        matrix = F.pad(
            tensor.reshape(self.rows, self.columns), (0, self.padding[1], 0, self.padding[0])
        )
        tiles = matrix.view(rows // h, h, columns // w, w).transpose(1, 2)
        of_columns, of_rows = self.cosines
        found = of_columns @ tiles @ of_rows.T
        return found.reshape(-1, self.size)

    def invert(self, coefficients: Tensor) -> Tensor:
        """Return the tensor with these coefficients."""
        h, w, (rows, columns) = self.height, self.width, self.padded
        grid = coefficients.reshape(rows // h, columns // w, h, w)
        of_columns, of_rows = self.cosines
        tiles = of_columns.T @ grid @ of_rows
        matrix = tiles.transpose(1, 2).reshape(rows, columns)
        return matrix[: self.rows, : self.columns].reshape(self.shape)


class DemoAgree(Decoupled):
    """Exchange in which a coefficient is its senders' mean times the number of replicas.

    A tensor is sent whole if coefficients and their places would take as many bytes.
    """

    config: Demo

    def __init__(self, config: Demo, unit: Unit, group: ProcessGroup) -> None:
        super().__init__(config, unit, group)
        found = {n: Tiles(shape, config.chunk, unit.device) for n, shape in unit.shapes.items()}
        sent = {n: 6 * each.count * min(config.top_k, each.size) for n, each in found.items()}
        self.tiles = {n: each for n, each in found.items() if sent[n] < 4 * each.shape.numel()}

    def exchange(self, momentum: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values, places = list[Tensor](), list[Tensor]()
        for name, own in momentum.items():
            if each := self.tiles.get(name):
                found, count = each.transform(own), min(self.config.top_k, each.size)
                place = found.abs().topk(count, dim=1, sorted=False).indices
                value = found.gather(1, place)
                own.sub_(each.invert(torch.zeros_like(found).scatter_(1, place, value)))
                places.append(place.to(torch.int16).flatten())
                values.append(value.flatten())
            else:
                values.append(own.flatten().clone())
                own.zero_()
        pieces = [*values, *places]
        everyones = all_gather(torch.cat([piece.view(torch.uint8) for piece in pieces]), self.group)
        received = torch.split(everyones, [piece.nbytes for piece in pieces], 1)
        all_values, all_places = received[: len(values)], iter(received[len(values) :])
        agreed = dict[str, Tensor]()
        for (name, own), data in zip(momentum.items(), all_values, strict=True):
            value = as_numbers(data, torch.float32)
            if each := self.tiles.get(name):
                place = as_numbers(next(all_places), torch.int16).long()
                agreed[name] = each.invert(self._merged(each, value, place))
            else:
                agreed[name] = value.sum(0).view_as(own)
        return agreed

    def _merged(self, tiles: Tiles, values: Tensor, places: Tensor) -> Tensor:
        """Merge the coefficients that each replica sent (replicas, tiles * k)."""
        sums = torch.zeros(tiles.count, tiles.size, device=values.device)
        senders = torch.zeros_like(sums)
        for value, place in zip(values, places, strict=True):  # in the same order on all replicas
            at = place.view(tiles.count, -1)
            sums.scatter_add_(1, at, value.view_as(at))
            senders.scatter_add_(1, at, torch.ones_like(sums[:, :1]).expand_as(at))
        return sums * (self.group.size() / senders.clamp_min(1))


class Chosen(DecoupledConfig):
    """Settings of a choice that follows from the step alone, so that no indices are sent."""

    rate: float = Field(0.1, gt=0, le=1)
    """Fraction of the values that is sent per step."""

    def open(self, unit: Unit, group: ProcessGroup) -> "ChosenAgree":
        return ChosenAgree(self, unit, group)

    def count(self, elements: int) -> int:
        """Return how many numbers are sent for this number of elements."""
        return max(round(self.rate * elements), 1) if elements else 0

    def places(self, elements: int, step: int, name: str, device: torch.device) -> Tensor:
        """Return the indices of a parameter's elements that are sent in a step, `count` in all."""
        raise NotImplementedError


class Random(Chosen):
    """DeMo with random numbers, one from each of equal parts, drawn again in each step.

    Integers are drawn on the device, so the cost is that of the numbers sent, not of all, and the
    draws are the same on every device.
    """

    name: Literal["random"] = "random"
    """Method of synchronizing replicas."""

    def places(self, elements: int, step: int, name: str, device: torch.device) -> Tensor:
        count = self.count(elements)
        bounds = torch.arange(count + 1, device=device) * elements // max(count, 1)
        drawn = mixed(torch.arange(count, device=device), seed_of(f"{name}/{step}"))
        return bounds[:-1] + drawn % bounds.diff()


class Striding(Chosen):
    """DeMo with values at equal distances, shifted by one in each step."""

    name: Literal["striding"] = "striding"
    """Method of synchronizing replicas."""

    def places(self, elements: int, step: int, name: str, device: torch.device) -> Tensor:
        count = self.count(elements)
        starts = torch.arange(count, device=device) * elements // max(count, 1)
        return (starts + step) % max(elements, 1)


class Slicing(Chosen):
    """DeMo with a contiguous slice, the next one in each step."""

    name: Literal["slicing"] = "slicing"
    """Method of synchronizing replicas."""

    def places(self, elements: int, step: int, name: str, device: torch.device) -> Tensor:
        count = self.count(elements)
        return (torch.arange(count, device=device) + step * count) % max(elements, 1)


class ChosenAgree(Decoupled):
    """Exchange of the same numbers on all replicas, summed in one all-reduce."""

    config: Chosen

    def exchange(self, momentum: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step, places, values = int(self.step), list[Tensor](), list[Tensor]()
        for name, own in momentum.items():
            place = self.config.places(own.numel(), step, name, own.device)
            flat = own.view(-1)
            places.append(place)
            values.append(flat[place])
            flat[place] = 0.0
        message = torch.cat(values)
        dist.all_reduce(message, group=self.group)
        sums = torch.split(message, [len(value) for value in values])
        return {
            name: torch.zeros_like(own).view(-1).index_copy_(0, place, value).view_as(own)
            for (name, own), place, value in zip(momentum.items(), places, sums, strict=True)
        }


def _side(dim: int, most: int) -> int:
    """Return the side of tiles: the largest divisor of `dim` up to `most`. If that is short, thin
    tiles would send most of the tensor, so the dim is padded to equal tiles instead."""
    divisor = max(d for d in range(1, most + 1) if dim % d == 0) if dim else 1
    return divisor if 2 * divisor > min(most, dim) else -(-dim // -(-dim // most))


def _cosines(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II (size, size), which maps columns to coefficients."""
    at = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(at, 2 * at + 1) * (torch.pi / (2 * size))
    scales = torch.full((size, 1), (2 / size) ** 0.5, dtype=torch.float64)
    scales[0] = (1 / size) ** 0.5
    return (torch.cos(angles) * scales).to(device, torch.float32)

"""Sums over gradients and weights that Ranger21 needs, on every layout.

Sums over the units of a tensor determine how its gradient is clipped and centralized; the sums of
the result, and its normalization, follow from them. So one reduction is enough.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.parameters import local
from torchtitan.research.common.unit_sums import Reduction, Units

if TYPE_CHECKING:
    from torchtitan.research.ranger21.ranger21 import Ranger21

SMALLEST_STD, SMALLEST_NORM = 1e-8, 1e-6
"""Lower bounds of the divisors of gradients."""


class Measured(NamedTuple):
    """Measurements of a parameter and its gradient, in float64.

    The gradient g becomes (factor g - mean) / std; std is 0-d, the others are per unit: (units,).
    """

    factor: Tensor
    mean: Tensor
    std: Tensor
    weight_norm: Tensor
    square: Tensor
    """Sum of squares of the resulting gradient (0-d)."""
    variance: Tensor
    """Sum of the second moment before this step (0-d)."""


class Measurement:
    """Measurement of sharded gradients and weights."""

    def __init__(
        self, config: "Ranger21", units: Mapping[Tensor, Units], sharing: dist.ProcessGroup | None
    ) -> None:
        """Measure `units` over `sharing`, the ranks that have parts of the same tensors."""
        self.config, self.units, self.sharing = config, units, sharing

    def of(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> dict[Tensor, Measured]:
        """Measure each parameter that has a gradient, by one reduction."""
        reduction, own = Reduction(self.sharing), dict[Tensor, Tensor]()
        for parameter in parameters:
            units = self.units[parameter]
            gradient, weight = gradient_of(parameter), local(parameter)
            mine = torch.stack(
                [units.sums(gradient), units.squares(gradient), units.squares(weight)]
            )
            own[parameter] = mine
            if not units.are_whole:
                mine = mine.new_zeros(3, units.count)
                mine[:, units.rows] = own[parameter]
                reduction.add(mine / units.copies)
            else:
                reduction.add(self._totals(units, mine) / units.copies)
            variance = local(states[parameter]["exp_avg_sq"]).sum(dtype=torch.float64)
            reduction.add(variance / units.copies)
        found = reduction.sums()
        known = {}
        for parameter in parameters:
            units, sums, totals = self.units[parameter], own[parameter], next(found)
            if not units.are_whole:
                sums, totals = totals[:, units.rows], self._totals(units, totals)
            known[parameter] = self._measured(units, sums, totals, next(found))
        return known

    def _changes(self, units: Units, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return factor and mean of each unit, from its sums of g, g² and w² (3, units)."""
        config = self.config
        gradient, square, weight = sums
        factor, mean = torch.ones_like(gradient), torch.zeros_like(gradient)
        if config.adaptive_clip:
            limit = config.adaptive_clip * weight.sqrt().clamp_min(config.adaptive_clip_norm)
            norm = square.sqrt()
            factor = torch.where(norm > limit, limit / norm.clamp_min(SMALLEST_NORM), 1.0)
        # Centralizing a unit of one element, such as a row of one column, would erase it.
        if config.centralize_gradients and len(units.parameter.shape) > 1 and units.size > 1:
            mean = factor * gradient / units.size
        return factor, mean

    def _totals(self, units: Units, sums: Tensor) -> Tensor:
        """Return the sums over the units of the resulting gradient, and of its squares."""
        factor, mean = self._changes(units, sums)
        gradient, square, _ = sums
        total = factor * gradient - units.size * mean
        squares = factor.square() * square - units.size * mean.square()
        return torch.stack([total.sum(), squares.sum()])

    def _measured(self, units: Units, sums: Tensor, totals: Tensor, variance: Tensor) -> Measured:
        """Combine sums of this rank's units with those of the whole parameter."""
        factor, mean = self._changes(units, sums)
        (total, square), count = totals, units.parameter.shape.numel()
        std = torch.ones_like(square)
        if self.config.normalize_gradients and count > 2:
            spread = (square - total.square() / count).clamp_min(0) / (count - 1)
            std = spread.sqrt() + SMALLEST_STD
        return Measured(factor, mean, std, sums[2].sqrt(), square / std.square(), variance)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient."""
    assert parameter.grad is not None
    return local(parameter.grad)

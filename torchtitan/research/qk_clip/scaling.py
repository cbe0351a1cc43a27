"""QK-clip (MuonClip; Kimi Team, 2025, arXiv:2507.20534), which bounds attention logits per head.

If the largest logit S of a head in a step exceeded a limit t, its queries and keys are scaled down
after the update, so that it would have been t: by sqrt(t / S) each, in the rows of their weights.
Where several query heads share a key head, the keys stay and the queries take all of t / S, as
those authors do with the rotary keys that all of their heads share: scaling the keys would change
heads whose logits are small.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.torch_private.dtensor import extents


class Scaled(NamedTuple):
    """This rank's part of a weight whose rows belong to heads."""

    weight: Tensor
    heads: Tensor
    """Index of the query head of each row, among all attentions."""
    has_pair: bool
    """Whether another weight takes the other square root of the factor."""


class QKClip:
    """Scales down heads, with any placement of their weights on a mesh."""

    def __init__(
        self,
        limit: float,
        parameters: Sequence[NamedParameter],
        queries_and_keys: tuple[str, str],
        places: Mapping[str, slice],
    ) -> None:
        """
        Args:
            limit: maximum logit.
            parameters: this rank's parameters.
            queries_and_keys: names of the two linears in an attention module.
            places: slice of each attention module's heads among all heads, by module name.
        """
        self.limit, self.scaled = limit, list[Scaled]()
        queries, keys = queries_and_keys
        for parameter in parameters:
            module, _, linear = parameter.name.rpartition(".")[0].rpartition(".")
            if module not in places or linear not in queries_and_keys or not parameter.heads:
                continue
            place, (dim, count) = places[module], parameter.heads
            assert dim == 0, "rows make queries and keys"
            has_pair = heads_of(parameters, f"{module}.{keys}") == place.stop - place.start
            if linear == queries or has_pair:
                rows = extents(parameter.tensor, _coordinate(parameter))[0]
                each = parameter.shape[0] // count
                heads = torch.tensor([place.start + row // each for row in rows])
                device = local(parameter.tensor).device
                self.scaled.append(Scaled(parameter.tensor, heads.to(device), has_pair))

    @torch.no_grad()
    def apply(self, largest: Tensor) -> None:
        """Scale the weights down, after an update.

        Args:
            largest: largest logit of each head in the step, (heads of the model,).
        """
        factors = self.limit / largest.clamp(min=self.limit)
        roots = factors.sqrt()
        for weight, heads, has_pair in self.scaled:
            of_rows = (roots if has_pair else factors)[heads]
            local(weight).mul_(of_rows.view(-1, *[1] * (weight.ndim - 1)))


def heads_of(parameters: Sequence[NamedParameter], module: str) -> int | None:
    """Return the number of heads of a linear's output."""
    found = (p.heads[1] for p in parameters if p.heads and p.name.startswith(f"{module}."))
    return next(found, None)


def _coordinate(parameter: NamedParameter) -> Sequence[int]:
    """Return this rank's coordinate on the mesh of a parameter."""
    found = parameter.mesh.get_coordinate() if parameter.mesh is not None else ()
    assert found is not None
    return found

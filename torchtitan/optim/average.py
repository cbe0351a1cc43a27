"""An exponential moving average of the weights: `optimizer.average`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchtitan.optim.parameters import local
from torchtitan.optim.settings import ParameterGroup, UpdateRule

AVERAGE = "average"
"""Name of the state of a parameter."""


class AverageRule(UpdateRule):
    """Average of the weights w in float32, whatever their dtype: a += (1 - decay) (w - a).

    It starts from the weights after the first step.
    """

    decay: float

    def build(self, groups: Sequence[ParameterGroup]) -> "WeightAverage":
        parameters = (parameter.tensor for group in groups for parameter in group.parameters)
        return WeightAverage(parameters, self.decay)

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, WeightAverage)
        optimizer.begin()


class WeightAverage(torch.optim.Optimizer):
    """Optimizer whose step changes its state, and no parameter."""

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        super().__init__(list(parameters), {})
        self.decay = decay

    def begin(self) -> None:
        """Start from the weights as they are."""
        for group in self.param_groups:
            for parameter in group["params"]:
                average = parameter.detach().to(torch.float32, copy=True)
                self.state[parameter][AVERAGE] = average

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the average; call it after everything that changes the weights in a step."""
        if not self.state:
            self.begin()
            return
        pairs = list(self._pairs())
        wide = [(average, weight) for weight, average in pairs if weight.dtype == average.dtype]
        if wide:
            torch._foreach_lerp_(*map(list, zip(*wide, strict=True)), 1 - self.decay)  # type: ignore[call-overload]
        for weight, average in pairs:
            if weight.dtype != average.dtype:  # one at a time, for the memory of its copy
                average.lerp_(weight.to(average.dtype), 1 - self.decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the weights, of which it keeps a copy, with their averages within the context."""
        kept = [(weight, weight.clone()) for weight, _ in self._pairs()]
        with torch.no_grad():
            for weight, average in self._pairs():
                weight.copy_(average)
            try:
                yield
            finally:
                for weight, before in kept:
                    weight.copy_(before)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's parts of each weight and its average."""
        for parameter, state in self.state.items():
            yield local(parameter.detach()), local(state[AVERAGE])

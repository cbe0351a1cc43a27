"""Hooks that techniques run around the passes of a step, besides being applied to the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from torchtitan import convert
from torchtitan.convert import ConverterConfig


class Technique:
    """Base class of enabled techniques; each method is a hook that does nothing by default."""

    def before_pass(self) -> None:
        """Run before the forwards of a step or an evaluation; weights may have changed."""

    def after_backward(self) -> None:
        """Run when the gradients of a step are complete on this rank."""

    def after_evaluate(self) -> None:
        """Run after the forwards of an evaluation, which no backward follows."""

    def confirm(self) -> None:
        """Log the effect of the technique, after the first step.

        Raises:
            RuntimeError: if it had none.
        """

    def state(self) -> dict[str, Tensor]:
        """Return per-rank state to checkpoint, by name (`Communicator.state`)."""
        return {}

    def start_over(self) -> None:
        """Reset state that no checkpoint provides; this rank's weights are already loaded."""
        for tensor in self.state().values():
            tensor.zero_()

    def after_update(self) -> None:
        """Run after the optimizers have updated the weights."""

    def after_step(self, step: int, is_last: bool) -> None:
        """Run after each step."""


@dataclass(frozen=True)
class Converters(Technique):
    """Preparation of converted layers before each pass."""

    configs: Sequence[ConverterConfig]
    parts: Iterable[nn.Module]

    def before_pass(self) -> None:
        convert.before_pass(self.configs, self.parts)

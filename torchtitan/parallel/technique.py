"""What a technique does around the passes of a step, besides being applied to the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from torchtitan import convert
from torchtitan.convert import ConverterConfig


class Technique:
    """A technique that is on; each method does nothing unless it has something to do then."""

    def before_pass(self) -> None:
        """Before a step's forwards, or an evaluation's: weights may have changed."""

    def after_backward(self) -> None:
        """The gradients of a step are complete on this rank."""

    def after_evaluate(self) -> None:
        """The forwards of an evaluation are done, and no backward follows."""

    def confirm(self) -> None:
        """After the first step: log what became of what was asked for.

        Raises:
            RuntimeError: if nothing did.
        """

    def state(self) -> dict[str, Tensor]:
        """What of its own a checkpoint has to keep, by name; see `torchtitan.comm.Way.state`."""
        return {}

    def start_over(self) -> None:
        """Replace a state that no checkpoint has, given the weights that this rank has loaded."""
        for tensor in self.state().values():
            tensor.zero_()

    def after_update(self) -> None:
        """The optimizers have updated the weights."""

    def after_step(self, step: int, is_last: bool) -> None:
        """After each step."""


@dataclass(frozen=True)
class Converters(Technique):
    """What converted layers need before a pass."""

    configs: Sequence[ConverterConfig]
    parts: Iterable[nn.Module]

    def before_pass(self) -> None:
        convert.before_pass(self.configs, self.parts)

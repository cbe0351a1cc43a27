"""Places in a model where losses are made: at its end without ever having logits, or beside it.

Each is a module with a `core` to be set from outside, because only the model knows what the loss is
made of, and only what lays it out how it is computed, and what it is divided by.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


class LinearLoss(nn.Module):
    """The loss of `F.linear(x, weight)`, summed over targets, once `core` is set."""

    def __init__(self, is_main: bool = True) -> None:
        """`is_main` says that it is what the model is trained on first of all."""
        super().__init__()
        self.is_main = is_main
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """
        Args:
            x: (B, S, D).
            weight: (V, D).
            targets: (B, S) int64.
        """
        assert self.core is not None, "targets are given where `core` is set"
        return self.core(x, weight, targets)


class AuxiliaryLoss(nn.Module):
    """A loss beside the main one, of whatever a block knows: the balance of a router, say.

    It is in the metrics as `loss/<name>`, and times `weight` in what is trained on; with weight 0
    the run is the same, to the bit. Without a `core` it does nothing.
    """

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name, self.weight = name, weight
        self.core: Callable[[AuxiliaryLoss, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        """`x`, through which the loss gets its gradient.

        Args:
            x: what the block hands on.
            total: 0-d, the sum of the loss over the units (tokens, say) of the microbatch.
        """
        return x if self.core is None else self.core(self, x, total)


@dataclass(frozen=True)
class AuxiliaryHead:
    """A module with parameters for one auxiliary loss, between a model's last norm and its output.

    It is called with the hidden states (B, S, D) and the targets that follow each (B, S, A; those
    below 0 do not count), and returns the hidden states. Its linear `predict`, if it has one, works
    on each token alone.
    """

    name: str
    build: Callable[[int], nn.Module]
    """Model dim to the module."""
    flops: Callable[[int], int]
    """Model dim to the floating-point operations of a token, forward and backward."""
    ahead: int = 1
    """How many tokens after the next a batch has to tell of each."""


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """Those of a model, or of a stage of it."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss)]


def has_linear_loss(model: nn.Module) -> bool:
    """Whether `model` can give its loss in place of logits."""
    return any(isinstance(module, LinearLoss) for module in model.modules())

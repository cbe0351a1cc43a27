"""Points in a model where losses are computed: at its end without storing logits, or in between.

Each is a module with a `core` to be set from outside: the model knows the inputs of the loss, and
the code that distributes it knows how to compute and normalize it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


class LinearLoss(nn.Module):
    """The loss of `F.linear(x, weight)`, summed over targets, once `core` is set."""

    def __init__(self, is_main: bool = True) -> None:
        """`is_main`: whether it is the primary loss."""
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
    """An additional loss computed from the activations of a block, such as the balance of a router.

    It is in the metrics as `loss/<name>`, and added to the training loss times `weight`; with
    weight 0 the run is the same, to the bit. Without a `core` it does nothing.
    """

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self.name, self.weight = name, weight
        self.core: Callable[[AuxiliaryLoss, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        """Return `x`, through which the loss gets its gradient.

        Args:
            x: output of the block.
            total: 0-d, sum of the loss over the units (tokens, say) of the microbatch.
        """
        return x if self.core is None else self.core(self, x, total)


@dataclass(frozen=True)
class AuxiliaryHead:
    """Parametrized module for one auxiliary loss, between a model's last norm and its output.

    It is called with the hidden states (B, S, D) and the targets that follow each (B, S, A; those
    below 0 do not count), and returns the hidden states. Its linear `predict`, if it has one, works
    on each token separately.
    """

    name: str
    build: Callable[[int], nn.Module]
    """Function from the model dim to the module."""
    flops: Callable[[int], int]
    """Function from the model dim to the FLOPs of a token, forward and backward."""
    ahead: int = 1
    """Number of tokens after the next that a batch must provide for each token."""


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """Return the auxiliary losses of a model, or of a stage of it."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss)]


def has_linear_loss(model: nn.Module) -> bool:
    """Whether `model` can return its loss in place of logits."""
    return any(isinstance(module, LinearLoss) for module in model.modules())

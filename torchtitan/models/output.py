"""The end of a model where its loss is computed without ever having its logits.

It is a module with a `core` to be set from outside, because only the model knows its last hidden
states and the weight of its output, and only what lays it out how the loss is computed from them.
"""

from collections.abc import Callable

from torch import Tensor, nn


class LinearLoss(nn.Module):
    """The loss of `F.linear(x, weight)`, summed over targets, once `core` is set."""

    def __init__(self) -> None:
        super().__init__()
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


def has_linear_loss(model: nn.Module) -> bool:
    """Whether `model` can give its loss in place of logits."""
    return any(isinstance(module, LinearLoss) for module in model.modules())

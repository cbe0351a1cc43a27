"""Places in a model where losses are made: at its end without ever having logits, or beside it.

Each is a module with a `core` to be set from outside, because only the model knows what the loss is
made of, and only what lays it out how it is computed, and what it is divided by.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
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


class NextLatent(nn.Module):
    """From each hidden state, the direction of the next one, which gets no gradient from it.

    The loss of a position is 1 - cos(prediction, next hidden state).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.predict = nn.Linear(dim, dim, bias=False)
        self.loss = AuxiliaryLoss("next_latent", 1.0)
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = _whole

    def forward(self, x: Tensor, ahead_targets: Tensor) -> Tensor:
        """`x` (B, S, D), through which the loss gets its gradient.

        Args:
            ahead_targets: (B, S, A) int64; where the first does not count, nothing follows.
        """
        total = self.core(self.predict(x), x.detach(), ahead_targets[..., 0] >= 0)
        joined: Tensor = self.loss(x, total)
        return joined


def _whole(predicted: Tensor, latents: Tensor, counts: Tensor) -> Tensor:
    """The sum of the losses, of a whole sequence."""
    return latent_loss(predicted, latents.roll(-1, 1), counts)


def latent_loss(predicted: Tensor, following: Tensor, counts: Tensor) -> Tensor:
    """The sum over positions that count, in float32 at least.

    Args:
        predicted, following: (B, S, D).
        counts: (B, S) bool.
    """
    wide = torch.promote_types(predicted.dtype, torch.float32)
    off = 1.0 - F.cosine_similarity(predicted.to(wide), following.to(wide), dim=-1)
    return torch.where(counts, off, 0.0).sum()


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """Those of a model, or of a stage of it."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss)]


def has_linear_loss(model: nn.Module) -> bool:
    """Whether `model` can give its loss in place of logits."""
    return any(isinstance(module, LinearLoss) for module in model.modules())

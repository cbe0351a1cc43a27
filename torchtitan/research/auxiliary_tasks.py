"""An auxiliary loss that predicts the next hidden state, whose gradient is stopped.

It is inspired by representations that are trained to predict the next one in reinforcement learning
(Lange et al., 2023, arXiv:2310.04241), but only inspired: there is no environment, and none of
their results is reproduced. The loss of a position i with hidden state h_i and a trained W is

    1 - cos(W h_i, stop_gradient(h_(i+1)))

if the next token belongs to the same document.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.config import Context, Problem, between
from torchtitan.losses import ModelLossConfig, sum_over_ranks
from torchtitan.models.output import AuxiliaryHead, AuxiliaryLoss
from torchtitan.parallel import context
from torchtitan.parallel.settings import Balancing
from torchtitan.torch_private.distributed import all_gather


class LatentPredictor(nn.Module):
    """Predictor of the direction of the next hidden state, whose gradient is stopped."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.predict = nn.Linear(dim, dim, bias=False)
        self.loss = AuxiliaryLoss("next_latent", 1.0)
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = _whole

    def forward(self, x: Tensor, ahead_targets: Tensor) -> Tensor:
        """Return `x` (B, S, D), with the gradient of the loss attached.

        Args:
            ahead_targets: (B, S, A) int64; a position is ignored if its first does not count.
        """
        total = self.core(self.predict(x), x.detach(), ahead_targets[..., 0] >= 0)
        joined: Tensor = self.loss(x, total)
        return joined


def _whole(predicted: Tensor, latents: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the losses of whole sequences."""
    return latent_loss(predicted, latents.roll(-1, 1), counts)


def latent_loss(predicted: Tensor, following: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the losses of positions that count, in float32 or wider.

    Args:
        predicted, following: (B, S, D).
        counts: (B, S) bool.
    """
    wide = torch.promote_types(predicted.dtype, torch.float32)
    off = 1.0 - F.cosine_similarity(predicted.to(wide), following.to(wide), dim=-1)
    return torch.where(counts, off, 0.0).sum()


def _flops(dim: int) -> int:
    """Return the operations of the product with W; the cosines are negligible."""
    return 6 * dim * dim


HEAD = AuxiliaryHead("next_latent", LatentPredictor, _flops)


class NextLatentLoss(ModelLossConfig):
    """Prediction of the next hidden state, without its gradient; inspired by arXiv:2310.04241."""

    argument: ClassVar[str] = "auxiliary_heads"

    name: Literal["next_latent"] = "next_latent"
    """Name of the loss."""
    weight: float = Field(0.1, ge=0)
    """Weight of this loss in the total; 0 removes it from the model."""

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        p = context.recipe.parallelism if context.recipe is not None else None
        if p is not None and p.balancing == "documents" and p.context_parallel_degree > 1:
            key = "parallelism.context_parallel_load_balancer"
            message = (
                'the loss next_latent needs pieces that are the same for all rows; use "headtail"'
            )
            yield from between([Problem(key, message, (context.key,))])

    def wanted(self, has: tuple[AuxiliaryHead, ...]) -> tuple[AuxiliaryHead, ...]:
        return has if HEAD in has else (*has, HEAD)

    def distribute(
        self,
        part: nn.Module,
        sequence: ProcessGroup | None,
        balancing: str,
        tensor: ProcessGroup | None,
    ) -> None:
        """Fetch the next hidden state from the rank that has it."""

        def core(predicted: Tensor, latents: Tensor, counts: Tensor) -> Tensor:
            if tensor is not None:
                latents = torch.cat(all_gather(latents, tensor).unbind(), 1)
            if sequence is None:
                later = latents.roll(-1, 1)
            else:
                later = context.following(latents, sequence, cast(Balancing, balancing))
            if tensor is None:
                return latent_loss(predicted, later, counts)
            own, size = tensor.rank(), tensor.size()
            later, counts = later.chunk(size, 1)[own], counts.chunk(size, 1)[own]
            return sum_over_ranks(latent_loss(predicted, later, counts), tensor)

        for module in part.modules():
            if isinstance(module, LatentPredictor):
                module.core = core

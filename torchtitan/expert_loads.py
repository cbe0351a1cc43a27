"""Counts of the choices of routers in a step, and what follows from them: metrics, and balance.

A count is of the training forward of the whole global batch, and of tokens with a target: padding
does not count, nor does validation, or a forward that is recomputed for the backward. Counts are
integers, so their sum is the same on every layout.
"""

import math
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from torchtitan.config import Config
from torchtitan.metrics import Meter
from torchtitan.models.experts import Router
from torchtitan.parallel import ParallelModel
from torchtitan.step import Hooks
from torchtitan.torch_private.runtime import is_in_backward

BIAS_UPDATE_RATE = 1e-3


class ExpertsConfig(Config):
    """Mixtures of experts."""

    bias_update_rate: float | None = Field(None, ge=0)
    """Change per step of each router bias (model.router_bias): up for experts with fewer tokens
    than the mean, down for others (arXiv:2408.15664); 0: biases are constant (default: 0.001)."""

    @property
    def rate(self) -> float:
        """Change of a bias per step."""
        return BIAS_UPDATE_RATE if self.bias_update_rate is None else self.bias_update_rate


def routers(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a network, or of a stage of it, by the name of their block."""
    return {
        name.rpartition(".mixture")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, Router)
    }


class ExpertLoads:
    """Loads of the experts of all layers in the last step, equal on all ranks."""

    def __init__(
        self,
        model: ParallelModel,
        everyones: Mapping[str, Router],
        rate: float,
        *,
        splits_stream: bool,
    ) -> None:
        """
        Args:
            everyones: routers of the whole network, those of other pipeline stages too.
            rate: change of a bias per step.
            splits_stream: whether tensor-parallel ranks choose for different tokens.
        """
        found = {name: router for part in model.parts for name, router in routers(part).items()}
        self.layers = list(everyones)
        self.n_experts = len(next(iter(everyones.values())).weight)
        self.own = [(self.layers.index(name), router) for name, router in found.items()]
        self.rate, self.world, self.timeline = rate, model.world, model.timeline
        self.splits_stream, self.is_counting = splits_stream, False
        self.loads: Tensor | None = None
        """(layers, E) int64, tokens of each expert in the global batch."""
        for _, router in self.own:
            router.count = self._count

    def hooks(self, meter: Meter, every: int, last: int) -> Hooks:
        """Return hooks that count the choices of routers, and then balance these.

        Args:
            every: steps between reports of each expert, which the `last` step has too; 0: none.
        """

        def report(step: int) -> None:
            if every and (step % every == 0 or step == last):
                meter.measured(step, "experts", **self.by_expert())

        return Hooks(
            before_forward=self.begin,
            after_backward=lambda batches, losses: meter.record(**self.end()),
            after_update=self.update,
            after_step=report,
        )

    def begin(self) -> None:
        """Count from here on."""
        self.is_counting = True
        for _, router in self.own:
            router.tally = self._zeros(self.n_experts)

    def _count(self, router: Router, chosen: Tensor, counted: Tensor | None) -> None:
        if self.is_counting and not is_in_backward():
            each = (
                torch.ones_like(chosen) if counted is None else counted[..., None].expand_as(chosen)
            )
            flat = chosen.flatten()
            router.tally = router.tally.scatter_add(0, flat, each.flatten().to(flat.dtype))

    def end(self) -> dict[str, Tensor]:
        """Add up the counts of all ranks; return the metrics of the step (0-d)."""
        self.is_counting = False
        loads = self._zeros(len(self.layers), self.n_experts)
        for layer, router in self.own:
            loads[layer] = router.tally
        with self.timeline.phase("sync"):
            # Ranks of a stage without experts take part.
            terms = loads if self.splits_stream else self.world.terms(loads)
            self.loads = self.world.sum(terms, over="all")
        shares = self.shares()
        entropy = -shares.xlogy(shares).sum(1) / math.log(max(self.n_experts, 2))
        return {"experts/busiest_share": shares.max(), "experts/entropy": entropy.mean()}

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int64, device=self.world.device.torch_device)

    def shares(self) -> Tensor:
        """Return the share of each expert in the choices of its layer: (layers, E)."""
        assert self.loads is not None, "it is called after the forwards of a step"
        return self.loads / self.loads.sum(1, keepdim=True).clamp(min=1)

    @torch.no_grad()
    def update(self) -> None:
        """Change the state of the routers after a step that changed the weights."""
        assert self.loads is not None
        shares = self.shares()
        for layer, router in self.own:
            if router.share is not None:
                router.share.copy_(shares[layer])
            if router.bias is not None and self.rate:
                counts = self.loads[layer]
                # In integers, so that an expert with the mean load stays.
                missing = counts.sum() - counts * len(counts)
                router.bias.add_(missing.sign(), alpha=self.rate)

    def by_expert(self) -> dict[str, float]:
        """Return the shares by `load/<block>/<expert>`; waits for the device."""
        return {
            f"load/{name}/{expert}": share
            for name, of_layer in zip(self.layers, self.shares().tolist(), strict=True)
            for expert, share in enumerate(of_layer)
        }

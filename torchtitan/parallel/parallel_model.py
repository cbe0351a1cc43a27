"""A model on this rank, as a step sees it: its parts, and the passes through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from torchtitan.parallel.loss import AuxiliaryLosses
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.replication import Replicas
from torchtitan.parallel.sharding import Sharding
from torchtitan.parallel.world import World
from torchtitan.tasks import Batch, LossFunction
from torchtitan.timeline import Timeline

Losses = dict[str, Tensor]
"""Means over the global batch by name (0-d, detached), or this rank's shares of them.

"loss" is the training objective, and `loss/<name>` an auxiliary loss."""


@dataclass
class ParallelModel:
    """Model that `parallelize` has distributed, on this rank."""

    runs_apart: ClassVar[bool] = False
    """Whether replicas make their own updates."""
    parts: list[nn.Module]
    """The whole model, or this rank's stages of a pipeline."""
    loss: LossFunction | None
    """Loss of the outputs; None: the model computes its own."""
    sharding: Sharding
    auxiliary: AuxiliaryLosses
    world: World
    timeline: Timeline
    shard_batch: Callable[[Batch], Batch] = lambda batch: batch
    """Returns this rank's shard of a batch of whole sequences."""
    pipeline: Pipeline | None = None
    replicas: Replicas | None = None
    """Synchronization of replicas outside the sharding, if any."""
    before_pass: list[Callable[[], None]] = field(default_factory=list)
    """Calls before the forwards of a step or an evaluation; weights may have changed."""
    complete_gradients: list[Callable[[], None]] = field(default_factory=list)
    """Calls after the backwards of a step."""
    before_forward: Sequence[Callable[[], None]] = ()
    """Calls of features before the passes of a step."""
    after_backward: Sequence[Callable[[Sequence[Batch], Losses], None]] = ()
    """Calls of features with a step's microbatches and shares of its losses; its gradients are
    complete."""

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss of the outputs."""
        return not self.pipeline or self.pipeline.last in self.pipeline.parts

    def forward_backward(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        """Run the forwards and backwards of a step; gradients accumulate.

        Args:
            batches: this rank's microbatches, of whole sequences.
            count: number of targets in the global batch (0-d).

        Returns:
            This rank's shares of the losses' means.
        """
        for call in self.before_forward:
            call()
        shares = self._train(batches, count)
        for hook in self.after_backward:
            hook(batches, shares)
        self.sharding.end_step()
        return shares

    def _train(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        return self.accumulate(batches, count)

    def accumulate(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        """Accumulate gradients, and return this rank's shares of the losses' means."""
        shards = self._begin_pass(batches)
        with self.auxiliary.recording(count) as shares:
            backward = self.pipeline.backward if self.pipeline else self._backward
            share = backward(shards, count)
        for call in self.complete_gradients:
            call()
        return shares | {"loss": share + shares["loss"]}

    def _begin_pass(self, batches: Sequence[Batch]) -> list[Batch]:
        for call in self.before_pass:
            call()
        return [self.shard_batch(batch) for batch in batches]

    def _backward(self, batches: Sequence[Batch], count: Tensor) -> Tensor:
        share = torch.zeros((), device=count.device)
        for batch in batches:
            self.sharding.before_backward(is_last=batch is batches[-1])
            with self.timeline.phase("forward"):
                loss = self._loss(batch) / count
            with self.timeline.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    def _loss(self, batch: Batch) -> Tensor:
        model, known = self.parts[0], batch.context()
        if self.loss is None:
            return cast(Tensor, model(batch.inputs, **known, targets=batch.targets))
        return self.loss(model(batch.inputs, **known), batch.targets)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return this rank's share of the sum of the main loss over `batches` (0-d).

        Expects as many batches as in a training step, each of the same size.
        """
        shards = self._begin_pass(batches)
        if self.pipeline:
            total = self.pipeline.evaluate(shards)
        else:
            total = torch.stack([self._loss(batch) for batch in shards]).sum()
        self.sharding.after_evaluate()
        return total

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor | None:
        """Return the model's outputs for a batch; all ranks call it together.

        None if no rank has the whole outputs, as in a pipeline.
        """
        (shard,) = self._begin_pass([batch])
        outputs = None if self.pipeline else self.parts[0](shard.inputs, **shard.context())
        self.sharding.after_evaluate()
        return cast("Tensor | None", outputs)

    def state(self) -> dict[str, Tensor]:
        """Return the state of communication on this rank to checkpoint, by name."""
        return self.sharding.state() | (self.replicas.state() if self.replicas else {})

    def start_over(self) -> None:
        """Reset state that no checkpoint provides; all ranks call it together.

        This rank's weights are already loaded.
        """
        for tensor in self.state().values():
            tensor.zero_()
        if self.replicas:
            self.replicas.start_over()


class LocallyUpdatedModel(ParallelModel):
    """Model whose replicas make their own updates.

    The gradient of each is that of the mean over its own targets; losses are still global means, to
    which each replica contributes.
    """

    runs_apart = True

    def _train(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        own = torch.stack([batch.count() for batch in batches]).sum()
        with self.timeline.phase("sync"):
            own = self.world.sum(own, over="dp_shard").clamp(min=1)
        shares = self.accumulate(batches, own)
        return {name: each * (own / count) for name, each in shares.items()}

"""Replicas of the model that synchronize gradients, weights, or nothing."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.comm import ReplicaReducer, ReplicasConfig, Unit
from torchtitan.digest import digest
from torchtitan.optim.parameters import local
from torchtitan.torch_private.distributed import all_gather


class Replicas:
    """Synchronizes gradients after each backward, unless the sharding did."""

    def __init__(
        self,
        config: ReplicasConfig,
        parts: Sequence[nn.Module],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        """Open communication over `group`, one rank per replica; parameters will be on `device`."""
        self.config, self.parts, self.group = config, parts, group
        self.updates = 0
        """Number of updates since the weights were last compared."""
        shapes = {name: part.shape for name, part in self.parameters()}
        self.agree: ReplicaReducer | None = None
        if not config.in_backward:
            self.agree = config.open(Unit("", shapes, device), group)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each parameter, by name."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                yield name, local(parameter)

    def before_pass(self) -> None:
        """Prepare for an update; weights may have changed."""

    def complete_gradients(self) -> None:
        """Sum gradients over replicas, after the last backward of a step."""
        if self.agree is not None:
            named = (pair for part in self.parts for pair in part.named_parameters())
            self.agree({name: local(p.grad) for name, p in named if p.grad is not None})

    @torch.no_grad()
    def after_update(self) -> None:
        """Verify weights, or synchronize their changes, after the optimizers updated them."""
        self.updates += 1
        self.verify()

    def verify(self) -> None:
        """Compare the weights of replicas, if a comparison is due.

        Raises:
            RuntimeError: if they differ.
        """
        if not 0 < self.config.steps_verified <= self.updates:
            return
        self.updates = 0
        digests = [digest(own) for _, own in self.parameters()]
        found = all_gather(torch.stack(digests), self.group)
        if not bool((found == found[0]).all()):
            raise RuntimeError(
                "communication.replicas: the weights of replicas differ, but must be equal to "
                "the bit; the cause is faulty hardware or a bug of torchtitan"
            )

    def state(self) -> dict[str, Tensor]:
        """Return per-rank state to checkpoint, by name (`Communicator.state`)."""
        return _named(self.agree.state()) if self.agree is not None else {}

    def start_over(self) -> None:
        """Set state that no checkpoint provides and that does not start from zeros."""


class LocalUpdates(Replicas):
    """Lets replicas make local updates, and synchronizes their change at intervals.

    Let a be the weights last agreed on, and w those of one replica after n local updates: summing
    (a - w) / replicas, by the method that sums gradients, and subtracting it from a gives the
    weights next agreed on.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        parts: Sequence[nn.Module],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(config, parts, group, device)
        self.steps = torch.zeros((), dtype=torch.int64)
        """Number of updates since the last agreement; zero: the replicas' weights are equal."""
        self.agreed = {
            name: torch.zeros(own.shape, dtype=own.dtype, device=device)
            for name, own in self.parameters()
        }

    @torch.no_grad()
    def start_over(self) -> None:
        """Measure changes from the first replica's weights, since the others' may differ."""
        for name, own in self.parameters():
            self.agreed[name].copy_(own)
            dist.broadcast(self.agreed[name], group=self.group, group_src=0)
        self.steps.fill_(1)

    @torch.no_grad()
    def before_pass(self) -> None:
        if not self.steps:
            for name, own in self.parameters():
                self.agreed[name].copy_(own)

    def complete_gradients(self) -> None:
        """Do nothing: gradients are local to each replica."""

    @torch.no_grad()
    def after_update(self) -> None:
        self.updates += 1
        self.steps += 1
        if self.steps < (self.config.steps_apart or 0):
            return
        assert self.agree is not None
        moved = {
            name: (_wide(self.agreed[name]) - own) / self.group.size()
            for name, own in self.parameters()
        }
        self.agree(moved)
        for name, own in self.parameters():
            own.copy_(_wide(self.agreed[name]) - moved[name])
        self.steps.zero_()
        self.verify()

    def state(self) -> dict[str, Tensor]:
        since = {"steps": self.steps, **{f"agreed.{n}": a for n, a in self.agreed.items()}}
        return super().state() | _named(since)


def _wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"replicas.{name}": tensor for name, tensor in tensors.items()}


def open_replicas(
    config: ReplicasConfig, parts: Sequence[nn.Module], group: ProcessGroup, device: torch.device
) -> Replicas | None:
    """Return the synchronization of replicas of `parts`; None without replicas or agreement."""
    if group.size() == 1 or config.steps_apart is None:
        return None
    if config.runs_apart:
        return LocalUpdates(config, parts, group, device)
    if not config.in_backward or config.steps_verified:
        return Replicas(config, parts, group, device)
    return None

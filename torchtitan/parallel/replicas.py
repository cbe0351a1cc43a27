"""Copies of the model that agree on gradients, on weights, or on nothing."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.comm import Agree, ReplicasConfig, Unit
from torchtitan.digest import digest
from torchtitan.optim.norm import local
from torchtitan.parallel.technique import Technique
from torchtitan.torch_private.collectives import all_gather


class Replicas(Technique):
    """Agrees on gradients after each backward, unless what shards the model did."""

    def __init__(
        self,
        config: ReplicasConfig,
        parts: Sequence[nn.Module],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        """`group` has a rank of each copy; `device` is where the parameters will be."""
        self.config, self.parts, self.group = config, parts, group
        self.updates = 0
        """Since the weights were last compared."""
        shapes = {name: part.shape for name, part in self.parameters()}
        self.agree: Agree | None = None
        if not config.in_backward:
            self.agree = config.open(Unit("", shapes, device), group)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank has of each, by name."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                yield name, local(parameter)

    def after_backward(self) -> None:
        if self.agree is not None:
            named = (pair for part in self.parts for pair in part.named_parameters())
            self.agree({name: local(p.grad) for name, p in named if p.grad is not None})

    @torch.no_grad()
    def after_update(self) -> None:
        self.updates += 1
        self.verify()

    def verify(self) -> None:
        """Where that is due, compare the weights of copies.

        Raises:
            RuntimeError: where they differ.
        """
        if not 0 < self.config.steps_verified <= self.updates:
            return
        self.updates = 0
        digests = [digest(own) for _, own in self.parameters()]
        found = all_gather(torch.stack(digests), self.group)
        if not bool((found == found[0]).all()):
            raise RuntimeError(
                "communication.replicas: the weights of replicas differ, which should be the same "
                "to the bit; this is a defect of the hardware, or of torchtitan"
            )

    def state(self) -> dict[str, Tensor]:
        return _named(self.agree.state()) if self.agree is not None else {}


class Apart(Replicas):
    """Lets copies make updates of their own, and agree on how far they have moved.

    Let a be the weights that they last agreed on, and w those that one of them has after n more
    updates: what they make of (a - w) / copies, by the way that adds up gradients, takes a to the
    weights that they agree on next.
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
        """Updates since they agreed; zero: their weights are the same."""
        self.agreed = {
            name: torch.zeros(own.shape, dtype=own.dtype, device=device)
            for name, own in self.parameters()
        }

    @torch.no_grad()
    def start_over(self) -> None:
        """Measure how far each copy moves from where the first one is: others may be elsewhere."""
        super().start_over()
        for name, own in self.parameters():
            self.agreed[name].copy_(own)
            dist.broadcast(self.agreed[name], group=self.group, group_src=0)
        self.steps.fill_(1)

    @torch.no_grad()
    def before_pass(self) -> None:
        if not self.steps:
            for name, own in self.parameters():
                self.agreed[name].copy_(own)

    def after_backward(self) -> None:
        """Gradients are each copy's own."""

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
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"replicas.{name}": tensor for name, tensor in tensors.items()}


def replicas(
    config: ReplicasConfig, parts: Sequence[nn.Module], group: ProcessGroup, device: torch.device
) -> Iterator[Replicas]:
    """What copies of `parts` have to do; nothing if there are none, or if they never agree."""
    if group.size() == 1 or config.steps_apart is None:
        return
    if config.runs_apart:
        yield Apart(config, parts, group, device)
    elif not config.in_backward or config.steps_verified:
        yield Replicas(config, parts, group, device)

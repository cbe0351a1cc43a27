"""Agreement of model replicas: the section `[communication.replicas]`.

They agree on gradients in each step. Or, with `every` = n, each makes updates by its own gradients,
and after every n-th they agree on the movement of their weights since the last agreement; if all of
it is sent, that is the mean of their weights (local SGD; Stich, 2019, arXiv:1805.09767).
"""

from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Communicator, Unit
from torchtitan.config import Config


class ReplicaReducer(Communicator):
    """Agreement between replicas of the model."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the gradients by the sum over replicas, in place.

        It is called once a step, after the last backward and before the norm is computed, with this
        rank's part of the gradient of each parameter, by name; all replicas have the same parts.
        Replicas that run apart call it at each agreement, with the replica's share of the mean
        movement of each parameter.
        """
        raise NotImplementedError


class SumReducer(ReplicaReducer):
    """Agreement by an all-reduce of each gradient."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=self.group)


class ReplicasConfig(Config):
    """Settings of an agreement; `name` picks the subclass."""

    name: str
    """Method: a key of torchtitan.comm.REPLICAS."""

    @property
    def in_backward(self) -> bool:
        """Whether all gradients are summed in the backward, by the sharding.

        Then `open` is not called.
        """
        return False

    @property
    def is_exact(self) -> bool:
        """Whether replicas equal a single one trained on the samples of all."""
        return False

    @property
    def steps_apart(self) -> int | None:
        """Updates of a replica between agreements; None: never agrees."""
        return 1

    @property
    def runs_apart(self) -> bool:
        """Whether weights differ between replicas, if only for some steps."""
        return self.steps_apart != 1

    @property
    def steps_verified(self) -> int:
        """Steps between comparisons of the replicas' weights; 0: never."""
        return 0

    def open(self, unit: Unit, group: ProcessGroup) -> ReplicaReducer:
        """Open an agreement over `group`, each rank of which has another replica.

        Args:
            unit: this rank's parts of all parameters.
        """
        raise NotImplementedError


class AgreementConfig(ReplicasConfig):
    """Settings shared by all agreements."""

    every: int = Field(1, ge=1)
    """Steps between synchronizations. 1: replicas reduce the gradients of each step; n: each
    replica updates its weights independently, and after every n-th step they reduce the changes of
    their weights."""
    verify_steps: int = Field(100, ge=0)
    """Steps between comparisons of the replicas' weights; 0: never."""

    @property
    def steps_apart(self) -> int | None:
        return self.every

    @property
    def steps_verified(self) -> int:
        return self.verify_steps


class AllReduce(AgreementConfig):
    """Gradients are summed; or, with `every`, weights are averaged."""

    name: Literal["all_reduce"] = "all_reduce"
    """Method of synchronizing replicas."""
    overlap: bool = True
    """Reduce gradients during the backward, as soon as those of a block are complete; false: after
    the backward."""
    verify_steps: int = Field(0, ge=0)
    """Steps between comparisons of the replicas' weights; 0: never."""

    @property
    def is_exact(self) -> bool:
        return self.every == 1

    @property
    def in_backward(self) -> bool:
        return self.overlap and self.every == 1

    def open(self, unit: Unit, group: ProcessGroup) -> ReplicaReducer:
        return SumReducer(group)


class Nothing(ReplicasConfig):
    """No synchronization: each replica trains its own model."""

    name: Literal["none"] = "none"
    """Method of synchronizing replicas."""

    @property
    def steps_apart(self) -> int | None:
        return None

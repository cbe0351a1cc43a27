"""Communication between ranks that share a model, by the names in recipes.

Adding a method is a class and a line in one of the dictionaries below. A method receives a
process group, and knows no mesh.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.config import Config, OneOf, Registry
from torchtitan.torch_private.distributed import all_gather_into, reduce_scatter_into

Operation = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send"]


def sent_bytes(operation: str, size: int, ranks: int) -> float:
    """Return the bytes that each of `ranks` sends in a collective around a ring, or in a message.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009,
    doi:10.1016/j.jpdc.2008.09.002).

    Args:
        size: bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter,
            the tensor of an all-reduce or a message.
    """
    if operation == "send":
        return size
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) / ranks


class Unit(NamedTuple):
    """Parameters that are gathered together, and whose gradients are reduced together."""

    name: str
    """Name of the module, or of the first of them; "" for parameters of no other unit."""
    shapes: Mapping[str, torch.Size]
    """Shape of one rank's part of each parameter, padded to the first rank's; in a buffer they
    are concatenated in this order."""
    device: torch.device

    @property
    def elements(self) -> int:
        """Elements of one rank's part."""
        return sum(shape.numel() for shape in self.shapes.values())


class Communicator:
    """Communicator, possibly with state from one call to the next."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the state to checkpoint, by name: the live tensors.

        They belong to this rank alone, and start as zeros, also after loading a checkpoint of
        another layout.
        """
        return {}

    def end_step(self) -> None:
        """Finish a step, after the last pass with its weights."""


class Reduce(Communicator):
    """Reducer of the gradients of a unit."""

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` (p) with this rank's row of the sum over all ranks of `whole` (ranks * p).

        It is called for every microbatch. The summands are shares of the gradient of a global mean,
        so nothing is divided.
        """
        raise NotImplementedError


class PlainReduce(Reduce):
    """Reducer that uses a reduce-scatter."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        reduce_scatter_into(part, whole, self.group)


class NarrowReduce(Reduce):
    """Reducer that sends rows in bfloat16 to their owners, which add them up in float32.

    A reduce-scatter in bfloat16 rounds the sum at every rank. Here each summand is rounded once,
    for the same bytes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        sent = whole.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        torch.sum(received.view(self.group.size(), -1), 0, dtype=torch.float32, out=part)


class GradientsConfig(Config):
    """Settings of a reducer; `name` picks the subclass."""

    remembers: ClassVar[bool] = False
    """Whether unused gradients would change those of later steps."""

    is_exact: ClassVar[bool] = False
    """Whether it returns the exact sum over ranks."""

    name: str
    """Method: a key of torchtitan.comm.GRADIENTS."""

    @abstractmethod
    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        """Open a reducer for the gradients of `unit` over `group`."""


class PlainGradients(GradientsConfig):
    """Gradients are summed in training.mixed_precision_reduce."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = "plain"
    """Method of reducing gradients."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are sent; bfloat16 halves the bytes of float32. Between replicas,
    gradients are sent in training.mixed_precision_reduce."""
    sum: Literal["float32"] = "float32"
    """Dtype in which gradients sent in bfloat16 are summed. To sum in bfloat16 too, set
    training.mixed_precision_reduce instead."""

    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        return NarrowReduce(group) if self.dtype == "bfloat16" else PlainReduce(group)


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
    replica updates its weights independently, and after every n-th step the replicas reduce the
    changes."""
    verify_steps: int = Field(100, ge=0)
    """Steps between checks that the replicas' weights are equal; 0: never."""

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
    """Reduce the gradients of each block during the backward, as soon as they are complete; false:
    reduce all gradients after the backward."""
    verify_steps: int = Field(0, ge=0)
    """Steps between checks that the replicas' weights are equal; 0: never."""

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


class Gather(Communicator):
    """Communicator that gathers a unit."""

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` (ranks * p) with `part` (p) of every rank, in rank order.

        `part` may be a view into `whole`. Parameters with their own format for gathering, such as
        Float8, are passed as bytes (uint8) in both.
        """
        raise NotImplementedError


class PlainGather(Gather):
    """Gathering by an all-gather."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        all_gather_into(whole, part, self.group)


class WeightsConfig(Config):
    """Settings of a gather; `name` picks the subclass."""

    reads_numbers: ClassVar[bool] = False
    """Whether it interprets the values it sends; the others may send bytes."""

    is_exact: ClassVar[bool] = False
    """Whether all ranks receive the owners' values exactly."""

    name: str
    """Method: a key of torchtitan.comm.WEIGHTS."""

    @abstractmethod
    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        """Open a communicator that gathers `unit` over `group`."""


class PlainWeights(WeightsConfig):
    """Parameters are gathered in the dtype of the computation."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = "plain"
    """Method of gathering weights."""

    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        return PlainGather(group)


WEIGHTS = Registry[type[WeightsConfig]]("communication.weights", {"plain": PlainWeights})
GRADIENTS = Registry[type[GradientsConfig]]("communication.gradients", {"plain": PlainGradients})
REPLICAS = Registry[type[ReplicasConfig]](
    "communication.replicas", {"all_reduce": AllReduce, "none": Nothing}
)


class CommunicationConfig(Config):
    """Communication between ranks that share a model."""

    weights: Annotated[WeightsConfig, OneOf(WEIGHTS, "plain")] = PlainWeights()
    gradients: Annotated[GradientsConfig, OneOf(GRADIENTS, "plain")] = PlainGradients()
    replicas: Annotated[ReplicasConfig, OneOf(REPLICAS, "all_reduce")] = AllReduce()

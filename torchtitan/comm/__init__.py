"""Communication between ranks that share a model, by the names in recipes.

Adding a method is a file here and a line in one of the dictionaries below. A method receives a
process group, and knows no mesh.
"""

from typing import Annotated

from torchtitan.comm.gradients import GradientsConfig, PlainGradients, Reduce
from torchtitan.comm.replicas import AllReduce, Nothing, ReplicaReducer, ReplicasConfig
from torchtitan.comm.unit import Communicator, Unit
from torchtitan.comm.weight_gathers import Gather, PlainGather, PlainWeights, WeightsConfig
from torchtitan.config import Config, OneOf, Registry

WEIGHTS = Registry[type[WeightsConfig]]("communication.weights", {"plain": PlainWeights})
GRADIENTS = Registry[type[GradientsConfig]]("communication.gradients", {"plain": PlainGradients})
REPLICAS = Registry[type[ReplicasConfig]](
    "communication.replicas", {"all_reduce": AllReduce, "none": Nothing}
)

__all__ = [
    "GRADIENTS",
    "REPLICAS",
    "WEIGHTS",
    "AllReduce",
    "CommunicationConfig",
    "Communicator",
    "Gather",
    "GradientsConfig",
    "PlainGather",
    "PlainGradients",
    "PlainWeights",
    "Reduce",
    "ReplicaReducer",
    "ReplicasConfig",
    "Unit",
    "WeightsConfig",
]


class CommunicationConfig(Config):
    """Communication between ranks that share a model."""

    weights: Annotated[WeightsConfig, OneOf(WEIGHTS, "plain")] = PlainWeights()
    gradients: Annotated[GradientsConfig, OneOf(GRADIENTS, "plain")] = PlainGradients()
    replicas: Annotated[ReplicasConfig, OneOf(REPLICAS, "all_reduce")] = AllReduce()

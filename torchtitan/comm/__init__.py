"""What ranks that share a model send each other, by the names that a recipe gives.

Adding a way to send is a file here and a line in one of the dictionaries below. A way is handed a
process group, and knows no mesh.
"""

from typing import Annotated

from torchtitan.comm.decoupled import Demo, Random, Slicing, Striding
from torchtitan.comm.gradients import GradientsConfig, PlainGradients, Reduce
from torchtitan.comm.loco import LoCo, LoCoReplicas
from torchtitan.comm.qsdp import QSDPGradients, QSDPWeights
from torchtitan.comm.replicas import Agree, AllReduce, Nothing, ReplicasConfig
from torchtitan.comm.unit import Unit, Way
from torchtitan.comm.weights import Gather, PlainGather, PlainWeights, WeightsConfig
from torchtitan.config import Config, OneOf

WEIGHTS: dict[str, type[WeightsConfig]] = {"plain": PlainWeights, "qsdp": QSDPWeights}
GRADIENTS: dict[str, type[GradientsConfig]] = {
    "plain": PlainGradients,
    "loco": LoCo,
    "qsdp": QSDPGradients,
}
REPLICAS: dict[str, type[ReplicasConfig]] = {
    "all_reduce": AllReduce,
    "loco": LoCoReplicas,
    "demo": Demo,
    "random": Random,
    "striding": Striding,
    "slicing": Slicing,
    "none": Nothing,
}

__all__ = [
    "GRADIENTS",
    "REPLICAS",
    "WEIGHTS",
    "Agree",
    "AllReduce",
    "CommunicationConfig",
    "Gather",
    "GradientsConfig",
    "PlainGather",
    "PlainGradients",
    "PlainWeights",
    "Reduce",
    "ReplicasConfig",
    "Unit",
    "Way",
    "WeightsConfig",
]


class CommunicationConfig(Config):
    """What ranks that share a model send each other."""

    weights: Annotated[WeightsConfig, OneOf(WEIGHTS, "plain")] = PlainWeights()
    gradients: Annotated[GradientsConfig, OneOf(GRADIENTS, "plain")] = PlainGradients()
    replicas: Annotated[ReplicasConfig, OneOf(REPLICAS, "all_reduce")] = AllReduce()

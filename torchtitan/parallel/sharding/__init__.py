"""Ways to share parameters among ranks, by the name that a recipe gives.

Adding one is a file here and a line below.
"""

from torchtitan.parallel.settings import Precision
from torchtitan.parallel.sharding.fsdp2 import FSDP2
from torchtitan.parallel.sharding.rotated import Rotated
from torchtitan.parallel.sharding.settings import Sharding, ShardingConfig, Target
from torchtitan.parallel.sharding.simple_fsdp import SimpleFSDP

SHARDING: dict[str, type[ShardingConfig]] = {
    "fsdp2": FSDP2,
    "simple_fsdp": SimpleFSDP,
    "rotated": Rotated,
}

__all__ = [
    "FSDP2",
    "SHARDING",
    "Precision",
    "Rotated",
    "Sharding",
    "ShardingConfig",
    "SimpleFSDP",
    "Target",
]

"""Registry of shardings, which split parameters among ranks, by their names in recipes.

To add one, add a file to this package and a line below.
"""

from torchtitan.config import Registry
from torchtitan.parallel.settings import Precision
from torchtitan.parallel.sharding.fsdp2 import FSDP2
from torchtitan.parallel.sharding.settings import Sharding, ShardingConfig, ShardingTarget

SHARDING = Registry[type[ShardingConfig]]("sharding", {"fsdp2": FSDP2})

__all__ = ["FSDP2", "SHARDING", "Precision", "Sharding", "ShardingConfig", "ShardingTarget"]

"""Parts of torch's distributed checkpoint that have no public name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


def storage_info(file: str, offset: int, length: int) -> Any:
    """Build the location of `length` bytes of a file from `offset` on, as in `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def write_once(plans: "Sequence[SavePlan]") -> "list[SavePlan]":
    """Leave each piece that several ranks hold in the plan of one of them, balancing the load."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans

    return dedup_save_plans([*plans])

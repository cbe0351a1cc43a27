"""Modules that FSDP2 shards."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def gather_with(unit: "FSDPModule", first: nn.Module, last: nn.Module) -> None:
    """Gather the parameters of a unit before the forward of `first`, until after that of `last`.

    FSDP2's hooks then run there instead: a compiled forward does not contain them, and parameters
    may be read outside of their module. Call it before `last` is sharded.
    """
    state: Any = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    first.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    last.register_forward_hook(state._post_forward)

"""Modules that FSDP2 shards."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def gather_with(inner: "FSDPModule", outer: nn.Module) -> None:
    """Gather the parameters of a sharded module before the forward of `outer`, which contains it.

    FSDP2's hooks then run around `outer` instead, so that a compiled forward does not contain them.
    Call it before `outer` is sharded.
    """
    state: Any = inner._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    outer.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    outer.register_forward_hook(state._post_forward)

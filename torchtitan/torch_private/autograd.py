"""State of autograd."""

import torch


def is_in_backward() -> bool:
    """Whether a backward is running, which may recompute a forward; a compiler traces only the
    forward outside of it.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1

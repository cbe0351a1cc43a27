"""What autograd is doing."""

import torch


def is_in_backward() -> bool:
    """Whether this is part of a backward, where a forward may be computed again; a compiler sees
    only the first."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1

"""What torch.compile counts, keeps and chooses."""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Within, torch.compile does not give up where a function is called with many shapes."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def compiler_counts() -> Mapping[str, Counter[str]]:
    """What torch.compile has counted in this process, by topic: `stats`, `graph_break`, ..."""
    from torch._dynamo.utils import counters

    return counters


class Compilation(NamedTuple):
    """A graph that was compiled, forward and backward."""

    reason: str | None
    """Why again, where the same code was compiled before."""
    hits: int
    misses: int
    """How many of its parts inductor found in its cache, and how many not."""


UPDATES = ("single_param_adam", "newton_schulz")
"""Functions of an optimizer that are compiled: torchao's Adam, and Muon's iteration."""


def compiles_updates() -> bool:
    """Whether this process has compiled any of those."""
    from torch._dynamo.utils import get_compilation_metrics

    return any(metrics.co_name in UPDATES for metrics in get_compilation_metrics())


def compilations() -> dict[str, Compilation]:
    """What this process has compiled, the latest at least, by the name that torch gives it.

    But not updates, which are compiled again for each shape: that is how they are meant.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found: dict[str, Compilation] = {}
    for metrics in get_compilation_metrics():
        if metrics.co_name in UPDATES:
            continue
        name = str(metrics.compile_id)
        reason, hits, misses = found.get(name, Compilation(None, 0, 0))
        found[name] = Compilation(
            metrics.recompile_reason or reason,
            hits + (metrics.inductor_fx_local_cache_hit_count or 0),
            misses + (metrics.inductor_fx_local_cache_miss_count or 0),
        )
    return found


def compile_seconds() -> float:
    """Seconds that this process has spent in compiling, forward and backward together."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import cumulative_time_spent_ns

    names = ("entire_frame_compile", "entire_backward_compile")
    return sum(cumulative_time_spent_ns.get(name, 0) for name in names) / 1e9


def keep_compiled_graphs(folder: Path | None) -> None:
    """Have inductor look for graphs on disk, and leave them there (None: where torch does)."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    autograd.enable_autograd_cache = inductor.fx_graph_cache = True
    if folder is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # read whenever a graph is looked for


def set_activation_memory_budget(budget: float) -> None:
    """The part of its activations that each graph compiled from now on may keep."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    # A DTensor's mesh is an input of the graph from torch 2.13 on, and of no size worth counting.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def counts_once_where_recomputed() -> bool:
    """Whether what a compiled forward adds up elsewhere can be left out where it is recomputed; if
    so, it is from now on."""
    from torch._dynamo import config

    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if hasattr(config, name):
        setattr(config, name, True)
    return hasattr(config, name)


def compiles_recomputed_attention(device_type: str) -> bool:
    """Whether a compiled graph over a mesh can recompute what a kernel with dropout gave.

    From torch 2.12 on, the mesh is one of the graph's inputs. On a CPU the state of the generator,
    which is saved for the recomputation, then ends up where the mesh is looked for.
    """
    from torch.distributed import device_mesh

    return device_type != "cpu" or not hasattr(device_mesh, "_register_distributed_opaque_types")


def keeps_nodes_of_functions() -> bool:
    """Whether a node of the autograd graph that stands for a function of our own lives as long as
    it is referred to; before torch 2.13 it goes with the tensors that it led to."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

    y = Twice.apply(torch.ones((), requires_grad=True))  # type: ignore[no-untyped-call]
    node = y.grad_fn
    del y
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False

"""Asynchronous tensor parallelism: communication overlaps with matrix products.

An all-gather before a matrix product, or a reduce-scatter after it, is decomposed with the product
into pieces: one piece is multiplied while the next is in transit (Wang et al., 2023, "Overlap
Communication with Dependent Computation via Decomposition", doi:10.1145/3567955.3567959). Inductor
finds such pairs in a compiled graph and replaces them by operators over SymmetricMemory. It is
silent when it finds none, so the fused operators are counted here.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchtitan.logging import logger
from torchtitan.torch_private.compiler import compiler_counts
from torchtitan.torch_private.graphs import enable_symmetric_memory, fuse_tensor_parallelism


def enable(group: ProcessGroup) -> None:
    """Fuse the collectives of `group` (tp) in every block compiled after this call."""
    enable_symmetric_memory(group)
    fuse_tensor_parallelism(show_gathers, count, __file__)


def show_gathers(graph: Graph) -> None:
    """Rewrite the all-gathers of a batch of one in the form that the compiler's patterns match.

    The gathered tensor is (ranks, S, D). The patterns match a gather along the second dim as a
    split and a concatenation there; for one sequence torch uses the equivalent view
    (1, ranks * S, D).
    """
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    for view in graph.find_nodes(op="call_function", target=aten.reshape.default):
        wait = view.args[0]
        if wait.target is not collectives.wait_tensor.default:
            continue
        if wait.args[0].target is not collectives.all_gather_into_tensor.default:
            continue
        ranks, length, *rest = wait.meta["val"].shape
        if list(view.meta["val"].shape) != [1, ranks * length, *rest]:
            continue
        with graph.inserting_before(view):
            pieces = _call(graph, aten.split.Tensor, wait, 1)
            each = [_call(graph, operator.getitem, pieces, rank) for rank in range(ranks)]
            joined = _call(graph, aten.cat.default, each, 1)
        view.replace_all_uses_with(joined)
        graph.erase_node(view)


def _call(graph: Graph, function: Callable[..., Any], *arguments: Any) -> Node:
    """Return a new node, with its output on fake tensors as metadata."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


GATHERS = {f"symm_mem.fused_all_gather{kind}_matmul.default" for kind in ("", "_scaled")}
SCATTERS = {f"symm_mem.fused{kind}_matmul_reduce_scatter.default" for kind in ("", "_scaled")}
FUSED = GATHERS | SCATTERS


def count(graph: Graph) -> None:
    """Add the fused operators of a graph to the compiler's counters.

    The compiler caches its counters with each graph, so they are correct after a restart too.
    """
    counts = compiler_counts()["inductor"]
    counts.update(str(node.target) for node in graph.nodes if str(node.target) in FUSED)


class Fused(NamedTuple):
    """Numbers of fused operators in compiled graphs, forward and backward."""

    gathers: int
    scatters: int


def fused() -> Fused:
    """Return the numbers of operators that this process has fused so far."""
    counts = compiler_counts()["inductor"]
    return Fused(*(sum(counts[name] for name in names) for names in (GATHERS, SCATTERS)))


def confirm() -> None:
    """Log the number of fused operators; call it after a step, on ranks that have blocks.

    Raises:
        RuntimeError: if the compiler fused no all-gathers or no reduce-scatters.
    """
    found = fused()
    said = (
        f"{found.gathers} all-gather-matmul and {found.scatters} matmul-reduce-scatter fused in "
        "the compiled graphs"
    )
    if not all(found):
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel did not take effect: {said}. Inductor "
            "found no known pattern between the collectives and the matrix products of a block "
            "(TORCH_LOGS=post_grad_graphs shows its graphs), or this torch has no NCCL; train "
            "without the option"
        )
    logger.info("async tensor parallelism: %s", said)

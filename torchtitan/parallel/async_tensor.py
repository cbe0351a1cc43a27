"""Asynchronous tensor parallelism: what ranks send each other travels while they multiply.

Where a whole is gathered for a matrix product, or its result reduced and scattered, the two are cut
into pieces: one piece is multiplied while the next is on its way (Wang et al., 2023, "Overlap
Communication with Dependent Computation via Decomposition", doi:10.1145/3567955.3567959). Inductor
finds such pairs in a compiled graph and puts operators over SymmetricMemory in their place. Where
it finds none it says nothing, so the operators in the graphs are counted here.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchtitan.logging import logger
from torchtitan.parallel.technique import Technique
from torchtitan.torch_private.compiler import compiler_counts
from torchtitan.torch_private.graphs import enable_symmetric_memory, fuse_tensor_parallelism


def enable(group: ProcessGroup) -> None:
    """Fuse in every block compiled from now on what the ranks of `group` (tp) send each other."""
    enable_symmetric_memory(group)
    fuse_tensor_parallelism(show_gathers, count, __file__)


def show_gathers(graph: Graph) -> None:
    """Write the all-gathers of a batch of one as the compiler's patterns expect them.

    What arrives is (ranks, S, D). To gather it along the second dim is to split it and to join the
    pieces there, and this is what is looked for; but torch knows that for one sequence a view,
    (1, ranks * S, D), does the same.
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
    """A new node, with what it gives on tensors that have a shape but no values."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


GATHERS = {f"symm_mem.fused_all_gather{kind}_matmul.default" for kind in ("", "_scaled")}
SCATTERS = {f"symm_mem.fused{kind}_matmul_reduce_scatter.default" for kind in ("", "_scaled")}
FUSED = GATHERS | SCATTERS


def count(graph: Graph) -> None:
    """Count the fused operators of a graph among what the compiler counts.

    It keeps those numbers with a graph in its cache, so they are right after a restart too.
    """
    counts = compiler_counts()["inductor"]
    counts.update(str(node.target) for node in graph.nodes if str(node.target) in FUSED)


class Fused(NamedTuple):
    """How many operators of each kind stand in compiled graphs, forward and backward."""

    gathers: int
    scatters: int


def fused() -> Fused:
    """What this process has fused so far."""
    counts = compiler_counts()["inductor"]
    return Fused(*(sum(counts[name] for name in names) for names in (GATHERS, SCATTERS)))


@dataclass(frozen=True)
class Overlap(Technique):
    """Asynchronous tensor parallelism, after the first step."""

    def confirm(self) -> None:
        confirm()


def confirm() -> None:
    """Log what was fused; after a step, not before, and on a rank that has blocks.

    Raises:
        RuntimeError: if the compiler left out the all-gathers or the reduce-scatters.
    """
    found = fused()
    said = (
        f"{found.gathers} all-gather-matmul and {found.scatters} matmul-reduce-scatter fused in "
        "the compiled graphs"
    )
    if not all(found):
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel did not take effect: {said}. Inductor "
            "found no pattern that it knows between the collectives and the matrix products of a "
            "block (TORCH_LOGS=post_grad_graphs shows what it saw), or this torch has no NCCL; "
            "train without the option"
        )
    logger.info("async tensor parallelism: %s", said)

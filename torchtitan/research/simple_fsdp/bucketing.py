"""What is done to the graphs of a model under `simple_fsdp`, before code is made of them.

Every parameter is gathered by a collective of its own, and its gradient reduced by another. Here it
is decided what the backward gathers again rather than keeps since the forward, and many small
collectives become few large ones, which a network carries faster (arXiv:2411.00284, section 4):

    block  those of one block of the model become one
    size   neighbours become one, up to so many megabytes
    auto   torch's scheduler merges and moves them, by its estimates of what takes how long

On CUDA `block` also moves each collective to where the block before hides it. A pass that finds
nothing to do says nothing, so the collectives are counted before and after.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan.logging import logger
from torchtitan.parallel.stages import Unit
from torchtitan.torch_private.compiler import compiler_counts
from torchtitan.torch_private.graphs import (
    collective,
    graph_pass,
    is_wait,
    merge_collectives,
    module_of,
    schedule_collectives,
)

KEY = "sharding.bucketing"

Bucketing = Literal["none", "block", "size", "auto"]
OPERATIONS = {
    "all_gather_into_tensor": "all-gathers",
    "all_gather_into_tensor_out": "all-gathers",
    "reduce_scatter_tensor": "reduce-scatters",
    "all_reduce": "all-reduces",
}
"""The collectives of parameters and gradients, as graphs call them and as we do."""
UNLIMITED = 1e9
"""Megabytes."""


@dataclass(frozen=True)
class Plan:
    """What to do to the graphs of a part of a model; graphs in the cache are kept apart by it."""

    groups: tuple[str, ...]
    """Names of the process groups that parameters lie on; in a graph nothing else uses them."""
    units: tuple[Unit, ...]
    """The modules whose collectives `block` merges."""
    freed: tuple[str, ...]
    """The modules whose parameters the backward gathers again; "" stands for the whole model."""
    bucketing: Bucketing
    megabytes: float
    device_type: str

    def options(self) -> dict[str, Any]:
        """For `torch.compile`."""
        free, merge = partial(free_after_forward, self), partial(merge_and_count, self)
        return {
            "joint_custom_post_pass": graph_pass(free, __file__, repr(self)),
            "post_grad_custom_post_pass": graph_pass(merge, __file__, repr(self)),
        }


def free_after_forward(plan: Plan, graph: Graph) -> None:
    """In a graph of forward and backward: say which gathered parameters are not kept in between.

    With a parameter goes what is made of nothing else, such as its rows without the padding; else
    that would be kept in its place.
    """
    gathered: dict[Node, str] = {}
    for node in graph.nodes:
        if _kind(plan, node) == "all-gathers":
            gathered[node] = module_of(node)
        elif node.all_input_nodes and all(made in gathered for made in node.all_input_nodes):
            gathered[node] = gathered[node.all_input_nodes[0]]
    for node, module in gathered.items():
        if _is_inside(module, plan.freed):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif is_wait(node):  # also where activations are recomputed
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def merge_and_count(plan: Plan, graph: Graph) -> None:
    """In a graph of forward or of backward: merge collectives; count them before and after."""
    _count(plan, graph, "before")
    if plan.bucketing == "auto":
        schedule_collectives(graph, None)
    elif plan.bucketing == "block" and plan.device_type == "cuda":
        schedule_collectives(graph, plan.units)
    elif plan.bucketing == "block":
        for unit in plan.units:
            merge_collectives(graph, partial(_belongs, plan, unit), UNLIMITED)
    elif plan.bucketing == "size":
        merge_collectives(graph, partial(_belongs, plan, ("",)), plan.megabytes)
    _count(plan, graph, "after")


def _belongs(plan: Plan, modules: Unit, node: Node) -> bool:
    """Whether a collective is one of the parameters in `modules`."""
    return _kind(plan, node) is not None and _is_inside(module_of(node), modules)


def _kind(plan: Plan, node: Node) -> str | None:
    """What a node does to parameters or gradients, if it does."""
    kind = OPERATIONS.get(collective(node))
    return kind if kind and node.args[-1] in plan.groups else None


def _is_inside(module: str, modules: Iterable[str]) -> bool:
    return any(not name or f"{module}.".startswith(f"{name}.") for name in modules)


def _count(plan: Plan, graph: Graph, when: str) -> None:
    """Among what the compiler counts, so that it keeps the numbers with a graph in its cache."""
    counts = compiler_counts()["inductor"]
    for node in graph.nodes:
        if kind := _kind(plan, node):
            whole = (node.args[0] if kind == "reduce-scatters" else node).meta["val"]
            counts[f"{kind} {when}"] += 1
            counts[f"bytes of {kind} {when}"] += whole.numel() * whole.itemsize


class Tally(NamedTuple):
    """The collectives of a kind that stand in compiled graphs, forward and backward together."""

    before: int
    after: int
    bytes: int
    """Of their wholes: what is gathered, and what is reduced."""


def tallies() -> dict[str, Tally]:
    """What this process has compiled so far, by kind."""
    counts = compiler_counts()["inductor"]
    found = {
        kind: Tally(
            counts[f"{kind} before"], counts[f"{kind} after"], counts[f"bytes of {kind} before"]
        )
        for kind in dict.fromkeys(OPERATIONS.values())
    }
    return {kind: tally for kind, tally in found.items() if tally.before}


def confirm(bucketing: Bucketing) -> None:
    """Log what was merged; after a step, not before.

    Raises:
        RuntimeError: if nothing was.
    """
    found = tallies()
    said = ", ".join(
        f"{kind} {tally.before} -> {tally.after} ({tally.bytes / 1e6:.1f} MB)"
        for kind, tally in found.items()
    )
    logger.info("simple_fsdp: %s", said or "one rank, so no collectives")
    if found and bucketing != "none" and all(t.after >= t.before for t in found.values()):
        raise RuntimeError(
            f'{KEY} = "{bucketing}" did not take effect: {said}. With "size" a bucket has to hold '
            'two parameters (sharding.bucket_mb); use "none" or "block"'
        )

"""Passes over the graphs of a model under `simple_fsdp`, before code generation.

Every parameter is gathered by its own collective, and its gradient reduced by another. The passes
decide which parameters the backward gathers again instead of keeping them, and merge many small
collectives into a few large, faster ones (arXiv:2411.00284, section 4):

    block  merges those of each block of the model
    size   merges neighbours, up to a number of megabytes
    auto   torch's scheduler merges and moves them, by its estimates of their time

On CUDA `block` also moves each collective so that the previous block's computation hides it. A pass
without effect is silent, so the collectives are counted before and after.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan.comm import Operation
from torchtitan.config import import_wing
from torchtitan.logging import logger
from torchtitan.parallel.stages import Unit
from torchtitan.torch_private.compiler import compiler_counts
from torchtitan.torch_private.distributed import process_group
from torchtitan.torch_private.graphs import (
    collective,
    graph_pass,
    is_wait,
    merge_collectives,
    module_of,
    nodes_of,
    schedule_collectives,
    work_of,
)

KEY = "sharding.bucketing"

Bucketing = Literal["none", "block", "size", "auto"]
OPERATIONS = {
    "all_gather_into_tensor": "all-gathers",
    "all_gather_into_tensor_out": "all-gathers",
    "reduce_scatter_tensor": "reduce-scatters",
    "all_reduce": "all-reduces",
}
"""Collectives of parameters and gradients: names in graphs, mapped to ours."""
MESSAGES: dict[str, Operation] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
UNLIMITED = 1e9
"""Megabytes that no bucket reaches."""


@dataclass(frozen=True)
class BucketingPlan:
    """Plan of the passes over the graphs of a part of a model; part of the key of cached graphs."""

    groups: tuple[str, ...]
    """Names of the process groups of parameters; in a graph nothing else uses them."""
    units: tuple[Unit, ...]
    """Modules whose collectives `block` merges."""
    freed: tuple[str, ...]
    """Modules whose parameters the backward gathers again; "" is the whole model."""
    bucketing: Bucketing
    megabytes: float
    overlaps: bool
    hardware: str
    """Hardware whose rates estimate times, for `auto`."""

    def options(self) -> dict[str, Any]:
        """Return the options for `torch.compile`."""
        free, merge = partial(free_after_forward, self), partial(merge_and_count, self)
        return {
            "joint_custom_post_pass": graph_pass(free, __file__, repr(self)),
            "post_grad_custom_post_pass": graph_pass(merge, __file__, repr(self)),
        }


def free_after_forward(plan: BucketingPlan, graph: Graph) -> None:
    """Mark gathered parameters in a joint graph that are not kept from forward to backward.

    Values computed from such a parameter alone, such as its rows without the padding, are marked
    too; otherwise they would be kept in its place.
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
        elif is_wait(node):  # even if activations are recomputed
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def merge_and_count(plan: BucketingPlan, graph: Graph) -> None:
    """Merge the collectives of a forward or backward graph, counting them before and after."""
    _count(plan, graph, "before")
    if plan.bucketing == "auto" or (plan.bucketing == "block" and plan.overlaps):
        times = Times(plan.hardware)
        modules = plan.units if plan.bucketing == "block" else None
        schedule_collectives(graph, modules, times.seconds, times.flops, times.bandwidth)
    elif plan.bucketing == "block":
        for unit in plan.units:
            merge_collectives(graph, partial(_belongs, plan, unit), UNLIMITED)
    elif plan.bucketing == "size":
        merge_collectives(graph, partial(_belongs, plan, ("",)), plan.megabytes)
    _count(plan, graph, "after")


class Times:
    """Estimated times of nodes, the same on all ranks: by FLOPs, bytes and links of a hardware."""

    def __init__(self, name: str) -> None:
        self.hardware = import_wing("torchtitan.plan.hardware", KEY).find_hardware(name)
        self.message_seconds = import_wing("torchtitan.plan.messages", KEY).message_seconds
        self.bandwidth: float = self.hardware.memory_bandwidth * 1e9
        peaks = self.hardware.peaks
        self.flops: float = (peaks.bfloat16 or peaks.float32 or 0.0) * 1e12

    def seconds(self, node: Node, size: int | None) -> float:
        """Return the time of a node; of a collective, if it read and wrote `size` bytes."""
        flops, moved = work_of(node)
        if operation := MESSAGES.get(collective(node)):
            ranks = dist.get_process_group_ranks(process_group(str(node.args[-1])))
            # Read and written are the whole and a part of it, or the whole twice.
            times = 2 if operation in ("all_reduce", "all_to_all") else 1 + 1 / len(ranks)
            whole = round((moved if size is None else size) / times)
            seconds: float = self.message_seconds(operation, max(whole, 1), ranks, self.hardware)
            return seconds
        return max(flops / self.flops, moved / self.bandwidth)


def _belongs(plan: BucketingPlan, modules: Unit, node: Node) -> bool:
    """Whether a collective belongs to the parameters in `modules`."""
    return _kind(plan, node) is not None and _is_inside(module_of(node), modules)


def _kind(plan: BucketingPlan, node: Node) -> str | None:
    """Return the kind of a node's collective on parameters or gradients, or None."""
    kind = OPERATIONS.get(collective(node))
    return kind if kind and node.args[-1] in plan.groups else None


def _is_inside(module: str, modules: Iterable[str]) -> bool:
    return any(not name or f"{module}.".startswith(f"{name}.") for name in modules)


def _count(plan: BucketingPlan, graph: Graph, when: str) -> None:
    """Count collectives among the compiler's counters, which are cached with the graph."""
    counts = compiler_counts()["inductor"]
    for node in nodes_of(graph):
        if kind := _kind(plan, node):
            counts[f"{kind} {when}"] += 1
            if when == "before":
                whole = (node.all_input_nodes[0] if kind == "reduce-scatters" else node).meta["val"]
                counts[f"bytes of {kind}"] += whole.numel() * whole.itemsize


class Tally(NamedTuple):
    """Collectives of a kind in compiled graphs, forward and backward together."""

    before: int
    after: int
    bytes: int
    """Total size of the whole tensors that are gathered or reduced."""


def tallies() -> dict[str, Tally]:
    """Return the tallies of all graphs compiled by this process so far, by kind."""
    counts = compiler_counts()["inductor"]
    found = {
        kind: Tally(counts[f"{kind} before"], counts[f"{kind} after"], counts[f"bytes of {kind}"])
        for kind in dict.fromkeys(OPERATIONS.values())
    }
    return {kind: tally for kind, tally in found.items() if tally.before}


def confirm(bucketing: Bucketing, hardware: str = "") -> None:
    """Log the merged collectives, and by whose rates they were ordered; call it after a step.

    Raises:
        RuntimeError: if none was merged.
    """
    found = tallies()
    said = ", ".join(
        f"{kind} {tally.before} -> {tally.after} ({tally.bytes / 1e6:.1f} MB)"
        for kind, tally in found.items()
    )
    if said and bucketing == "auto":
        said += f", in the order that estimates for {hardware} give (sharding.hardware)"
    logger.info("simple_fsdp: %s", said or "one rank, no collectives")
    if found and bucketing != "none" and all(t.after >= t.before for t in found.values()):
        raise RuntimeError(
            f'{KEY} = "{bucketing}" did not take effect: {said}. With "size" a bucket must hold '
            'at least two parameters (sharding.bucket_mb); use "none" or "block"'
        )

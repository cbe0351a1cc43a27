"""Passes over the compiler's graphs, and the collectives in them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

GraphPass = Callable[[Graph], None]
"""Function that changes a graph in place."""
NodeTime = Callable[[Node, int | None], float]
"""Function of a node, and of bytes that a collective would send instead of its own, to seconds."""


def graph_pass(function: GraphPass, source: str, settings: str = "") -> Any:
    """Wrap `function` as a pass of inductor.

    Args:
        source: path of the file that defines it; graphs cached with other versions of it are stale.
        settings: other inputs that determine its effect.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            function(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((source, __file__), settings)

    return Pass()


def collective(node: Node) -> str:
    """Return the collective started by a node; "" if none. Its last argument names the group."""
    _, _, name = str(node.target).partition("_c10d_functional.")
    return "" if is_wait(node) else name.partition(".")[0]


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def module_of(node: Node) -> str:
    """Return the name, within the compiled module, of the module whose forward a node computes.

    For a node of the backward, it is the module whose gradients it computes. A node without a
    counterpart in the forward, such as the sum over replicas of a parameter, belongs to the module
    of its input.
    """
    from torch._inductor.fx_passes.graph_view import _clean_stack_name, _get_module_stack

    while not (stack := _get_module_stack(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return _clean_stack_name(stack[-1][0]) if stack else ""


def merge_collectives(graph: Graph, is_wanted: Callable[[Node], bool], megabytes: float) -> None:
    """Merge consecutive collectives of a kind, group and dtype, up to `megabytes`.

    Args:
        is_wanted: filters the nodes that start a collective; the others are skipped.
    """
    from torch._inductor.fx_passes import bucketing
    from torch._inductor.pattern_matcher import stable_topological_sort

    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        buckets = getattr(bucketing, f"bucket_{kind}_by_mb")(
            graph.owning_module, lambda _: megabytes, lambda wait: is_wanted(wait.args[0])
        )
        for bucket in buckets:
            getattr(bucketing, f"merge_{kind}_bucket")(graph, bucket, mode="default")
        stable_topological_sort(graph)


def schedule_collectives(
    graph: Graph,
    modules: Sequence[Sequence[str]] | None,
    seconds: NodeTime,
    flops: float,
    bandwidth: float,
) -> None:
    """Merge the collectives of each of `modules` (None: by estimated times), and reorder them.

    Nothing is measured, and ranks do not exchange times while they compile: one that found its
    graph in the cache would not take part.

    Args:
        seconds: time of a node, the same on all ranks, or their orders would differ.
        flops, bandwidth: rates per second, used instead of the rates of this GPU.
    """
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
    from torch._inductor.fx_passes.overlap_scheduling import (
        OverlapScheduler,
        schedule_overlap_bucketing,
    )
    from torch.utils import _runtime_estimation

    assert graph.owning_module is not None
    exchange = "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks"
    replace = mock.patch.object
    with (
        replace(_runtime_estimation, "get_device_tflops", lambda dtype: flops / 1e12),
        replace(_runtime_estimation, "get_gpu_dram_gbps", lambda: bandwidth / 1e9),
        replace(OverlapScheduler, exchange, lambda self: None),
        grouped_heads_counted(),
    ):
        if modules is None:
            schedule_overlap_bucketing(
                graph.owning_module,
                collective_bucketing=True,
                insert_overlap_deps=True,
                custom_runtime_estimation=lambda node, size: 1e3 * seconds(node, size),
            )
        else:
            plans: list[list[str] | str] = [list(names) for names in modules]
            manual_overlap_bucketing(graph.owning_module, plans, insert_overlap_deps=True)


@contextmanager
def grouped_heads_counted() -> Iterator[None]:
    """Count the FLOPs of attention whose query heads share keys; torch 2.11 refuses these."""
    forward: Any = flop_counter.sdpa_flop_count
    backward: Any = flop_counter.sdpa_backward_flop_count

    def of_each(q: Sequence[int], *shared: Sequence[int]) -> list[tuple[int, ...]]:
        return [(own[0], q[1], *own[2:]) for own in shared]

    with (
        mock.patch.object(
            flop_counter, "sdpa_flop_count", lambda q, k, v: forward(q, *of_each(q, k, v))
        ),
        mock.patch.object(
            flop_counter,
            "sdpa_backward_flop_count",
            lambda grad, q, k, v: backward(grad, q, *of_each(q, k, v)),
        ),
    ):
        yield


def nodes_of(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph, with those that the scheduler has wrapped."""
    for node in graph.nodes:
        yield node
        if node.op == "get_attr":
            inner = getattr(graph.owning_module, str(node.target), None)
            if isinstance(inner, GraphModule):
                yield from inner.graph.nodes


def work_of(node: Node) -> tuple[int, int]:
    """Return the FLOPs of a node, and the bytes that it reads and writes; none for a view."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is None or target.is_view:
        return 0, 0
    given = map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    out, (arguments, options) = node.meta.get("val"), given
    count = flop_registry.get(packet)
    flops = count(*arguments, **options, out_val=out) if count else 0
    tensors = [each for each in tree_leaves((given, out)) if isinstance(each, Tensor)]
    return flops, sum(each.numel() * each.itemsize for each in tensors)


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let compiled code use symmetric memory of the ranks of `group`.

    Torch calls this no longer needed, but its compiler still fuses only after this call.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def fuse_tensor_parallelism(before: GraphPass, after: GraphPass, source: str) -> None:
    """Make inductor fuse collectives with matrix products in later compilations.

    Args:
        before, after: passes to run on each graph before and after fusion.
        source: path of the file that defines them; graphs cached with other versions of it are
            stale.
    """
    from torch._inductor import config

    config._micro_pipeline_tp = True
    config.post_grad_custom_pre_pass = graph_pass(before, source, before.__name__)
    config.post_grad_custom_post_pass = graph_pass(after, source, after.__name__)

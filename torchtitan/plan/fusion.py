"""Kernels and buffers that Inductor makes of a graph.

Inductor runs matrix products, attention, collectives and custom operators one by one, and fuses the
loops between them, which write only results that are read elsewhere. The rules here are Inductor's
own, without its search:

1. A pointwise result is not stored, but computed again by each reader. It is stored if a product or
   the like reads it, if it is an output or a reduction, or if several readers would repeat many
   reads or operations (`realize_reads_threshold`, `realize_opcount_threshold`).
2. Stored results are computed in one kernel if they read mostly the same, or one reads another,
   over the same elements, and no product waits for one and is waited for by the other.
3. A buffer is freed after its last use, and what a loop writes can take its place, but not that of
   the inputs and gradients that are given to the compiled function.
"""

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from torchtitan.torch_private.graphs import is_wait

REPEATED_READS, ALL_READS, REPEATED_OPERATIONS = 4, 8, 30
"""Inductor's limits for the reads and operations of a result that is not stored."""

aten = torch.ops.aten
VIEWS = {
    *(aten._unsafe_view.default, aten.reshape.default, aten.detach.default, aten.alias.default),
    torch.ops._c10d_functional.wait_tensor.default,
}
"""Operators whose result is a view in a graph, though their schemas do not say so."""
_REDUCED = "sum mean amax amin max min any all argmax argmin prod var var_mean logsumexp cumsum"
REDUCTIONS = frozenset(
    [
        *(f"aten.{name}" for name in (*_REDUCED.split(), "linalg_vector_norm")),
        *(f"prims.{name}" for name in ("sum", "var", "prepare_softmax_online")),
    ]
)
ONE_BY_ONE = {
    *(aten._grouped_mm, aten.sort, aten.topk),
    *(aten._scaled_dot_product_flash_attention_for_cpu,),
    *(aten._scaled_dot_product_flash_attention_for_cpu_backward,),
}
"""Operators of torch that are not loops, in addition to those whose FLOPs torch counts."""
INDIRECT = {aten.index, aten.gather, aten.embedding}
"""Operators that read a few elements of their first argument."""


@dataclass(eq=False)
class FusedKernel:
    """Step of a compiled graph: an operator, or loops that are fused."""

    index: int
    """Position in the graph."""
    level: int
    """Number of operators, one after the other, for which it waits."""
    operator: Node | None = None
    """The operator; None for loops."""
    members: list[Node] = field(default_factory=list)
    """Results that it computes."""
    sizes: set[int] = field(default_factory=set)
    """Numbers of elements over which its loops can run."""
    reads: dict[Node, int] = field(default_factory=dict)
    """Bytes that it reads, by buffer or input."""
    writes: list[Node] = field(default_factory=list)
    """Buffers that it writes: the members that are used elsewhere."""
    frees: list[Node] = field(default_factory=list)
    """Buffers and inputs that no later step reads."""

    @property
    def node(self) -> Node:
        """The last node that it computes."""
        return self.operator or self.members[-1]


class FusedGraph:
    """Steps of a graph, in the order in which they run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.outputs = {base(n) for n in tree_leaves(graph.output_node().args) if _is_tensor(n)}
        self.users = _users(graph)
        self.kernels = list[FusedKernel]()
        self.maker: dict[Node, FusedKernel] = {}
        self.inlined: dict[Node, tuple[dict[Node, int], int]] = {}
        """Bytes that a pointwise result reads, which its readers compute, and its operations."""
        for index, node in enumerate(graph.nodes):
            if is_wait(node):  # until which a collective reads its inputs
                self.kernels.append(FusedKernel(index, 0, node, reads=self._reads(node.args[0])[0]))
            elif node.op == "call_function" and not is_view(node) and not _is_part(node):
                if is_loop(node):
                    self._add_loop(index, node)
                else:
                    self._add_operator(index, node)

    @cached_property
    def steps(self) -> list[FusedKernel]:
        """Steps in order, with what each writes and frees."""
        readers = defaultdict[Node, list[FusedKernel]](list)
        for kernel in self.kernels:
            for node in kernel.reads:
                readers[node].append(kernel)
        for kernel in self.kernels:
            for node in kernel.members:
                kernel.reads.pop(node, None)
                is_read = any(each is not kernel for each in readers[node])
                if is_read or node in self.outputs or kernel.operator is not None:
                    kernel.writes.append(node)
        ordered = list(self._in_order())
        last = dict[Node, FusedKernel]()
        for kernel in ordered:
            last |= dict.fromkeys([*kernel.writes, *kernel.reads], kernel)
        for node, kernel in last.items():
            if node not in self.outputs:
                kernel.frees.append(node)
        return ordered

    def _in_order(self) -> Iterator[FusedKernel]:
        """Yield kernels after those whose results they read, and else in the graph's order."""
        waits = {kernel: set(self._sources(kernel)) for kernel in self.kernels}
        followers = defaultdict[FusedKernel, list[FusedKernel]](list)
        for kernel, sources in waits.items():
            for source in sources:
                followers[source].append(kernel)
        ready = [(kernel.index, id(kernel), kernel) for kernel in self.kernels if not waits[kernel]]
        heapq.heapify(ready)
        while ready:
            kernel = heapq.heappop(ready)[-1]
            yield kernel
            for follower in followers[kernel]:
                waits[follower].discard(kernel)
                if not waits[follower]:
                    heapq.heappush(ready, (follower.index, id(follower), follower))

    def _sources(self, kernel: FusedKernel) -> Iterator[FusedKernel]:
        for node in kernel.reads:
            maker = self.maker.get(node)
            if maker is not None and maker is not kernel:
                yield maker

    def _reads(self, node: Node) -> tuple[dict[Node, int], int]:
        """Return the bytes that a node reads of each buffer, and the operations it repeats."""
        found, operations = dict[Node, int](), 0
        for number, argument in enumerate(node.all_input_nodes):
            if not _is_tensor(argument):
                continue
            source = base(argument)
            if source in self.inlined:
                reads, repeated = self.inlined[source]
                operations += repeated
            else:
                size = min(size_of(argument), size_of(source))
                if number == 0 and _packet(node) in INDIRECT:
                    size = min(size, size_of(node))
                reads = {source: size}
            for each, size in reads.items():
                found[each] = max(size, found.get(each, 0))
        return found, operations

    def _level(self, reads: Iterable[Node]) -> int:
        makers = (self.maker.get(node) for node in reads)
        return max((m.level + (m.operator is not None) for m in makers if m is not None), default=0)

    def _add_operator(self, index: int, node: Node) -> None:
        reads, _ = self._reads(node)
        kernel = FusedKernel(index, self._level(reads), node, reads=reads)
        self._add(kernel, node)

    def _add(self, kernel: FusedKernel, node: Node) -> None:
        """Add a kernel that computes a node, or the parts of one with several results."""
        self.kernels.append(kernel)
        for each in [node] if _is_tensor(node) else node.users:
            if _is_tensor(each) and "out" not in each.kwargs:
                kernel.members.append(each)
                self.maker[each] = kernel

    def _add_loop(self, index: int, node: Node) -> None:
        reads, operations = self._reads(node)
        reduces = str(_packet(node)) in REDUCTIONS
        users = self.users[node]
        is_stored = (
            reduces
            or node in self.outputs
            or not users  # it changes an input
            or any(not is_loop(user) for user in users)
            or len(reads) > ALL_READS
            or (
                len(users) > 1
                and (len(reads) > REPEATED_READS or operations >= REPEATED_OPERATIONS)
            )
        )
        if not is_stored:
            self.inlined[node] = reads, operations + 1
            return
        size = max(count(node), count(node.args[0]) if reduces else 0)
        sizes = {size, *([count(node)] * reduces)}
        kernel = FusedKernel(index, self._level(reads), sizes=sizes, reads=reads)
        self._add(kernel, node)
        for other in [*self._related(kernel, size)]:
            if not self._has_way(kernel, other) and not self._has_way(other, kernel):
                self._merge(other, kernel)

    def _related(self, kernel: FusedKernel, size: int) -> Iterator[FusedKernel]:
        """Yield the kernels of loops that share a tensor with the last one."""
        for other in self.kernels:
            fits = other.operator is None and other.level == kernel.level and other is not kernel
            if fits and size in other.sizes:
                shared = sum(
                    size
                    for node, size in kernel.reads.items()
                    if node in other.reads or node in other.members
                )
                whole = min(sum(kernel.reads.values()), sum(other.reads.values()))
                if 2 * shared >= whole > 0 or any(node in other.members for node in kernel.reads):
                    yield other

    def _has_way(self, first: FusedKernel, last: FusedKernel) -> bool:
        """Whether `last` waits for a third kernel that waits for `first`."""
        seen, queue = {last}, [k for k in self._sources(last) if k is not first]
        while queue:
            kernel = queue.pop()
            if kernel is first:
                return True
            if kernel not in seen and kernel.level >= first.level:
                seen.add(kernel)
                queue += self._sources(kernel)
        return False

    def _merge(self, other: FusedKernel, kernel: FusedKernel) -> None:
        """Compute `other` in `kernel`."""
        self.kernels.remove(other)
        kernel.members[:0] = other.members
        kernel.sizes |= other.sizes
        for node, size in other.reads.items():  # all of it is read once
            kernel.reads[node] = max(size, kernel.reads.get(node, 0))
        for node in other.members:
            self.maker[node] = kernel


def is_view(node: Node) -> bool:
    """Whether a node only looks at its first argument in another way."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    overload = node.target
    return isinstance(overload, torch._ops.OpOverload) and (overload.is_view or overload in VIEWS)


def is_loop(node: Node) -> bool:
    """Whether Inductor makes loops of a node, and does not call it as an operator."""
    overload = node.target
    if overload is operator.getitem:
        return is_loop(node.args[0])  # type: ignore[arg-type]
    if not isinstance(overload, torch._ops.OpOverload) or overload.namespace not in LOOPS:
        return False
    packet = overload._overloadpacket
    return packet not in flop_registry and packet not in ONE_BY_ONE


LOOPS = ("aten", "prims", "inductor_prims")
"""Namespaces of the operators that Inductor makes loops of."""


def base(node: Node) -> Node:
    """Return the node whose buffer holds the result of a node."""
    while is_view(node) or "out" in node.kwargs:
        node = node.kwargs.get("out", node.args[0])  # type: ignore[assignment]
    return node


def count(node: Any) -> int:
    """Return the number of elements of a node's result."""
    found = [each.numel() for each in tree_leaves(node.meta["val"]) if isinstance(each, Tensor)]
    return max(found, default=0)


def size_of(node: Node) -> int:
    """Return the bytes of a node's result, where repeated elements count once."""
    result = node.meta["val"]
    if not isinstance(result, Tensor):
        return 0
    return min(result.numel() * result.itemsize, result.untyped_storage().nbytes())


def _is_part(node: Node) -> bool:
    """Whether a node is one of the results of another, which makes it."""
    return node.target is operator.getitem


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def _packet(node: Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


def _users(graph: Graph) -> dict[Node, set[Node]]:
    """Return the nodes that read the result of each, also through views and parts."""
    found: dict[Node, set[Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = set[Node]()
        for user in node.users:
            through = user.op == "call_function" and (is_view(user) or _is_part(user))
            found[node] |= found[user] if through else {user}
    return found

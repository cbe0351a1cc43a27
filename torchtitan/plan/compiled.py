"""Compiled functions in a recording: their real graphs, with the kernels that Inductor would run.

A function is compiled as in training: torch traces it, differentiates it, and chooses what to keep
for the backward (`min_cut_rematerialization_partition`, with the tags of recomputation and under a
memory budget). Only the last step differs: instead of generating code, the graphs are fused as
`fusion` says, and a call records the kernels and buffers and returns tensors without values.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from torchtitan import losses
from torchtitan.optim import adam_and_sgd
from torchtitan.parallel import compile
from torchtitan.parallel.compile import CompileConfig
from torchtitan.plan.cuda_operators import workspace_bytes
from torchtitan.plan.fusion import FusedGraph, FusedKernel, base, is_view, size_of
from torchtitan.plan.recording import (
    COMMUNICATION,
    IN_PARTS,
    NO_KERNEL,
    Event,
    Kernel,
    KernelRecorder,
    describe_kernel,
    messages,
)
from torchtitan.torch_private.compiler import (
    any_number_of_shapes,
    compile_until_code,
    forgotten_compilations,
    without_modes,
)
from torchtitan.torch_private.graphs import module_of

FUSED = "inductor.fused"
"""Name of a kernel of fused loops."""


class SharedGraphs:
    """Compiled graphs of recordings made one after the other: equal blocks share one.

    Use it as a context, at whose end the compilations are forgotten.
    """

    def __init__(self) -> None:
        self.recorder: KernelRecorder
        """Recorder of the recording that is made now."""
        self._backends: dict[Any, Any] = {}
        self._opened = ExitStack()

    def __enter__(self) -> "SharedGraphs":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def backend(self, options: dict[str, Any]) -> Callable[..., Any]:
        """Return the backend of functions that may share their graphs."""
        if not self._backends:
            self._opened.enter_context(forgotten_compilations())
            self._opened.enter_context(any_number_of_shapes())
        values = sorted((name, id(value)) for name, value in options.items())
        key = self.recorder.device_type, *self.recorder.inner_blocks, *values
        if key not in self._backends:
            made = compile_until_code(partial(RecordedGraph, self), options)
            self._backends[key] = made, options  # whose values live as long as their numbers
        return self._backends[key][0]  # type: ignore[no-any-return]


@contextmanager
def recorded_compilation(graphs: SharedGraphs) -> Iterator[None]:
    """Record functions that are compiled inside as such."""

    def compiled(
        function: Callable[..., Any], config: CompileConfig, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        return recorded(function, config.backend, config.fullgraph, options)

    @cache
    def compiled_part(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        return recorded(function, backend)

    def recorded(
        function: Callable[..., Any],
        backend: str,
        fullgraph: bool = True,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if backend != "inductor":
            return function

        @cache  # on the first call, as the recorder then knows the blocks in a graph
        def traced() -> Callable[..., Any]:
            return torch.compile(
                function, backend=graphs.backend(options or {}), fullgraph=fullgraph, dynamic=False
            )

        is_traced = [True]

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_traced[0]:
                try:
                    with (
                        torch.compiler.set_stance("default"),
                        without_modes(),
                        warnings.catch_warnings(),
                    ):
                        warnings.simplefilter("ignore")  # of fake tensors
                        return traced()(*args, **kwargs)
                except RuntimeError as error:
                    is_traced[0] = False
                    cause = getattr(error, "inner_exception", error)
                    reason = str(cause).strip().splitlines()[0]
                    graphs.recorder.notes.append(
                        f"{name_of(function)} is modelled without compilation: {reason}"
                    )
            return function(*args, **kwargs)

        return run

    with (
        mock.patch.object(compile, "compiled", compiled),
        mock.patch.object(losses, "_compiled", compiled_part),
        mock.patch.object(
            adam_and_sgd, "compiled_update", partial(compiled_part, backend="inductor")
        ),
    ):
        yield


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of the class of a method, or of a function."""
    return getattr(function, "__qualname__", type(function).__name__)


@dataclass(frozen=True)
class _Step:
    """Step of a graph, as it is recorded."""

    events: Sequence[Event]
    allocates: Mapping[Node, int]
    frees_first: Sequence[Node]
    """Buffers whose place its results take."""
    frees: Sequence[Node]
    workspace: int = 0
    parts: Callable[[Mapping[Node, Any], FakeTensorMode], Any] | None = None
    """Function that runs the operators of which it is made."""


class RecordedGraph:
    """Graph that is recorded when it is called."""

    def __init__(self, graphs: SharedGraphs, module: GraphModule, is_backward: bool) -> None:
        self.graphs, self.is_backward = graphs, is_backward
        graph = module.graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.results = list(graph.output_node().args[0])  # type: ignore[arg-type]
        fused = FusedGraph(graph)
        self.outputs = fused.outputs
        self.steps = [self._step(kernel) for kernel in fused.steps]
        nodes = [kernel.node for kernel in fused.steps]
        self.marks = dict(_marks(nodes, graphs.recorder.inner_blocks, is_backward))

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Record the graph; `arguments` is emptied, so that each can be freed at its last use."""
        mode = next(each.fake_mode for each in arguments if isinstance(each, FakeTensor))
        held: dict[Node, Any] = dict(zip(self.inputs, arguments, strict=True))
        arguments.clear()
        internal = dict[Node, int]()
        for index, step in enumerate(self.steps):
            for name in self.marks.get(index, ()):
                kind = "recomputed" if self.is_backward else "activations"
                self.graphs.recorder.mark(name, name.partition(" of ")[2], kind)
            if step.parts is not None:
                step.parts(held, mode)
            self._free(step.frees_first, held, internal)
            for node, size in step.allocates.items():
                if node in self.outputs:
                    held[node] = self._empty(node, mode)
                else:
                    internal[node] = self.graphs.recorder.allocate(size, FUSED)
            self.graphs.recorder.use(step.workspace, FUSED)
            self.graphs.recorder.recording.events += step.events
            self._free(step.frees, held, internal)
        with without_modes(), mode:
            return [self._result(result, held) for result in self.results]

    def _empty(self, node: Node, mode: FakeTensorMode) -> Tensor:
        with without_modes(), mode:
            made = _empty_like(node.meta["val"])
        name = str(getattr(node.target, "_overloadpacket", FUSED))
        self.graphs.recorder.adopt(made, name)
        return made

    def _free(
        self, nodes: Sequence[Node], held: dict[Node, Any], internal: dict[Node, int]
    ) -> None:
        for node in nodes:
            if node in internal:
                self.graphs.recorder.free(internal.pop(node))
            else:
                held.pop(node, None)

    def _result(self, result: Any, held: dict[Node, Any]) -> Any:
        """Return an output, which may be a view of another or of an input."""
        if not isinstance(result, Node):
            return result
        source = held[base(result)]
        if not is_view(result):
            return source
        like, origin = result.meta["val"], base(result).meta["val"]
        offset = source.storage_offset() + like.storage_offset() - origin.storage_offset()
        return source.as_strided(like.shape, like.stride(), offset)

    def _step(self, kernel: FusedKernel) -> _Step:
        sizes, node = {node: size_of(node) for node in kernel.writes}, kernel.operator
        if node is None:
            taken = [*places_taken(kernel.frees, sizes)]
            rest = [each for each in kernel.frees if each not in taken]
            return _Step([_fused(kernel, sum(sizes.values()))], sizes, taken, rest)
        arguments, keywords, out = (_values(each) for each in (node.args, node.kwargs, node))
        function: Any = node.target
        packet = function._overloadpacket
        if (whole := IN_PARTS.get(str(packet))) is not None:
            return _Step([], sizes, [], kernel.frees, parts=partial(self._run, whole, node))
        events: list[Event] = [*messages(function, arguments, keywords, out)]
        device = self.graphs.recorder.device_type
        if function.namespace not in COMMUNICATION and str(packet) not in NO_KERNEL:
            written = sum(sizes.values())
            events.append(describe_kernel(function, arguments, keywords, out, written, device))
        workspace = workspace_bytes(function, arguments) if device == "cuda" else 0
        return _Step(events, sizes, [], kernel.frees, workspace)

    def _run(
        self,
        function: Callable[..., Any],
        node: Node,
        held: Mapping[Node, Any],
        mode: FakeTensorMode,
    ) -> None:
        """Record what a function runs, given arguments like those of a node.

        The documents of tokens have values, by which a sequence is cut.
        """

        def given(argument: Node) -> Any:
            found = held.get(argument)
            like = argument.meta["val"]
            return _empty_like(like) if found is None or is_fake(found) else found

        with without_modes(), mode:
            self.graphs.recorder.run(function, *tree_map_only(Node, given, node.args))


def _fused(kernel: FusedKernel, written: int) -> Kernel:
    shapes = tuple(tuple(node.meta["val"].shape) for node in [*kernel.reads][:4])
    results = (node.meta["val"] for node in [*kernel.writes, *kernel.reads])
    dtypes = [each.dtype for each in results if each.is_floating_point()]
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    return Kernel(FUSED, 0, sum(kernel.reads.values()), written, narrowest, shapes)


def places_taken(frees: Sequence[Node], sizes: Mapping[Node, int]) -> Iterator[Node]:
    """Yield the buffers in whose place a loop, which reads them last, can write its results."""
    places = [*sizes.values()]
    for node in frees:
        is_given = node.name.startswith(("primals", "tangents"))  # not saved by the forward
        if node not in sizes and not is_given and size_of(node) in places:
            places.remove(size_of(node))
            yield node


def _values(arguments: Any) -> Any:
    """Return the fake tensors that stand for nodes."""
    return tree_map_only(Node, lambda node: node.meta["val"], arguments)


def _empty_like(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _marks(
    nodes: Sequence[Node], blocks: Collection[str], is_backward: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the marks of blocks in a graph of a whole model, by the index of the step they precede.

    A block starts with its first step and ends where the next does.
    """
    names = [_block_of(node, blocks) for node in nodes]
    order = [name for name in blocks if name in names]
    if is_backward:
        order.reverse()
    now = ""
    for index, name in enumerate(names):
        if order and name == order[0]:  # a shared tensor may be of a block that is not yet due
            ended = [f"end of forward of {now}"] if now and not is_backward else []
            yield index, [*ended, f"{'backward' if is_backward else 'forward'} of {name}"]
            now = order.pop(0)
        elif now and not name and not order and not is_backward:
            yield index, [f"end of forward of {now}"]
            now = ""


def _block_of(node: Node, blocks: Collection[str]) -> str:
    """Return the block of which a node computes a part; "" if it is of none."""
    module = module_of(node) if blocks else ""
    return next((name for name in blocks if f"{module}.".startswith(f"{name}.")), "")

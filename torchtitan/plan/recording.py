"""Records what a computation on fake tensors would run, send and allocate, event by event.

Fake tensors have shapes, dtypes and storages of known size, but no memory, so the real code of a
step runs on a laptop at the sizes of any cluster. A recording is a list of events in the order in
which the host issues them:

    Kernel   an operator that reads and writes tensors
    Message  a collective, or a message between two ranks
    Change   a storage that is allocated, resized or freed
    Mark     a named moment, such as the start of a block's forward
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchtitan.comm import Operation
from torchtitan.losses import chunked_gradients, chunked_statistics
from torchtitan.parallel.context import context_attention, context_attention_backward
from torchtitan.plan.cuda_operators import (
    ON_CUDA,
    is_causal,
    is_packed_attention,
    packed_attention_flops,
    workspace_bytes,
)
from torchtitan.torch_private.distributed import process_group


class Kernel(NamedTuple):
    """Operator that reads and writes tensors."""

    name: str
    """Name in torch without its overload, such as "aten.mm"."""
    flops: int
    """Floating-point operations of matrix products, as torch counts them; 0 for all others."""
    read: int
    """Bytes of its inputs."""
    written: int
    """Bytes of its outputs."""
    dtype: torch.dtype
    """Dtype of its first input; of fused loops, the narrowest."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its first inputs."""
    is_causal: bool = False
    """Whether it is attention of each token to earlier ones, for which `flops` counts all pairs."""


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b[-1]


if torch.ops.aten._grouped_mm not in flop_registry:  # torch 2.13 does not count it
    register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_flops)

DISPATCH = Kernel("dispatch", 0, 0, 0, torch.int64, ())
"""Work of the host alone: it finds the operators on this rank of one on a DTensor."""


class Message(NamedTuple):
    """Collective, or message between two ranks."""

    group: str
    """Name of the process group."""
    operation: Operation
    bytes: int
    """Size of the whole tensor, as in `torchtitan.comm.sent_bytes`."""
    overlaps: bool = False
    """Whether what is computed next does not wait for it, as with those of FSDP."""


class Change(NamedTuple):
    """Storage that is allocated, resized or freed."""

    storage: int
    """Index in `Recording.storages`."""
    bytes: int
    """Difference of its size."""


class Mark(NamedTuple):
    """Named moment."""

    name: str
    block: str = ""
    """Block of the model that the events up to the next mark belong to."""


Event = Kernel | Message | Change | Mark


@dataclass
class StorageRecord:
    """Storage that a recording has seen."""

    device: str
    kind: str = ""
    """Content, such as "parameters"; "": not known."""
    allocated_by: str = ""
    """Name of the operator that made it."""
    at: int = 0
    """Index of the event of its allocation."""
    size: int = 0
    stream: int = 0
    """Number of the stream in which it was allocated; 0: the default stream."""
    block: str = ""
    """Block of the model that it belongs to."""
    count: float = 1
    """Number of storages it stands for, in addition to those of blocks that were not recorded."""
    microbatches: float = 1
    """Number of microbatches whose storages it stands for, outside of the actions of one."""
    on_host: bool = False
    """Whether it is in host memory, even if the model computes on a device."""


@dataclass
class Recording:
    """Events in the order in which the host issues them."""

    events: list[Event] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)


class KernelRecorder(TorchDispatchMode):
    """Mode that records what runs inside of it.

    Enter it inside of the fake tensor mode. Tensors that exist already are added by `track`.

    A block may stand for others, which are not recorded. Events marked as the block's own are
    repeated for them afterwards (`expansion`); all other changes of its storages are recorded as
    often as there are blocks. Outside of forwards and backwards, the owner of an operator follows
    from its inputs.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        """`device_type`: kind of device whose kernels are recorded."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.device_type = device_type
        self.times: Mapping[str, int] = {}
        """Number of blocks that a block stands for, itself included."""
        self.inner_blocks = list[str]()
        """Names of blocks that are marked in compiled graphs, as they are not called; in order."""
        self.notes = list[str]()
        """Sentences about parts that are modeled in a simpler way than they run."""
        self._is_within_operator = False
        self._mark = Mark("")
        """Latest mark that was not derived from an operator's inputs."""
        self._block = ""
        self._by_owner = False
        self._kind = ""
        self._in_action = False
        self.is_last_action = False
        """Whether the current action of a pipeline is the last one of a pass."""
        self._microbatches = 1.0
        """Number of microbatches that the current action of a pipeline stands for."""
        self._since = 0
        """Index of the latest mark."""
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """Index of each living storage, by its identity."""
        self._streams: list[Any] = [torch.cpu.current_stream()]

    def mark(
        self,
        name: str,
        block: str = "",
        kind: str = "",
        *,
        by_owner: bool = False,
        in_action: bool | None = None,
        microbatches: float = 1,
    ) -> None:
        """Record a moment.

        Args:
            block: block that the next events belong to.
            kind: kind of storages that are allocated in them, unless more is known; "recomputed":
                activations, if gradients are enabled.
            by_owner: whether the block of each operator follows from its inputs.
            in_action: whether an action of a pipeline starts or the last one has ended.
            microbatches: number of microbatches that the action stands for.
        """
        if in_action is not None:
            self._microbatches = microbatches
        self._mark, self._block, self._kind = Mark(name, block), block, kind
        self._by_owner = by_owner
        self._in_action = self._in_action if in_action is None else in_action
        self._since = len(self.recording.events)
        self.recording.events.append(self._mark)

    def end_last_action(self) -> None:
        """Do not count what follows to an action, if it is the last one of a pass."""
        if self.is_last_action:
            self._in_action, self._microbatches = False, 1

    def track(
        self,
        tensors: Iterable[Tensor],
        kind: str,
        block: str | None = None,
        *,
        count: float = 1,
        on_host: bool = False,
    ) -> None:
        """Record the storages of `tensors` as allocated now, if they are new, and as of a kind.

        Args:
            block: block they belong to; None: as recorded.
            count: number of microbatches whose storages each stands for.
        """
        for tensor in tensors:
            for storage in storages(tensor):
                known = self._known.get(id(storage))
                index = known[0] if known else self._new(storage, tensor.device, "")
                record = self.recording.storages[index]
                size, record.kind, record.on_host = record.size, kind, on_host
                if known and count != record.microbatches:
                    self._change(index, 0)
                    record.microbatches = count
                    self._change(index, size)
                record.microbatches = count
                if block is not None:
                    record.block = block
                if known is None:
                    self._change(index, storage.nbytes())

    def __enter__(self) -> "KernelRecorder":
        resize, recorder = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if record := recorder._resized(storage):
                record.kind = "gathered"  # FSDP2 keeps the storages of whole parameters, empty
            return out

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._known.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_follows, types)):
            self.recording.events.append(DISPATCH)
            return NotImplemented  # its operators on the tensors inside follow
        if (whole := IN_PARTS.get(str(function._overloadpacket))) is not None:
            return self.run(whole, *args)
        if self._is_within_operator and function.namespace == "aten" and function._can_decompose():
            return self.run(function.decompose, *args, **kwargs)  # which autograd does elsewhere
        if self._by_owner:
            self._follow(_tensors((args, kwargs)))
        if str(function._overloadpacket) == "_c10d_functional.wait_tensor":
            return args[0]  # as it does on real tensors; of fake ones it makes a copy
        out = function(*args, **kwargs)
        self._record(function, args, kwargs, out)
        return out

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record what a function runs, from within an operator."""
        super().__enter__()  # type: ignore[no-untyped-call]
        before, self._is_within_operator = self._is_within_operator, True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_within_operator = before
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _follow(self, inputs: list[Tensor]) -> None:
        """Mark a change of the block whose storages are the inputs of the next operator."""
        known = [*self._records(inputs)]
        named = [record for record in known if record.block]
        if self._in_action and named:  # half a backward: a gradient may be of the next block
            self._enter(min(named, key=lambda record: record.at).block)
        elif known:
            owners = {record.block for record in named}
            self._enter(owners.pop() if len(owners) == 1 else "")

    def _enter(self, block: str) -> None:
        """Mark a change of the block, unless it is the current one."""
        if block != self._block:
            self._block, name = block, self._mark.name
            made = Mark(f"{name} of {block}" if block else f"rest of {name}", block)
            self.recording.events.append(made)

    def _records(self, tensors: Iterable[Tensor]) -> Iterator[StorageRecord]:
        """Yield the records of the storages of tensors, if they are known."""
        for tensor in tensors:
            for storage in storages(tensor):
                if known := self._known.get(id(storage)):
                    yield self.recording.storages[known[0]]

    def _record(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        events, outputs = self.recording.events, _tensors(out)
        name = str(function._overloadpacket)
        before = len(self.recording.storages)
        inputs = _tensors((args, kwargs))
        read = [[*self._records([each])] for each in inputs] if self._by_owner else []
        is_each = "_foreach_" in name and len(inputs) >= len(outputs)
        for number, tensor in enumerate(outputs):
            for storage in storages(tensor):
                if id(storage) in self._known:
                    self._resized(storage)
                    continue
                index = self._new(storage, tensor.device, name)
                if read:
                    self._derive(index, read[number : number + 1] if is_each else read, is_each)
                self._change(index, storage.nbytes())
        is_new = len(self.recording.storages) > before
        if is_new or function.namespace == "fsdp":
            self._classify(name, inputs, before)
        events.extend(messages(function, args, kwargs, out))
        if function.namespace in COMMUNICATION:
            return
        given = dict(enumerate(args)) | kwargs
        written = [
            given.get(argument.name, given.get(index))
            for index, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        changed = _tensors(written)
        if not (is_new or changed) or function.namespace == "prim":
            return
        if not changed and not inputs and name.startswith("aten.empty"):
            return
        if name in NO_KERNEL:
            return
        if self.device_type == "cuda":
            self.use(workspace_bytes(function, args), name)
        size = sum(map(_bytes, changed or outputs))
        kernel = describe_kernel(function, args, kwargs, out, size, self.device_type)
        if self._by_owner and not self._block:  # also of the blocks that were not recorded
            read_by_all = round(kernel.read * self._for_all(inputs))
            written_by_all = round(kernel.written * self._for_all(changed or outputs))
            kernel = kernel._replace(read=read_by_all, written=written_by_all)
        events.append(kernel)

    def allocate(self, size: int, by: str) -> int:
        """Record memory without a storage, and return its index, by which to free it."""
        index = len(self.recording.storages)
        at = len(self.recording.events)
        record = StorageRecord("cpu", self._kind_now, by, at, block=self._block)
        self.recording.storages.append(record)
        self._change(index, size)
        return index

    def free(self, index: int) -> None:
        """Record that memory without a storage is freed."""
        self._change(index, 0)

    def use(self, size: int, by: str) -> None:
        """Record memory that a kernel frees at its end."""
        if size:
            self.free(self.allocate(size, by))

    def adopt(self, tensor: Tensor, by: str) -> None:
        """Record the storage of a tensor as allocated now."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._change(self._new(storage, tensor.device, by), storage.nbytes())

    def _for_all(self, tensors: Iterable[Tensor]) -> float:
        """Return the ratio of the bytes of all that tensors stand for to their own."""
        known = [(_bytes(tensor), each) for tensor in tensors for each in self._records([tensor])]
        own = sum(size for size, _ in known)
        return sum(size * self._count(each) for size, each in known) / own if own else 1.0

    @property
    def _kind_now(self) -> str:
        if self._kind == "recomputed":
            return "activations" if torch.is_grad_enabled() else ""
        return self._kind

    def _new(self, storage: torch.UntypedStorage, device: torch.device, by: str) -> int:
        """Record a storage, still of size 0."""
        recording = self.recording
        index, identity = len(recording.storages), id(storage)
        at = len(recording.events)
        made = StorageRecord(
            device.type, self._kind_now, by, at, stream=self._stream(), block=self._block
        )
        made.microbatches = self._microbatches
        recording.storages.append(made)
        self._known[identity] = index, weakref.ref(storage, partial(self._freed, identity))
        return index

    def _classify(self, name: str, inputs: list[Tensor], before: int) -> None:
        """Set the kinds of an operator's new storages, from `before` on, if they are known."""
        if name.startswith("fsdp."):  # FSDP2's copies into and out of its buffers
            is_reduced = name == "fsdp.chunk_cat"
            for record in self._records(inputs):
                if record.kind in ("", "activations", "logits"):
                    record.kind = "gradients" if is_reduced else "gathered"
            kind = "communication" if is_reduced else "gathered"
        elif inputs and all(each.kind in WEIGHTS for each in self._records(inputs)):
            kind = "gathered" if self._kind else ""
        else:
            kind = "communication" if "c10d" in name else ""
        for record in self.recording.storages[before:] if kind else ():
            record.kind = kind

    def _derive(self, index: int, read: Sequence[Sequence[StorageRecord]], is_each: bool) -> None:
        """Set the owner of the result of an operator outside of forwards and backwards."""
        made, known = (
            self.recording.storages[index],
            [each for one in read for each in one if each.size],
        )
        made.on_host = bool(known) and all(each.on_host for each in known)
        if self._block or not known:
            return
        if is_each:
            made.block, made.count = known[0].block, known[0].count
        else:  # such as all gradients one after the other
            whole = sum(each.size * self._count(each) for each in known)
            made.count = whole / sum(each.size for each in known)

    def _count(self, record: StorageRecord) -> float:
        """Return the number of storages that change together with a recorded one."""
        inside = bool(self._block)  # repeated with the block, or one for another of the next block
        count = record.count * (1 if self._in_action else record.microbatches)
        return count * (1 if inside else self.times.get(record.block, 1))

    def _stream(self) -> int:
        """Return the number of the current stream; a CPU has several, which do nothing."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def _resized(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        if known := self._known.get(id(storage)):
            self._change(known[0], storage.nbytes())
            return self.recording.storages[known[0]]
        return None

    def _freed(self, identity: int, _: Any) -> None:
        if known := self._known.pop(identity, None):
            record = self.recording.storages[known[0]]
            if record.kind == self._kind == "activations" and record.at >= self._since:
                record.kind = ""  # no backward reads it
            self._change(known[0], 0)

    def _change(self, index: int, size: int) -> None:
        record, count = self.recording.storages[index], 0.0
        if size != record.size:
            if self._by_owner and self._block:  # which an operator of another block may free
                self._enter(record.block)
            count, change = self._count(record), size - record.size
            each = [Change(index, change)] * int(count) if count == int(count) else []
            self.recording.events.extend(each or [Change(index, round(change * count))])
            record.size = size


def _follows(kind: type) -> bool:
    """Whether a kind of tensor runs other operators in place of each: DTensor, and torchao's."""
    return issubclass(kind, torch.distributed.tensor.DTensor) or kind.__module__.startswith(
        "torchao."
    )


NO_KERNEL = frozenset(
    {
        *("aten.empty_like", "aten.new_empty", "aten.lift_fresh", "aten.set_"),
        *("torchtitan.all_to_all", "torchtitan.sum_over_ranks"),
    }
)
"""Operators that allocate or send, and do not compute."""
COMMUNICATION = ("c10d", "_c10d_functional", "symm_mem")
"""Namespaces of torch's operators that send."""
OPERATIONS: dict[str, tuple[Operation, str]] = {
    "c10d.allreduce_": ("all_reduce", "tensors"),
    "c10d.allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d._allgather_base_": ("all_gather", "output_tensor"),
    "c10d.allgather_": ("all_gather", "output_tensors"),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d._reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d.reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d.alltoall_base_": ("all_to_all", "input"),
    "c10d.alltoall_": ("all_to_all", "input_tensors"),
    "c10d.broadcast_": ("all_gather", "tensors"),  # in a ring, of as many bytes
    "c10d.send": ("send", "tensors"),
    "_c10d_functional.all_reduce": ("all_reduce", "input"),
    "_c10d_functional.all_reduce_": ("all_reduce", "input"),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", ""),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", ""),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", ""),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional.all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional.isend": ("send", "tensor"),
    "torchtitan.all_to_all": ("all_to_all", "rows"),
    "torchtitan.exchange_rows": ("all_to_all", "rows"),
    "torchtitan.sum_over_ranks": ("all_reduce", "x"),
}
"""Operation of each operator that sends, and the argument that is the whole tensor; "": its
result."""
WITHOUT_MESSAGES = frozenset(
    {
        *("c10d.recv_", "c10d.recv_any_source_", "c10d.barrier", "c10d.monitored_barrier_"),
        *("c10d.check_for_nan", "_c10d_functional.wait_tensor", "_c10d_functional.irecv"),
        "_c10d_functional._wrap_tensor_autograd",
    }
)
"""Operators that wait or receive; a message is counted where it is sent."""
EXCHANGES_KEYS = ("context_attention", "context_attention_backward", "largest_logits")
"""Operators of context parallelism, in which ranks exchange keys."""

IN_PARTS: dict[str, Callable[..., Any]] = {
    "torchtitan.chunked_statistics": chunked_statistics._init_fn,
    "torchtitan.chunked_gradients": chunked_gradients._init_fn,
    "torchtitan.context_attention": context_attention._init_fn,
    "torchtitan.context_attention_backward": context_attention_backward._init_fn,
}
"""Functions of our own operators that are made of other operators, which are recorded instead."""


WEIGHTS = frozenset({"parameters", "gathered"})
"""Kinds of storages that hold weights."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor, or of the tensors inside of it."""
    names: Sequence[str] = ()
    wraps: bool = is_wrapper(tensor)
    if wraps:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    else:
        yield tensor.untyped_storage()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, Tensor):  # a DTensor also has a mesh
            yield from storages(inner)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel reads or writes; repeated elements count once."""
    whole = tensor.numel() * tensor.element_size()
    return min(whole, sum(storage.nbytes() for storage in storages(tensor)))


def describe_kernel(
    function: Any, args: Any, kwargs: Any, out: Any, written: int, device_type: str
) -> Kernel:
    """Return the kernel of an operator on a kind of device.

    Args:
        written: bytes that it writes.
    """
    name = str(function._overloadpacket)
    operator = ON_CUDA.get(name, function._overloadpacket)
    count = flop_registry.get(operator)
    if is_packed_attention(function):
        flops = packed_attention_flops(function, args, kwargs)
    else:
        flops = int(count(*_ungrouped(name, args), **kwargs, out_val=out)) if count else 0
    inputs = _tensors((args, kwargs))
    first = next((t for t in inputs if t.is_floating_point()), None)
    return Kernel(
        str(operator) if device_type == "cuda" else name,
        flops,
        sum(map(_bytes, inputs)),
        written,
        first.dtype if first is not None else torch.int64,
        tuple(tuple(t.shape) for t in inputs[:4]),
        is_causal(function, args, kwargs),
    )


def _ungrouped(name: str, args: Sequence[Any]) -> list[Any]:
    """Return the inputs of attention with as many key/value heads as query heads.

    Torch 2.11 does not count the FLOPs of fewer.
    """
    if "scaled_dot_product" not in name:
        return [*args]
    found = [isinstance(each, Tensor) and each.ndim == 4 for each in args]
    heads = max(each.shape[1] for each, is_heads in zip(args, found, strict=True) if is_heads)
    return [
        torch.empty((len(each), heads, *each.shape[2:]), device="meta") if is_heads else each
        for each, is_heads in zip(args, found, strict=True)
    ]


def messages(function: Any, args: Any, kwargs: Any, out: Any) -> Iterator[Message]:
    """Yield the messages of an operator; nothing for a wait, and for one that sends nothing.

    Raises:
        NotImplementedError: if it is not known what an operator of `torch.distributed` sends.
    """
    name = str(function._overloadpacket)
    names = (argument.name for argument in function._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    if name in OPERATIONS:
        operation, whole = OPERATIONS[name]
        size = _size(given[whole] if whole else out)
        yield Message(_group(given), operation, size, operation == "send" or _is_of_fsdp())
    elif name == "torchtitan.exchange_counts":
        yield Message(_group(given), "all_to_all", _size(out[0]))
    elif function.namespace == "torchtitan" and function._opname in EXCHANGES_KEYS:
        yield from _exchanged_keys(function._opname, given)
    elif function.namespace in COMMUNICATION and name not in WITHOUT_MESSAGES:
        raise NotImplementedError(f"the traffic of the operator {name} is not known")


def _group(given: Mapping[str, Any]) -> str:
    """Return the name of the process group among the arguments of an operator."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"]).group_name
    group = given["group_name"]
    return group if isinstance(group, str) else group.group_name


def _size(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(values))


def _is_of_fsdp() -> bool:
    """Whether FSDP called the current operator, which it does on streams of its own."""
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
            return True
        frame = frame.f_back
    return False


def _exchanged_keys(name: str, given: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the exchange of keys and values, and of their gradients, between all ranks."""
    group = given["group_name"]
    if not group:
        return
    ranks, ring = process_group(group).size(), given["rotation"] == "ring"
    size = _size([given["k"], given.get("v")])
    fetch: Operation = "send" if ring else "all_gather"
    back: Operation = "send" if ring else "reduce_scatter"
    times, parts = (ranks - 1, 1) if ring else (1, ranks)
    yield from [Message(group, fetch, parts * size, ring)] * times
    if name.endswith("backward"):
        size = size // given["k"].itemsize * max(4, given["k"].itemsize)
        yield from [Message(group, back, parts * size, ring)] * times

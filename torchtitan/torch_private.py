"""The one place that touches torch's private interfaces (supported: torch 2.11 to 2.13).

They are imported where they are used: DTensor alone takes a second, which a command that only
reads a recipe should not pay.
"""

import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

GraphPass = Callable[[Graph], None]
"""What is done to a graph, in place."""


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao within; it warns of CUDA kernels that it can do without, and of its own ways.

    The noise comes from two loggers: its own, and that of torch's pytree.
    """
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [each.level for each in noisy]
    for each in noisy:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(noisy, levels, strict=True):
            each.setLevel(level)


def local_extent(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of `tensor`, and where in the whole that part begins.

    Torch gives the first index only, so the part must be contiguous. Under FSDP over tensor
    parallelism (`_StridedShard`) it is, as long as the split is even.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes, placements = tensor.device_mesh.shape, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            dim, inner = placement.dim, zip(sizes[axis + 1 :], placements[axis + 1 :], strict=True)
            split = math.prod(size for size, p in inner if p.is_shard(dim))
            parts = sizes[axis] * split
            assert placement.split_factor == split, f"scattered part: {placements}"
            assert tensor.shape[dim] % parts == 0, f"{tensor.shape} not evenly in {parts} parts"
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)


def stored(tensor: Tensor) -> Tensor:
    """The plain tensor in one that FSDP2 gathers in another form, as torchao's in Float8."""
    whole: Tensor = getattr(tensor, "_tensor", tensor)
    return whole


def data_parallel_over(whole: "DTensor", part: "DTensor") -> "DTensor":
    """A tensor that is split over two meshes, as FSDP2 describes it.

    Args:
        whole: the tensor on the mesh of tensor parallelism.
        part: this rank's part of it on the mesh of data parallelism.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    *copies, split = part.placements
    assert isinstance(split, Shard)
    sizes = zip(whole.device_mesh.shape, whole.placements, strict=True)
    inner = math.prod(size for size, placement in sizes if placement.is_shard(split.dim))
    # This rank's part is a part of its part on the other mesh, whose parts are the nearer ones.
    strided = _StridedShard(split.dim, split_factor=inner) if inner > 1 else split
    return DTensor.from_local(
        part.to_local(),
        DeviceMesh._concatenate([part.device_mesh, whole.device_mesh]),
        (*copies, strided, *whole.placements),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def laid_out_as(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor that is laid out as `tensor` is, on part's device.

    The public `DTensor.from_local` would move it to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Within, torch.compile does not give up where a function is called with many shapes."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def set_timeout(group: ProcessGroup | None, timeout: timedelta) -> None:
    """Change how long a collective of `group` (None: the default group) may take."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def forget_store(rendezvous: Any) -> None:
    """Let the ranks meet in a new store when they start again.

    The agents keep theirs, in which lie the addresses of ranks that are gone, and which may be that
    of a node that is gone (https://github.com/pytorch/pytorch/issues/135712).
    """
    assert hasattr(rendezvous, "_bootstrap_store_info"), "another rendezvous than torch's own"
    rendezvous._bootstrap_store_info = None


def read_stream(stream: IO[bytes]) -> Any:
    """What torch's `_streaming_save` wrote; only tensors and plain values are read, no code is run.

    Raises:
        pickle.UnpicklingError: where there is anything else.
    """
    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings():
        # It fills the tensors by itself; nobody writes into the bytes they came as.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return _streaming_load(stream, weights_only=True)  # type: ignore[arg-type]


def leave(rendezvous: Any) -> None:
    """Be missed by the other nodes before long; torch's `shutdown` would end them too."""
    rendezvous._stop_heartbeats()


def record_memory(events: int | None) -> None:
    """Remember the last `events` allocations and frees on CUDA; None: stop remembering."""
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events)


def dump_memory(path: Path) -> None:
    """Write what is remembered, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def process_group(name: str) -> ProcessGroup:
    """The process group of that name: an operator is given names, not objects."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """`tensor` of every rank of `group`: (ranks, *shape). Torch 2.13 renames the collective."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole = tensor.new_empty(group.size(), *tensor.shape)
    gather(whole.flatten(0, 1), tensor, group=group)
    return whole


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's row of the sum of `tensor` (ranks, *shape) over `group`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own = torch.empty_like(tensor[0])
    scatter(own, tensor.flatten(0, 1), group=group)
    return own


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention by a fused kernel, which unlike the public function tells its normaliser.

    Args:
        q: (B, H, Sq, E).
        k, v: (B, K, Sk, E); each serves H/K query heads.
        causal: a query sees the keys up to its own index; only for Sq = Sk and without `bias`.
        bias: added to the scores, (B, 1, Sq, Sk) in q's dtype. Finite: of a row of minus infinity
            alone, the CPU kernel says that its log-sum-exp is 0.

    Returns:
        The output (B, H, Sq, E), and the log-sum-exp of the scores (B, H, Sq) in fp32.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=bias
        )
    elif _flash_can(q, bias):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    else:
        keys, values, bias = _for_efficient(q, k, v, bias)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, keys, values, bias, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads it
    return out, lse


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in `attention_forward`.

    `out` and `lse` may be those of attention over more keys than these; the result is then the
    part of the gradients that these keys account for.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
        return grads[0], grads[1], grads[2]
    no_dropout = torch.empty(0, dtype=torch.int64, device=q.device)  # in place of a random state
    if _flash_can(q, bias):
        # The kernel takes `lse` as if it were contiguous, without looking.
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2]),
            *(0.0, causal, no_dropout, no_dropout),
        )
        return grads[0], grads[1], grads[2]
    keys, values, bias = _for_efficient(q, k, v, bias)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad_out, q, keys, values, bias),
        # It takes the heads of a token to be neighbours, and rows of `lse` padded as it pads them.
        out.transpose(1, 2).contiguous().transpose(1, 2),
        F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous(),
        *(no_dropout, no_dropout, 0.0, [True, True, True, False], causal),
    )
    heads = (k.shape[1], -1)
    return grad_q, grad_k.unflatten(1, heads).sum(2), grad_v.unflatten(1, heads).sum(2)


def _flash_can(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype in (torch.bfloat16, torch.float16)


def _for_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias for the memory-efficient kernel.

    It wants as many key heads as query heads, and a bias for each whose rows begin at multiples
    of 16 elements.
    """
    heads = q.shape[1]
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (k, v))
    if bias is not None:
        keys = bias.shape[-1]
        bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(-1, heads, -1, -1)
    return k, v, bias


def pipeline_order(name: str, stages: int, pp: int, microbatches: int) -> dict[int, list[str]]:
    """What each rank does under a pipeline schedule for several stages a rank, as CSV cells.

    The constructors work out the orders of all ranks, and ask a stage for little more than its
    number, so that a stand-in without a process group will do.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=stages, submod=None)
    schedule = get_schedule_class(name)([stage] * (stages // pp), microbatches)
    return {
        rank: [str(action) for action in actions if action is not None]
        for rank, actions in schedule.pipeline_order.items()
    }


def leave_out_greeting(stage: Any) -> None:
    """Keep torch 2.11 from greeting a pipeline stage's neighbours, later ones do not.

    It makes communicators. Where a neighbour is on the same rank, gloo cannot send to itself.
    """
    stage._get_init_p2p_neighbors_ops = list


def time_stage(stage: Any, phase: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have `phase` entered around each forward and backward of a microbatch in a stage."""
    names = {
        "forward_one_chunk": "forward",
        "backward_one_chunk": "backward",
        "backward_weight_one_chunk": "backward",
    }
    for method, name in names.items():
        setattr(stage, method, _inside(getattr(stage, method), phase, name))


def _inside(
    function: Callable[..., Any], phase: Callable[[str], AbstractContextManager[None]], name: str
) -> Callable[..., Any]:
    def timed(*args: Any, **settings: Any) -> Any:
        with phase(name):
            return function(*args, **settings)

    return timed


def schedule_from_csv(stages: Sequence[Any], path: Path, **settings: Any) -> Any:
    """A pipeline schedule over `stages` that follows the order in a file."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule: Any = _PipelineScheduleRuntime(stages, **settings)  # type: ignore[no-untyped-call]
    schedule._load_csv(str(path))
    return schedule


def flight_records(device_type: str) -> list[bytes]:
    """What torch's Flight Recorders hold, as pickles of plain values: the device's own first.

    Gloo has a recorder and NCCL another; a process that trains on CUDA uses both.
    """
    from torch._C import _distributed_c10d as c10d

    names = ["_dump_fr_trace"] if device_type == "cpu" else ["_dump_nccl_trace", "_dump_fr_trace"]
    if missing := [name for name in names if not hasattr(c10d, name)]:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell what its Flight Recorder holds (it has no "
            f"{missing[0]}); use torch 2.11 to 2.13, or comm.trace_buf_size = 0"
        )
    return [getattr(c10d, name)() for name in names]


def group_members() -> dict[str, tuple[str, list[int]]]:
    """Of each process group by name: what it is for, and its ranks in the world."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.distributed_c10d import _world

    return {
        name: (group.group_desc, get_process_group_ranks(group))
        for group, name in _world.pg_names.items()
    }


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


def compilations() -> dict[str, Compilation]:
    """What this process has compiled, the latest at least, by the name that torch gives it.

    But not torchao's Adam, which is compiled again for each shape: that is how it is meant.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found: dict[str, Compilation] = {}
    for metrics in get_compilation_metrics():
        if metrics.co_name == "single_param_adam":
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


def set_activation_memory_budget(budget: float) -> None:
    """The part of its activations that each graph compiled from now on may keep."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    # A DTensor's mesh is an input of the graph from torch 2.13 on, and of no size worth counting.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def graph_pass(function: GraphPass, source: str, settings: str = "") -> Any:
    """`function` as inductor runs it.

    Args:
        source: path of the file it stands in; graphs cached with other versions of it are stale.
        settings: what else decides on what it does.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            function(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((source, __file__), settings)

    return Pass()


def collective(node: Node) -> str:
    """Which collective a node of a graph starts; "" if none. Its last argument names the group."""
    _, _, name = str(node.target).partition("_c10d_functional.")
    return "" if is_wait(node) else name.partition(".")[0]


def is_wait(node: Node) -> bool:
    """Whether a node of a graph is where a collective has ended."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def module_of(node: Node) -> str:
    """The name of the module, within the one that was compiled, whose forward a node computes.

    Of a node of the backward, that whose gradients it computes. What the forward has no node for,
    such as the sum over copies of a parameter, belongs where its input does.
    """
    from torch._inductor.fx_passes.graph_view import _clean_stack_name, _get_module_stack

    while not (stack := _get_module_stack(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return _clean_stack_name(stack[-1][0]) if stack else ""


def merge_collectives(graph: Graph, is_wanted: Callable[[Node], bool], megabytes: float) -> None:
    """Join collectives of a kind, group and dtype that follow each other, up to `megabytes`.

    Args:
        is_wanted: of a node that starts a collective; the others are passed over.
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


def schedule_collectives(graph: Graph, modules: Sequence[Sequence[str]] | None) -> None:
    """Join the collectives of each of `modules` (None: as estimated times suggest), and move them.

    The estimates are those of a GPU, which has to be there.
    """
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    assert graph.owning_module is not None
    if modules is None:
        schedule_overlap_bucketing(
            graph.owning_module, collective_bucketing=True, insert_overlap_deps=True
        )
    else:
        plans: list[list[str] | str] = [list(names) for names in modules]
        manual_overlap_bucketing(graph.owning_module, plans, insert_overlap_deps=True)


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let compiled code use memory that the ranks of `group` share.

    Torch calls this no longer needed, but its compiler still fuses only where it was called.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def fuse_tensor_parallelism(before: GraphPass, after: GraphPass, source: str) -> None:
    """Have inductor fuse collectives with matrix products in what is compiled from now on.

    Args:
        before, after: what to do to each graph before and after that.
        source: path of the file they stand in; graphs cached with other versions of it are stale.
    """
    from torch._inductor import config

    config._micro_pipeline_tp = True
    config.post_grad_custom_pre_pass = graph_pass(before, source, before.__name__)
    config.post_grad_custom_post_pass = graph_pass(after, source, after.__name__)

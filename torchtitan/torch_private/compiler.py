"""Counters, caches and options of torch.compile, and optimizers without it."""

import inspect
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer


def any_number_of_shapes() -> AbstractContextManager[None]:
    """Disable torch.compile's limit on recompilations for new shapes within this context."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


EAGER_ARITHMETIC = {
    "emulate_precision_casts": True,  # no products and sums in one rounding either
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""Options of inductor with which its code rounds as eager code does."""


def serve_all_sizes(tensor: Tensor, dim: int) -> None:
    """Let code compiled with `dynamic=False` serve all sizes of this dim of an argument."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)


def compiler_error() -> type[Exception]:
    """Return the class of torch.compile's errors."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def compiler_counts() -> Mapping[str, Counter[str]]:
    """Return torch.compile's counters in this process, by topic: `stats`, `graph_break`, ..."""
    from torch._dynamo.utils import counters

    return counters


class Compilation(NamedTuple):
    """Compiled graph, forward and backward."""

    reason: str | None
    """Reason for recompilation, if the same code was compiled before."""
    hits: int
    misses: int
    """Cache hits and misses of its parts in inductor."""


BESIDE_THE_MODEL = {
    "single_param_adam": "the update",
    "newton_schulz": "the update",
    "encode_buckets": "the codec",
    "decode_buckets": "the codec",
    "compensated": "the codec",
}
"""Compiled functions of optimizers (torchao's Adam, Muon's iteration) and of low-bit messages."""


def compiled_beside_the_model() -> list[str]:
    """Return what else this process has compiled, in words."""
    from torch._dynamo.utils import get_compilation_metrics

    names = {metrics.co_name for metrics in get_compilation_metrics()}
    return [*dict.fromkeys(what for name, what in BESIDE_THE_MODEL.items() if name in names)]


def compilations() -> dict[str, Compilation]:
    """Return at least the latest compilations of this process, by torch's name for them.

    Those of `BESIDE_THE_MODEL` are excluded, as they are recompiled for some shapes by design.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found: dict[str, Compilation] = {}
    for metrics in get_compilation_metrics():
        if metrics.co_name in BESIDE_THE_MODEL:
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
    """Return the seconds this process has spent compiling, forward and backward together."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import cumulative_time_spent_ns

    names = ("entire_frame_compile", "entire_backward_compile")
    return sum(cumulative_time_spent_ns.get(name, 0) for name in names) / 1e9


@contextmanager
def compilers_spared(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Withhold `signals` from the programs that compilations start within this context.

    A terminal and some schedulers send a request to stop to a whole group of processes. A C++
    compiler would end on it, and the run fail. Programs inherit the signals that are blocked in
    the thread that starts them; this process receives its own in another thread, or after the
    compilation.
    """
    from torch._dynamo.callback import callback_handler

    those = set(signals)

    def block(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, those)

    def unblock(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, those)

    callback_handler.register_start_callback(block)
    callback_handler.register_end_callback(unblock)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(block)
        callback_handler.remove_end_callback(unblock)


def keep_compiled_graphs(folder: Path | None) -> None:
    """Set the folder where inductor caches graphs on disk (None: torch's default)."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    autograd.enable_autograd_cache = inductor.fx_graph_cache = True
    if folder is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # read on each graph lookup


def forget_compiler_threads() -> None:
    """Let a forked process start compiler threads of its own.

    It does not have those of its parent, and would wait for one of them forever. After a fork,
    torch resets only the pool of processes.
    """
    if module := sys.modules.get("torch._inductor.async_compile"):
        module.AsyncCompile.pool.cache_clear()


def set_activation_memory_budget(budget: float) -> None:
    """Set the part of its activations that each graph compiled from now on may keep."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    # From torch 2.13 on, a DTensor's mesh is an input of the graph, of negligible size.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def compile_until_code(
    receive: Callable[[GraphModule, bool], Callable[[list[Any]], list[Any]]],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return a backend of torch.compile that compiles as inductor does, but generates no code.

    Args:
        receive: makes a function of its inputs from each graph, and whether it is the backward.
        options: inductor's.
    """
    from unittest.mock import patch  # it imports asyncio

    with warnings.catch_warnings():  # what torch deprecates of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._functorch import config as autograd
        from torch._functorch import partitioners
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.fx_passes import control_dependencies
        from torch._inductor.output_code import OutputCode

    class Received(OutputCode):
        def __init__(self, graph: GraphModule, is_backward: bool) -> None:
            self.run = receive(graph, is_backward)
            self._boxed_call = True  # it takes a list, and empties it

        def __call__(self, inputs: Any) -> Any:
            return self.run(inputs)

        def post_compile(self, *_: Any) -> None:
            """Do nothing."""

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            """Do nothing."""

    def receive_graph(
        graph: GraphModule, *_: Any, is_backward: bool = False, **__: Any
    ) -> OutputCode:
        with without_modes():
            if merge := options.get("post_grad_custom_post_pass"):
                # Nodes are moved, and not wrapped to stay where they are.
                with patch.object(control_dependencies, "preserve_node_ordering"):
                    merge(graph.graph)
            return Received(graph, is_backward)

    def without_states(joint: Any, forward: Any, backward: Any, *_: Any) -> Any:
        return forward, backward

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        # The states of generators, with which dropout is recomputed, are small.
        with (
            patch.object(partitioners, "functionalize_rng_ops", without_states),
            autograd.patch(enable_autograd_cache=False),
        ):
            return compile_fx(graph, inputs, receive_graph, dict(options))

    return backend


@contextmanager
def forgotten_compilations() -> Iterator[None]:
    """Forget the compilations of this context at its end, and do not count them."""
    from torch._dynamo import reset, utils

    counts = {topic: Counter(counter) for topic, counter in utils.counters.items()}
    metrics = [*utils._compilation_metrics]
    try:
        yield
    finally:
        reset()
        utils.counters.clear()
        utils.counters.update(counts)
        utils._compilation_metrics.clear()
        utils._compilation_metrics.extend(metrics)


def without_modes() -> AbstractContextManager[Any]:
    """Leave all dispatch modes within this context."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


ONCE_WHERE_RECOMPUTED = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def can_count_once_where_recomputed() -> bool:
    """Return whether torch can disable side effects of compiled forwards in recomputation.

    The compiler's settings are read as text, since importing them takes longer than a check.
    """
    spec = find_spec("torch._dynamo")
    assert spec
    assert spec.origin
    settings = Path(spec.origin).with_name("config.py")
    return ONCE_WHERE_RECOMPUTED in settings.read_text(encoding="utf-8")


def count_once_where_recomputed() -> None:
    """Disable side effects of compiled forwards in recomputation, if torch can."""
    from torch._dynamo import config

    if hasattr(config, ONCE_WHERE_RECOMPUTED):
        setattr(config, ONCE_WHERE_RECOMPUTED, True)


def compiles_recomputed_attention(device_type: str) -> bool:
    """Whether a compiled graph over a mesh can recompute the output of a kernel with dropout.

    From torch 2.12 on, the mesh is an input of the graph. On a CPU the state of the generator,
    saved for the recomputation, is then passed in place of the mesh.
    """
    from torch.distributed import device_mesh

    return device_type != "cpu" or not hasattr(device_mesh, "_register_distributed_opaque_types")


def keeps_nodes_of_functions() -> bool:
    """Whether an autograd node of a custom function lives as long as references to it; before
    torch 2.13 it is freed with the tensors it led to.
    """

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


def without_compiler(
    kind: type[Optimizer], groups: Iterable[dict[str, Any]], **settings: Any
) -> Optimizer:
    """Build an optimizer without importing torch's compiler, which takes a second.

    Torch wraps `add_param_group` and `step` to keep the compiler out of them, and imports it to do
    so. They are not compiled here, so the wrapped functions are called directly.
    """
    add = inspect.unwrap(Optimizer.add_param_group)
    add.__dict__["__dynamo_disable"] = add
    optimizer = kind(groups, **settings)
    update = inspect.unwrap(kind.step)
    # Also set by the wrapper of a step.
    vars(optimizer)["step"] = torch.no_grad()(lambda: update(optimizer))
    return optimizer

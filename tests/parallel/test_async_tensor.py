"""What the compiler fuses in a tensor-parallel block, read off its graphs.

The fused operators need CUDA; on a CPU each is replaced by what it replaces, so that the graphs can
be run and compared, all but the overlap itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import register_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from tests import tiny
from tests.ranks import run_ranks
from tests.tiers import tiers
from torchtitan.checks import problems
from torchtitan.config import PlannedWorld
from torchtitan.job import JobConfig
from torchtitan.models.initialize import initialize
from torchtitan.models.llama3.spec import LLAMA3
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CompileConfig,
    activation_checkpoint,
    async_tensor,
    compile,
    tensor,
)
from torchtitan.parallel.async_tensor import Fused

# Of the compiler's own doings; a user does not see them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
]

ARGS, LENGTH = tiny.FLAVORS["deep"], 32
OPERATORS = {"mode": "selective", "selective_ac_option": "op"}


@register_backend(name="inductor without code")
def inductor_without_code(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Inductor up to its last pass over the graph, which is then interpreted: it saves a minute."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def finish(graph: GraphModule, inputs: list[Tensor], **_: Any) -> Callable[..., Any]:
        view_to_reshape(graph)
        with torch.no_grad(), V.set_fake_mode(fake_tensor_prop(graph, inputs)):
            post_grad_passes(graph, is_inference=False)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=finish)


def stand_in() -> torch.library.Library:
    """CPU kernels for the fused operators; and inductor does not try without NCCL."""
    from torch.distributed import _symmetric_memory

    dist.is_nccl_available = lambda: True
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    return library


def run(
    batch: int,
    *,
    backend: str | None,
    fuse: bool = False,
    recompute: dict[str, Any] | None = None,
    sequence_parallel: bool = True,
) -> tuple[dict[str, Tensor], Fused]:
    """Logits and gradients of the tiny model, and how much of it was fused."""
    torch.compiler.reset()  # the process that this one was forked from may have compiled it before
    device = "cuda" if dist.get_backend() != "gloo" else "cpu"
    library = stand_in() if device == "cpu" else None
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
    model = LLAMA3.build(ARGS, LENGTH)
    tensor.apply(
        model,
        LLAMA3.tensor_plan,
        mesh,
        sequence_parallel=sequence_parallel,
        loss_parallel=False,
    )
    model.to(device)
    initialize(model.named_parameters(), partial(LLAMA3.init_std, ARGS), seed=0)
    blocks = LLAMA3.blocks(model)
    config = ActivationCheckpointConfig.model_validate(recompute or {"mode": "none"})
    activation_checkpoint.apply(blocks, list(blocks), config)
    if fuse:
        async_tensor.enable(mesh.get_group())
    compile.apply(blocks.values(), CompileConfig(enable=backend is not None, backend=backend or ""))
    tokens = torch.randint(ARGS.vocab_size, (batch, LENGTH), generator=torch.Generator())
    logits = model(tokens.to(device))
    logits.square().mean().backward()
    tensor.redistribute_grads(model.parameters())
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found["logits"] = logits.detach()
    del library
    return {name: value.cpu() for name, value in found.items()}, async_tensor.fused()


def compare(batch: int, recompute: dict[str, Any] | None, backend: str) -> Fused:
    expected, none = run(batch, backend=None, recompute=recompute)
    found, fused = run(batch, backend=backend, fuse=True, recompute=recompute)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert none == (0, 0)
    async_tensor.confirm()
    return fused


# Of one sequence torch gathers by a view, which the compiler's own patterns do not know.
@pytest.mark.parametrize("batch", tiers([1, 2], [2]))
def test_every_gather_and_scatter_of_a_block_is_fused(batch: int) -> None:
    for fused in run_ranks(compare, 2, batch, None, "inductor without code"):
        # Forward: before wq, wk, wv; after wo; before w1, w3; after w2. Backward: before wo, w2.
        assert fused == Fused(gathers=4, scatters=2)


@pytest.mark.gate
def test_recomputation_is_fused_too() -> None:
    for fused in run_ranks(compare, 2, 2, OPERATORS, "inductor without code"):
        assert fused == Fused(gathers=6, scatters=2)  # what is added up is not sent again


@pytest.mark.slow
def test_inductor_compiles_what_it_fused() -> None:
    for fused in run_ranks(compare, 2, 1, None, "inductor"):
        assert fused == Fused(gathers=4, scatters=2)


@pytest.mark.gpu
def test_on_cuda() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for fused in run_ranks(compare, 2, 2, None, "inductor", device="cuda"):
        assert fused == Fused(gathers=4, scatters=2)


def refuse(fuse: bool, sequence_parallel: bool) -> str:
    run(2, backend="inductor without code", fuse=fuse, sequence_parallel=sequence_parallel)
    with pytest.raises(RuntimeError) as error:
        async_tensor.confirm()
    return str(error.value)


@pytest.mark.gate
@pytest.mark.parametrize(("fuse", "sequence_parallel"), [(False, True), (True, False)])
def test_it_does_not_pretend(fuse: bool, sequence_parallel: bool) -> None:
    for message in run_ranks(refuse, 2, fuse, sequence_parallel):
        assert message.startswith(
            "parallelism.enable_async_tensor_parallel did not take effect: 0 all-gather-matmul and "
            "0 matmul-reduce-scatter fused in the compiled graphs"
        )


ASYNC = {"enable_async_tensor_parallel": True, "tensor_parallel_degree": 2}
COMPILED = {"enable": True}


@pytest.mark.parametrize(
    ("parallelism", "compiled", "device", "words"),
    [
        (ASYNC, COMPILED, "cuda", []),
        (ASYNC, COMPILED, None, []),
        ({"tensor_parallel_degree": 2}, {}, "cpu", []),
        (ASYNC | {"tensor_parallel_degree": 1}, COMPILED, None, ["tensor_parallel_degree is 1"]),
        (ASYNC | {"disable_sequence_parallel": True}, COMPILED, None, ["sequence parallelism"]),
        (ASYNC, {}, None, ["compile.enable = true"]),
        (ASYNC, {"enable": True, "components": ["loss"]}, None, ['"model" in compile.components']),
        (ASYNC, COMPILED | {"backend": "aot_eager"}, None, ['compile.backend = "inductor", not']),
        (ASYNC, COMPILED, "cpu", ["SymmetricMemory does not support a CPU"]),
        (ASYNC, {}, "cpu", ["compile.enable", "CPU"]),
    ],
)
def test_refusals(
    parallelism: dict[str, Any], compiled: dict[str, Any], device: str | None, words: list[str]
) -> None:
    key = "parallelism.enable_async_tensor_parallel"
    job = JobConfig.model_validate({"parallelism": parallelism, "compile": compiled})
    world = PlannedWorld(device_type=device or "cpu", is_here=device is not None)
    messages = [found.message for found in problems(job, world) if found.path == key]
    assert len(messages) == len(words)
    # The section speaks first, then the rules between sections.
    assert all(any(word in message for message in messages) for word in words)

"""The tiny model's tensor-parallel blocks, with what the compiler fuses in them."""

from functools import partial

import torch
import torch.distributed as dist
from torch._dynamo import register_backend
from torch.distributed.device_mesh import init_device_mesh

from tests import tiny
from torchtitan import parallel
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.spec import initialize
from torchtitan.torch_private.graphs import enable_symmetric_memory

ARGS, LENGTH = tiny.FLAVORS["deep"], 32
OPERATORS = {"mode": "selective", "selective_ac_option": "op"}
WITHOUT_CODE = "inductor without code"


@register_backend(name=WITHOUT_CODE)
def inductor_without_code(graph, inputs, options=None):
    """Inductor up to its last pass over the graph, which is then interpreted: it saves a minute."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def finish(graph, inputs, **_):
        view_to_reshape(graph)
        with torch.no_grad(), V.set_fake_mode(fake_tensor_prop(graph, inputs)):
            post_grad_passes(graph, is_inference=False)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=finish, config_patches=options)


def stand_in():
    """CPU kernels for the fused operators; and inductor does not try without NCCL."""
    from torch.distributed import _symmetric_memory

    dist.is_nccl_available = lambda: True
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    return library


def run(batch, *, backend, fuse=False, recompute=None, sequence_parallel=True, device="cpu"):
    """Logits and gradients of the tiny model, and how much of it was fused."""
    torch.compiler.reset()  # the process that this one was forked from may have compiled it before
    library = stand_in() if device == "cpu" else None
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
    model = LLAMA3.build(ARGS, LENGTH)
    parallel.tensor.apply(
        model, LLAMA3.tensor_plan, mesh, sequence_parallel=sequence_parallel, loss_parallel=False
    )
    model.to(device)
    initialize(model.named_parameters(), partial(LLAMA3.init_std, ARGS), seed=0)
    blocks = LLAMA3.blocks(model)
    config = parallel.ActivationCheckpointConfig.model_validate(recompute or {"mode": "none"})
    parallel.activation_checkpoint.apply(blocks, list(blocks), config)
    if fuse:
        parallel.async_tensor.enable(mesh.get_group())
    parallel.compile.apply(
        blocks.values(), parallel.CompileConfig(enable=backend is not None, backend=backend or "")
    )
    tokens = torch.randint(ARGS.vocab_size, (batch, LENGTH), generator=torch.Generator())
    logits = model(tokens.to(device))
    logits.square().mean().backward()
    parallel.tensor.redistribute_grads(model.parameters())
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found["logits"] = logits.detach()
    del library
    return {name: value.cpu() for name, value in found.items()}, parallel.async_tensor.fused()


def compare(batch, recompute, backend, device="cpu"):
    """How much was fused of blocks that compute what they do without a compiler."""
    expected, none = run(batch, backend=None, recompute=recompute, device=device)
    found, fused = run(batch, backend=backend, fuse=True, recompute=recompute, device=device)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert none == (0, 0)
    parallel.async_tensor.confirm()
    return fused


def compare_operators(device):
    """How far the fused operators are from what they replace at most: a 2-norm by dtype."""
    library = stand_in() if device == "cpu" else None
    group, worst = dist.group.WORLD, {}
    enable_symmetric_memory(group)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        torch.manual_seed(dist.get_rank())
        part = torch.randn(2, 64, 96, device=device).to(dtype)
        torch.manual_seed(0)
        weights = [torch.randn(96, size, device=device).to(dtype) for size in (48, 160)]
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
            part, weights, 1, group.group_name
        )
        scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            part, weights[0], "sum", 1, group.group_name
        )
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part)
        total = (part.float() @ weights[0].float()).contiguous()
        dist.all_reduce(total)
        expected = [torch.cat(parts, 1), *(torch.cat(parts, 1) @ each for each in weights)]
        expected.append(total.chunk(group.size(), 1)[group.rank()])
        off = [
            ((mine.float() - right.float()).norm() / right.float().norm()).item()
            for mine, right in zip((whole, *products, scattered), expected, strict=True)
        ]
        worst[str(dtype).removeprefix("torch.")] = max(off)
        assert max(off) <= allowed, f"{dtype}: the gather, two products, the sum are off by {off}"
    del library
    return worst

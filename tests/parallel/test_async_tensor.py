"""What the compiler fuses in a tensor-parallel block, read off its graphs."""

import pytest

from tests.fusion import OPERATORS, WITHOUT_CODE, compare, run
from tests.ranks import run_ranks
from torchtitan.checks import problems
from torchtitan.config import PlannedWorld
from torchtitan.job import JobConfig
from torchtitan.parallel import async_tensor
from torchtitan.parallel.async_tensor import Fused


@pytest.mark.parametrize(
    ("batch", "backend", "device"),
    [
        (2, WITHOUT_CODE, "cpu"),
        # Of one sequence torch gathers by a view, which the compiler's own patterns do not know.
        pytest.param(1, WITHOUT_CODE, "cpu", marks=pytest.mark.gate),
        pytest.param(1, "inductor", "cpu", marks=pytest.mark.slow),
        pytest.param(2, "inductor", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_every_gather_and_scatter_of_a_block_is_fused(batch, backend, device):
    for fused in run_ranks(compare, 2, batch, None, backend, device, device=device):
        # Forward: before wq, wk, wv; after wo; before w1, w3; after w2. Backward: before wo, w2.
        assert fused == Fused(gathers=4, scatters=2)


@pytest.mark.gate
def test_recomputation_is_fused_too():
    for fused in run_ranks(compare, 2, 2, OPERATORS, WITHOUT_CODE):
        assert fused == Fused(gathers=6, scatters=2)  # what is added up is not sent again


def refuse(fuse, sequence_parallel):
    run(2, backend=WITHOUT_CODE, fuse=fuse, sequence_parallel=sequence_parallel)
    with pytest.raises(RuntimeError) as error:
        async_tensor.confirm()
    return str(error.value)


@pytest.mark.gate
@pytest.mark.parametrize(("fuse", "sequence_parallel"), [(False, True), (True, False)])
def test_it_does_not_pretend(fuse, sequence_parallel):
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
def test_refusals(parallelism, compiled, device, words):
    key = "parallelism.enable_async_tensor_parallel"
    job = JobConfig.model_validate({"parallelism": parallelism, "compile": compiled})
    world = PlannedWorld(device_type=device or "cpu", is_here=device is not None)
    messages = [found.message for found in problems(job, world) if found.path == key]
    assert len(messages) == len(words)
    # The section speaks first, then the rules between sections.
    assert all(any(word in message for message in messages) for word in words)

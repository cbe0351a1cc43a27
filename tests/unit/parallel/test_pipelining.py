"""What is refused about a pipeline, in words that say what would work."""

import dataclasses

import pytest

from tests import tiny
from torchtitan.checks import pipelining
from torchtitan.models.llama3 import LLAMA3
from torchtitan.parallel import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.parallel.schedules import SCHEDULES

ARGS = dataclasses.replace(tiny.ARGS, n_layers=4)
NAMES = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")
OPERATORS = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")


def found(
    schedule="1F1B",
    pp=2,
    microbatches=8,
    args=ARGS,
    recompute=None,
    compile=None,
    functions=(),
    **keys,
):
    """The problems, each as one line, without the names of the sections."""
    pipeline = {"pipeline_parallel_degree": pp, "pipeline_parallel_schedule": schedule}
    config = ParallelismConfig(**pipeline, **keys)
    planned = pipelining.Planned(
        config,
        LLAMA3,
        args,
        microbatches=microbatches,
        recompute=recompute or ActivationCheckpointConfig(),
        compile=compile or CompileConfig(),
        functions=functions,
    )
    lines = [f"{problem.path}: {problem.message}" for problem in planned.problems()]
    return [line.replace("parallelism.", "") for line in lines]


def test_what_works_is_not_refused():
    for name in SCHEDULES:
        assert not found(name)
        full = ActivationCheckpointConfig(mode="full")
        loss = CompileConfig(enable=True, components=("loss",))
        assert not found(name, recompute=full, compile=loss, fsdp_reshard_after_forward="never")
    assert not found("Interleaved1F1B", recompute=OPERATORS, compile=CompileConfig(enable=True))
    assert not found("LoopedBFS", pipeline_parallel_layers_per_stage=1)
    parts = (NAMES[:1], NAMES[1:3], NAMES[3:5], NAMES[5:])
    assert not found("DualPipeV", module_fqns_per_model_part=parts)


@pytest.mark.parametrize("schedule", [name for name, s in SCHEDULES.items() if s.splits_backward])
def test_what_a_backward_in_two_parts_cannot_do(schedule):
    (line,) = found(schedule, compile=CompileConfig(enable=True))
    assert "the backward of a compiled block can run only once" in line
    (line,) = found(schedule, recompute=OPERATORS)
    assert 'activation_checkpoint.mode = "full"' in line
    (line,) = found(schedule, fsdp_reshard_after_forward="always")
    assert "lose the gradients" in line


@pytest.mark.parametrize("keeps", [False, True])
def test_functions_written_in_python_need_a_torch_that_keeps_them(keeps, monkeypatch):
    monkeypatch.setattr(pipelining, "keeps_nodes_of_functions", lambda: keeps)
    lines = found("ZBVZeroBubble", functions=("[[convert]]",))
    assert ["keep the graph of [[convert]] for" in line for line in lines] == [True] * (not keeps)
    assert not found("Interleaved1F1B", functions=("[[convert]]",))


def test_a_file(tmp_path):
    path = tmp_path / "order.csv"
    keys = {"pipeline_parallel_schedule_csv": str(path)}
    (line,) = found(**keys)
    assert line.startswith("pipeline_parallel_schedule_csv: it cannot be read: ")
    path.write_text("0F0,0I0,0W0,2F0,2B0\n1F0,1B0")
    (line,) = found(microbatches=1, **keys)
    assert "rank 0 would wait forever for 0I0" in line
    path.write_text("0F0,2F0,2B0,0I0,0W0\n1F0,1B0")
    assert not found(microbatches=1, **keys)
    (line,) = found(**keys)
    assert "it has 1 microbatches, 0 to 0, but a batch has 8" in line
    (line,) = found(microbatches=1, recompute=OPERATORS, **keys)
    assert line.startswith("pipeline_parallel_schedule_csv: it runs each backward in two parts")
    (line,) = found(microbatches=1, pipeline_parallel_layers_per_stage=2, **keys)
    assert line.endswith("has 3 stages already; remove one of the two")
    (line,) = found(microbatches=1, module_fqns_per_model_part=(NAMES[:3], NAMES[3:]), **keys)
    assert "these are 2 parts, but the file" in line
    (line,) = found(microbatches=1, args=dataclasses.replace(ARGS, n_layers=0), **keys)
    assert "it makes 3 stages" in line

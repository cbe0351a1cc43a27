"""What a run holds in memory: formulas against what is allocated, and what is refused by them."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchtitan.checks import load_job
from torchtitan.checks.memory_limits import of_rank, room
from torchtitan.config import CannotRun
from torchtitan.device import GIB, Device
from torchtitan.estimate.memory import Memory
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.llama3.spec import FLAVORS, kept_by_block
from torchtitan.parallel.schedules import SCHEDULES, timeline
from torchtitan.tools.cli import main

LLAMA3 = MODELS["llama3"]
PARAMETERS = 5_770_496


def held(words: str = "", ranks: int = 1) -> tuple[Memory, Memory]:
    """The least and the estimate of a rank."""
    job = load_job(None, words.split(), ranks, "cpu").config
    plan = of_rank(job, ranks)
    assert plan is not None
    return plan.least(), plan.estimate()


def saved(network: nn.Module, compute: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd saves, without those of the network."""
    lasting = [*network.parameters(), *network.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    found: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        assert compute().requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_keeps_is_what_autograd_saves(dtype: torch.dtype) -> None:
    args, seq_len = dataclasses.replace(FLAVORS["debugmodel"], n_layers=1, multi_token=1), 64
    network = LLAMA3.build(args, seq_len).to(dtype)
    positions = torch.arange(seq_len).repeat(2, 1)
    shape = (2, seq_len, args.dim)
    x, later = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    (block,), ahead = network.layers.values(), network.auxiliary["1"]
    of_block = saved(network, lambda: block(x, positions, None)) / (2 * seq_len)
    assert of_block == pytest.approx(kept_by_block(args, dtype.itemsize, "layers.0"), rel=0.02)
    of_depth = saved(network, lambda: ahead.norm(ahead(x, later, positions, None))) / (2 * seq_len)
    around = kept_by_block(args, dtype.itemsize, "auxiliary")
    assert of_depth == pytest.approx(of_block + around, rel=0.02)


def test_parameters_gradients_and_states_are_those_of_the_model() -> None:
    least, _ = held("--training.seq_len 16 --training.local_batch_size 1")
    assert least[:3] == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS)
    assert sum(weight.numel() for weight in LLAMA3.build(FLAVORS["debugmodel"], 16).parameters())
    least, _ = held("--training.seq_len 16 --training.local_batch_size 1 --training.dtype bfloat16")
    assert least[:3] == (2 * PARAMETERS, 2 * PARAMETERS, 4 * PARAMETERS)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--parallelism.data_parallel_shard_degree 2", 2),
        ("--parallelism.tensor_parallel_degree 2", 2),
        ("--parallelism.pipeline_parallel_degree 2", 2),
        ("--parallelism.context_parallel_degree 2", 2),
    ],
)
def test_ranks_that_share_a_model_have_half_each_and_copies_all(words: str, ranks: int) -> None:
    assert held(words, ranks)[0].parameters == 2 * PARAMETERS
    copied = "--parallelism.data_parallel_replicate_degree 2 "
    assert held(copied + words, 2 * ranks)[0].parameters == 2 * PARAMETERS


IN_FLIGHT = {
    "GPipe": 16,
    "1F1B": 4,
    "Interleaved1F1B": 5.5,
    "LoopedBFS": 16,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 4.5,
}
"""Microbatches whose activations the fullest of 4 ranks keeps, of 16."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_keeps_what_its_schedule_has_in_flight(name: str) -> None:
    """As many as in the simulated order, and as large as the stages of the fullest rank."""
    layers, stages, pp = 16, 4 if SCHEDULES[name].stages == "one" else 8, 4
    each = layers // stages
    units = [[f"layers.{layer}" for layer in range(i, i + each)] for i in range(0, layers, each)]
    units = [["tok_embeddings", *units[0]], *units[1:-1], [*units[-1], "norm", "output"]]
    sections = {
        "model": {"flavor": "debugmodel", "n_layers": layers},
        "training": {"local_batch_size": 16, "seq_len": 64, "mixed_precision_param": "float32"},
        "activation_checkpoint": {"mode": "none"},
        "parallelism": {
            "pipeline_parallel_degree": pp,
            "pipeline_parallel_schedule": name,
            "module_fqns_per_model_part": units,
        },
    }
    plan = of_rank(JobConfig.model_validate(sections), pp)
    assert plan is not None
    stage = each * 64 * kept_by_block(FLAVORS["debugmodel"], 4, "layers.0")
    slots, kept = timeline(plan.work.orders), []
    for rank in range(pp):
        kinds = [slot.action.kind for slot in slots if slot.rank == rank]
        changes = ({"F": 1, "I": 0}.get(kind, -1) for kind in kinds)
        kept.append(max(itertools.accumulate(changes)))
        moments = [*plan.moments(rank)]
        assert max(moment.activations for moment in moments) == kept[-1] * stage
    assert max(kept) == IN_FLIGHT[name] * stages / pp
    fullest = max((moment for rank in range(pp) for moment in plan.moments(rank)), key=total)
    assert plan.estimate() == fullest


def total(memory: Memory) -> float:
    return memory.total


def test_each_rank_of_a_pipeline_has_its_own_stages() -> None:
    words = "--parallelism.pipeline_parallel_degree 2 --training.seq_len 64"
    plan = of_rank(load_job(None, words.split(), 2, "cpu").config, 2)
    assert plan is not None
    first, last = ([*plan.moments(rank)] for rank in range(2))
    assert [each[0].parameters for each in (first, last)] == [
        4 * sum(part.sizes.total() for part in plan.work.parts(rank)) for rank in range(2)
    ]
    assert first[0].parameters + last[0].parameters == 4 * PARAMETERS
    assert not any(moment.logits for moment in first)
    assert all(moment.logits for moment in last[1:])


def test_recomputation_small_batches_and_chunks_take_less() -> None:
    every = {
        words: held(words)[1]
        for words in (
            "--activation_checkpoint.mode none",
            "",
            "--activation_checkpoint.mode full",
            "--activation_checkpoint.mode full --training.local_batch_size 2",
        )
    }
    totals = [memory.activations + memory.logits for memory in every.values()]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    assert held("--loss.vocabulary_chunk 64")[1].logits == 0
    offloaded = held("--training.enable_cpu_offload")[0]
    assert offloaded.on_host == offloaded.parameters + offloaded.states == 12 * PARAMETERS
    assert held("--optimizer.offload_states")[0].on_host == 8 * PARAMETERS
    assert held("--optimizer.early_step_in_backward --training.max_norm 0")[0].gradients == 0


def test_at_the_least_is_never_more_than_the_estimate() -> None:
    for flavor in FLAVORS:
        for words, ranks in (("", 1), ("--parallelism.tensor_parallel_degree 4", 8)):
            least, estimate = held(f"--model.flavor {flavor} {words}", ranks)
            assert 0 < least.total <= estimate.total


def test_405b_is_checked_for_the_ranks_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.flavor", "405B", "--parallelism.tensor_parallel_degree", "8"]
    assert main(["check", *words, "--training.steps", "5", "--world-size", "512"]) == 0
    assert "estimated memory per rank: " in capsys.readouterr().out


def test_a_run_that_cannot_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model.flavor", "405B", "--training.steps", "5"]
    for words in (
        ["check", "--here", "--device", "cpu"],
        ["train"],
        ["train", "--processes", "2"],
    ):
        assert main([*words, *flags]) == 2
        message = capsys.readouterr().err.splitlines()[-2]
        assert message.startswith('error: --model.flavor: got "405B"; ')
        assert " at least " in message
        assert " GiB, and the host has " in message
        assert "(parameters " in message
        assert " + gradients " in message
        assert " + optimizer states " in message


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "memory_limit", lambda self: 3 * held()[0].total / GIB)
    monkeypatch.setattr(Device, "memory_available", lambda self: 1e9)
    load_job(None, [], 2, "cpu", is_here=True, local_ranks=2)
    load_job(None, [], 16, "cpu", is_here=True, local_ranks=2)
    words = ["--parallelism.data_parallel_replicate_degree", "4"]
    with pytest.raises(CannotRun, match=r"got 8; 4 ranks hold at least .* GiB"):
        load_job(None, words, 4, "cpu", is_here=True, local_ranks=4)
    load_job(None, words, 4, "cpu", is_here=True)  # a check for elsewhere


def test_a_run_that_may_not_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "memory_available", lambda self: 0.25)
    found = load_job(None, [], 1, "cpu", is_here=True, local_ranks=1)
    (note,) = room(found.config, 1, 1, Device("cpu"))
    assert note.severity == "note"
    notice = found.line(note)
    assert "GiB by an estimate, and 0.2 of the host are free" in notice
    assert main(["check", "--here", "--device", "cpu", "--training.steps", "10000"]) == 0
    assert "note: defaults: " in (told := capsys.readouterr().err)
    assert notice.partition("; reduce")[0] in told


def test_samples_that_no_machine_holds_are_refused_anywhere() -> None:
    words = ["--training.seq_len", str(2**31), "--training.local_batch_size", str(2**20)]
    with pytest.raises(CannotRun, match="no machine has that much memory"):
        load_job(None, words, None, "cuda")


def test_a_model_that_tells_nothing_of_its_blocks_still_has_a_least() -> None:
    plan = of_rank(load_job(None, [], 1, "cpu").config, 1)
    assert plan is not None
    silent = dataclasses.replace(LLAMA3, kept_by_block=lambda args, itemsize, name: 0.0)
    work = dataclasses.replace(plan.work, spec=silent)
    assert dataclasses.replace(plan, work=work).estimate().total > plan.least().total
    assert isinstance(work.spec.build(work.args, 16), nn.Module)

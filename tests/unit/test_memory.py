"""Bounds of a run's memory by formula, and what is refused by them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.checks import load_job
from torchtitan.checks.memory_bounds import Memory
from torchtitan.checks.memory_limits import of_rank
from torchtitan.config import CannotRun
from torchtitan.models import MODELS
from torchtitan.models.decoder_spec import kept_by_block
from torchtitan.models.llama3.spec import FLAVORS

LLAMA3 = MODELS["llama3"]
PARAMETERS = 5_770_496


def least(words: str = "", ranks: int = 1) -> Memory:
    """The lower bound of a rank."""
    bounds = of_rank(load_job(None, words.split(), ranks, "cpu").config, ranks)
    assert bounds is not None
    return bounds.least()


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


NORMED = {"head_norms": True, "head_dim": 32}


@pytest.mark.parametrize("facts", [{}, NORMED, NORMED | {"sliding_window": 9}, {"norm": "none"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_keeps_is_what_autograd_saves(
    dtype: torch.dtype, facts: dict[str, Any]
) -> None:
    changes = {"n_layers": 1, "multi_token": 1, **facts}
    args, seq_len = dataclasses.replace(FLAVORS["debugmodel"], **changes), 64
    network = LLAMA3.build(args, seq_len).to(dtype)
    network.init_buffers()  # in float32, as in training
    positions = torch.arange(seq_len).repeat(2, 1)
    shape = (2, seq_len, args.dim)
    x, later = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    (block,), ahead = network.layers.values(), network.auxiliary["1"]
    of_block = saved(network, lambda: block(x, positions, None)) / (2 * seq_len)
    assert of_block == kept_by_block(args, dtype.itemsize, "layers.0")
    documents = positions // 20
    with_documents = saved(network, lambda: block(x, positions, documents)) / (2 * seq_len)
    assert with_documents == of_block + documents.itemsize  # all blocks keep the same documents
    of_depth = saved(network, lambda: ahead.norm(ahead(x, later, positions, None))) / (2 * seq_len)
    around = kept_by_block(args, dtype.itemsize, "auxiliary")
    assert of_depth == of_block + around


@pytest.mark.parametrize(("lengths", "window"), [((40, 24), 0), ((), 16), ((1, 60, 3), 16)])
@pytest.mark.parametrize("seq_len", [64, 256])
def test_a_block_keeps_no_mask_of_documents_and_windows(
    lengths: tuple[int, ...], window: int, seq_len: int
) -> None:
    """Only the documents themselves, which are on the host, and shared by all blocks."""
    args = dataclasses.replace(FLAVORS["debugmodel"], n_layers=1, sliding_window=window)
    network = LLAMA3.build(args, seq_len)
    network.init_buffers()
    positions = torch.arange(seq_len).repeat(2, 1)
    x = torch.randn(2, seq_len, args.dim, requires_grad=True)
    documents = None
    if lengths:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        documents = numbers.repeat(2, seq_len // len(numbers))
    (block,) = network.layers.values()
    kept = saved(network, lambda: block(x, positions, documents))
    kept -= documents.nbytes if documents is not None else 0
    assert kept / (2 * seq_len) == kept_by_block(args, 4, "layers.0")


def test_parameters_gradients_and_states_are_those_of_the_model() -> None:
    held = least("--training.seq_len 16 --training.local_batch_size 1")
    assert held[:3] == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS)
    assert sum(weight.numel() for weight in LLAMA3.build(FLAVORS["debugmodel"], 16).parameters())
    held = least("--training.seq_len 16 --training.local_batch_size 1 --training.dtype bfloat16")
    assert held[:3] == (2 * PARAMETERS, 2 * PARAMETERS, 4 * PARAMETERS)


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
    assert least(words, ranks).parameters == 2 * PARAMETERS
    copied = "--parallelism.data_parallel_replicate_degree 2 "
    assert least(copied + words, 2 * ranks).parameters == 2 * PARAMETERS


def test_samples_that_no_machine_holds_are_refused_anywhere() -> None:
    words = ["--training.seq_len", str(2**31), "--training.local_batch_size", str(2**20)]
    with pytest.raises(CannotRun, match="no machine has that much memory"):
        load_job(None, words, None, "cuda")


def test_offloaded_and_consumed_tensors_are_not_on_the_device() -> None:
    offloaded = least("--training.enable_cpu_offload")
    assert offloaded.on_host == offloaded.parameters + offloaded.states == 12 * PARAMETERS
    assert least("--optimizer.offload_states").on_host == 8 * PARAMETERS
    assert least("--optimizer.early_step_in_backward --training.max_norm 0").gradients == 0
    assert least("--loss.vocabulary_chunk 64").logits == 0 < least().logits

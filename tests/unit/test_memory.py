"""What a rank holds of the model and its optimizer, what a block keeps, and what is refused."""

import dataclasses

import pytest
import torch

from torchtitan.checks import load_job
from torchtitan.checks.limits import model_states, problems_of_memory
from torchtitan.config import CannotRun
from torchtitan.device import GIB, Device
from torchtitan.models import MODELS
from torchtitan.models.llama3 import FLAVORS

LLAMA3 = MODELS["llama3"]
PARAMETERS = 5_770_496


def load(words, ranks):
    return load_job(None, words.split(), ranks, "cpu").config


@pytest.mark.parametrize(("lengths", "window"), [((40, 24), 0), ((), 16), ((1, 60, 3), 16)])
def test_a_block_keeps_no_mask_of_documents_and_windows(lengths, window):
    """Only the documents themselves, which are on the host, and shared by all blocks."""

    def kept(seq_len, lengths, window):
        """Bytes per token that autograd saves in a block, without its parameters."""
        args = dataclasses.replace(FLAVORS["debugmodel"], n_layers=1, sliding_window=window)
        network = LLAMA3.build(args, seq_len)
        network.init_buffers()
        positions = torch.arange(seq_len).repeat(2, 1)
        x = torch.randn(2, seq_len, args.dim, requires_grad=True)
        documents = None
        if lengths:
            numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            documents = numbers.repeat(2, seq_len // len(numbers))
        lasting = [*network.parameters(), *network.buffers(), *[documents] * bool(lengths)]
        known = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        found = {}

        def save(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        (block,) = network.layers.values()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            assert block(x, positions, documents).requires_grad
        return sum(found.values()) / (2 * seq_len)

    assert kept(64, lengths, window) == kept(256, lengths, window) == kept(64, (), 0)


def states(words="", ranks=1):
    """Bytes per parameter, on the device and in host memory."""
    held = model_states(load(words, ranks), ranks)
    return held.device * GIB / PARAMETERS, held.host * GIB / PARAMETERS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Parameters, gradients and two moments (arXiv:1910.02054).
        ("", (4 + 4 + 8, 0)),
        ("--training.dtype bfloat16", (2 + 2 + 4, 0)),
        ("--training.enable_cpu_offload", (0, 16)),
        ("--optimizer.early_step_in_backward --training.max_norm 0", (4 + 8, 0)),
    ],
)
def test_parameters_gradients_and_states_are_those_of_the_model(words, expected):
    assert states(words) == pytest.approx(expected)


@pytest.mark.parametrize(
    "axis", ["data_parallel_shard", "tensor_parallel", "pipeline_parallel", "context_parallel"]
)
def test_ranks_that_share_a_model_have_half_each_and_copies_all(axis):
    words = f"--parallelism.{axis}_degree 2"
    assert states(words, 2) == pytest.approx((8, 0))
    copied = f"--parallelism.data_parallel_replicate_degree 2 {words}"
    assert states(copied, 4) == pytest.approx((8, 0))


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    job = load("--parallelism.data_parallel_replicate_degree 4", 4)
    limit = 3 * model_states(job, 4).device
    monkeypatch.setattr(Device, "memory_limit", lambda self: limit)
    assert not [*problems_of_memory(job, 4, 2, "cpu")]
    (problem,) = problems_of_memory(job, 4, 4, "cpu")
    assert problem.message.startswith("4 ranks hold at least ")
    assert not [*problems_of_memory(job, 4, 4, "cuda")], "no device of this machine"


def test_samples_that_no_machine_holds_are_refused_anywhere():
    words = ["--training.seq_len", str(2**31), "--training.local_batch_size", str(2**20)]
    with pytest.raises(CannotRun, match="no machine has that much memory"):
        load_job(None, words, None, "cuda")

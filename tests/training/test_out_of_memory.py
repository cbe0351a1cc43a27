"""A run whose memory runs out says what it held, and ends by the same error."""

import json

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import running, train_from_scratch


def run_out_of_memory(job):
    """Train; the forward of step 2 fails."""
    error = torch.OutOfMemoryError("tried to allocate 20.00 MiB")
    with running(job) as run:

        def fail(*_):
            if run.state.step + 1 == 2:
                raise error

        run.model.parts[0].get_submodule("layers.1").register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            train_from_scratch(run)
        assert raised.value is error


def test_what_was_held_is_written(tmp_path):
    run_ranks(run_out_of_memory, 1, tiny.job(tmp_path))
    found = json.loads((tmp_path / "out_of_memory/rank0.json").read_text())
    assert (found["step"], found["phase"]) == (2, "forward")
    assert found["error"] == "OutOfMemoryError: tried to allocate 20.00 MiB"
    # The update of step 1 made two moments; the gradients of step 2 are not there yet.
    assert found["held_bytes"].keys() == {"parameters", "optimizer"}
    of_parameters = found["held_bytes"]["parameters"]["float32"]
    counts = 4 * 21
    assert found["held_bytes"]["optimizer"]["float32"] == 2 * of_parameters + counts
    assert "tok_embeddings" in [each["module"] for each in found["largest_modules"][:2]]
    assert found["to_shrink_it"]["training.local_batch_size"]["now"] == 2
    assert found["to_shrink_it"]["activation_checkpoint.mode"]["now"] == "none"

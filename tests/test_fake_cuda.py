"""Steps on fake CUDA tensors, where torch is built for CUDA and there is no device."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch that is built for CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: scripts/gpu")
def test_every_layout_and_option_takes_a_step() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.fake"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

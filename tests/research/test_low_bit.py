"""Moments in few bits: what comes back from a checkpoint, what is left as it is, how many bytes."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tests.recipes.test_bad_recipes import lacks
from tests.tiny import named
from tests.unit.optim import test_group, test_in_backward
from torchtitan.checks import load_job
from torchtitan.optim import Adam, AdamW, Optimizers
from torchtitan.optim.parameters import local
from torchtitan.research.low_bit import compute_tables, is_quantized

pytestmark = pytest.mark.usefixtures("uncompiled")
QUANTIZED = ["float8", "8bit", "4bit"]
LOW = ["bfloat16", *QUANTIZED]


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64), nn.Linear(64, 128))


def train(network, optimizers, steps):
    """Gradients of sizes that differ by seven orders of magnitude, and zeros, whole blocks too."""
    optimizers.begin(1)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in network.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                gradient[:16] *= 1e-7
                gradient[16:24] = 0
                gradient[:, ::3] *= 1e-3
            parameter.grad = gradient
        optimizers.step()


def opened(config):
    network = model()
    return network, Optimizers(named(network), config)


def same_bits(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize("dtype", LOW)
def test_resumed_states_are_the_same_to_the_bit(dtype, kind):
    config = kind(lr=1e-3, state_dtype=dtype)
    network, optimizers = opened(config)
    naively_rounded = False
    for step in range(6):
        saved = {name: tensor.clone() for name, tensor in optimizers.state_dict().items()}
        again, loaded = opened(config)
        again.load_state_dict(network.state_dict())
        given = loaded.state_dict()
        for name, tensor in given.items():
            tensor.copy_(saved[name])
        loaded.load_state_dict(given)
        found = loaded.state_dict()
        assert all(same_bits(found[name], tensor) for name, tensor in saved.items())
        for name, state in loaded.states():
            if is_quantized(state):
                local(state).copy_(saved[name])
        rounded = loaded.state_dict()
        naively_rounded |= not all(torch.equal(rounded[name], t) for name, t in saved.items())
        loaded.load_state_dict(saved)
        for run, of in ((network, optimizers), (again, loaded)):
            train(run, of, range(step, step + 1))
        weights = zip(network.parameters(), again.parameters(), strict=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in weights)
    # The test means something: rounding once more would have lost what signed maps cannot show.
    assert naively_rounded == (dtype in ("8bit", "4bit"))


ERRORS = {"parameter": 0.0, "bfloat16": 2**-8, "float8": 2**-4, "8bit": 0.01, "4bit": 0.2}
"""How far off a moment may be that was stored so, in parts of the largest of its tensor."""


@pytest.mark.parametrize("here", ERRORS)
@pytest.mark.parametrize("there", ERRORS)
def test_states_load_into_any_other_dtype(there, here):
    network, optimizers = opened(AdamW(state_dtype=there))
    train(network, optimizers, range(3))
    saved = optimizers.state_dict()
    _, loaded = opened(AdamW(state_dtype=here))
    given = loaded.state_dict()
    assert given.keys() == saved.keys()
    for name, tensor in given.items():
        assert tensor.shape == saved[name].shape
        tensor.copy_(saved[name])
    loaded.load_state_dict(given)
    for name, tensor in loaded.state_dict().items():
        off = (tensor.float() - saved[name].float()).abs().max().item()
        allowed = 0.0 if name.endswith("step") else ERRORS[here]
        assert off <= allowed * saved[name].abs().max().item(), name


def test_small_tensors_and_embeddings_are_left_as_they_are():
    _, optimizers = opened(AdamW(state_dtype="8bit"))
    coded = {name for name, state in optimizers.states() if is_quantized(state)}
    weights = ("1.weight", "2.weight")
    assert coded == {f"{name}.{key}" for name in weights for key in ("exp_avg", "exp_avg_sq")}
    told = AdamW(state_dtype="8bit").describe(optimizers.states())
    assert told.startswith(
        "optimizer states in 8bit: 100,352 bytes for 49,536 values; 32,768 values in 4 tensors are "
        "quantised, 16,768 in 6 stay as the parameters are (embeddings, "
    )


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_updates_by_moments_that_are_not_quantized_are_those_of_torch(kind):
    """All numbers differ, so that one in the place of another is found."""
    numbers = {"lr": 0.05, "weight_decay": 0.3, "eps": 0.02}
    config = kind(**numbers, beta1=0.8, beta2=0.97, state_dtype="8bit")
    groups = [numbers | {"betas": (0.8, 0.97)}] * 3
    expected = test_group.by_torch(getattr(torch.optim, kind.__name__), *groups)
    torch.testing.assert_close(test_group.by_ours(config), expected)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rows_that_a_step_does_not_use_do_not_run_away(dtype):
    torch.manual_seed(0)
    table = nn.Embedding(64, 128)
    optimizers = Optimizers(named(table), AdamW(lr=1e-3, weight_decay=0.0, state_dtype=dtype))
    for step in range(8):
        before = table.weight.detach().clone()
        optimizers.begin(1)
        tokens = torch.tensor([step, step + 1, 40])
        (table(tokens) * torch.randn(3, 128) * 10.0 ** -torch.arange(3)[:, None]).sum().backward()
        optimizers.step()
        assert (table.weight - before).abs().max() < 5e-3


BYTES = {"parameter": 8.0, "bfloat16": 4.0, "float8": 2.0312, "8bit": 2.0312, "4bit": 1.0625}


@pytest.mark.parametrize("dtype", BYTES)
def test_bytes_of_a_parameter(dtype):
    """The table of torchtitan/research/low_bit.md."""
    layer = nn.Linear(512, 512, bias=False)
    config = AdamW(state_dtype=dtype)
    optimizers = Optimizers(named(layer), config)
    optimizers.state_dict()  # makes what torch makes later
    kept = sum(config.size(state) for n, state in optimizers.states() if not n.endswith("step"))
    assert kept / layer.weight.numel() == pytest.approx(BYTES[dtype], abs=1e-4)


COMPILED = """
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from tests.tiny import named
from torchtitan.optim import AdamW, Optimizers

found = []
for stance in ("default", "force_eager"):
    torch.compiler.set_stance(stance)
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    optimizers = Optimizers(named(layer), AdamW(lr=1e-2, state_dtype="8bit"))
    for factor in (1.0, 0.5):
        optimizers.begin(factor)
        layer.weight.grad = torch.randn(64, 64)
        optimizers.step()
    found.append(layer.weight.detach().clone())
assert not torch.equal(*found), "nothing was compiled"
print((found[0] - found[1]).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_it_is_the_same_and_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=True
    )
    assert not any(noise in done.stderr for noise in ("torchao", "Enum", "Warning"))
    assert float(done.stdout) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_updates_in_the_backward_are_those_after_it(dtype):
    test_in_backward.is_the_step_after_the_backward(AdamW(lr=0.1, state_dtype=dtype))


def test_one_gradient_is_alive_at_a_time():
    test_in_backward.one_gradient_is_alive_at_a_time(AdamW(state_dtype="bfloat16"))


def test_states_that_a_cpu_cannot_compile_for(monkeypatch):
    job = load_job(None, ["--optimizer.state_dtype", "4bit"], 1, "cpu").config
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert lacks(job, "cpu") == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert lacks(job, "cuda") == []
    (problem,) = lacks(job, "cpu")
    assert problem.path == "optimizer.state_dtype"
    assert problem.message.startswith("its update is compiled, which on a CPU needs g++")


def test_codes_have_their_values_after_a_plan():
    """torchao keeps them for the process, and a plan computes with tensors without values."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    get_qmap_signed.cache_clear()
    get_qmap_unsigned.cache_clear()
    with FakeTensorMode():
        compute_tables()
        assert len(set(get_qmap_signed())) == len(set(get_qmap_unsigned())) == 256

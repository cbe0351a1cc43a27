"""Every test starts from the same state: seeds, environment, one thread, logger, registries."""

import gc
import os
import re
import signal
import sys
from unittest.mock import Mock

import hypothesis
import pytest
import torch

from tests import registries
from tests.wandb_files import WANDB_OFFLINE
from torchtitan.config import RecipeError
from torchtitan.logging import logger
from torchtitan.torch_private.distributed import flight_records

pytest_plugins = ["tests.costs"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Under nohup a hangup is ignored, also by what a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example has no time limit on a busy machine, and the same ones are tried in every run.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# Ranks are forked, and a forked process cannot use the thread pool of its parent.
torch.set_num_threads(1)

# Garbage of the parent may hold threads, which a forked process does not have: it stays there.
os.register_at_fork(after_in_child=gc.freeze)

# Torch makes its Flight Recorder once in a process. A run on one rank would make one without
# entries, and forked ranks have that of their parent.
os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
flight_records("cpu")
del os.environ["TORCH_FR_BUFFER_SIZE"]

# Without a device, torch keeps each seed for one that may come, and formats the stack for that.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.fixture(autouse=True)
def clean_state(monkeypatch):
    """Seeds set, no launcher and no network in the environment; what is changed is put back."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    # Notes are those of any machine.
    monkeypatch.setattr("torchtitan.checks.limits.cpu_has_bfloat16", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seed(0)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    environment = dict(os.environ)
    with registries.for_one_test():
        yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def no_plan(monkeypatch):
    """Commands say that there is no plan, which takes seconds, where a test is not about it."""
    refusal = RecipeError(["planning is left out in this test"])
    monkeypatch.setattr("torchtitan.plan.comparison.plan_on", Mock(side_effect=refusal))


@pytest.fixture
def says(capsys):
    """What a command prints, or its refusal if it ends with status 2."""
    from torchtitan.tools.cli import main

    def run(*words, status=0):
        assert main([*map(str, words)]) == status, words
        printed = capsys.readouterr()
        refusal = re.sub(r"note: not installed: torchtitan.*\n", "", printed.err)  # without wings
        return refusal if status == 2 else printed.out

    return run


@pytest.fixture
def small(monkeypatch):
    """The model of `tests.small_weights` under its name."""
    from tests.small_weights import SPEC
    from torchtitan.models import MODELS

    monkeypatch.setitem(MODELS, "small", SPEC)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Weights & Biases without a network."""
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "home"))
    for name, value in WANDB_OFFLINE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def uncompiled():
    """Nothing is compiled here, and in ranks that are forked."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def pytest_collection_finish():
    """What all tests have imported stays: the collector need not look at it in every run."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """A test stands in one tier, and is skipped if it is marked gpu and there is no GPU."""
    for item in items:
        if item.get_closest_marker("gate") and item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid} is marked both gate and slow")
    items.sort(key=lambda item: "test_network" not in item.nodeid)  # they take an hour
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))

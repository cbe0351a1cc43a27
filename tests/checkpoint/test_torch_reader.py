"""torch alone opens checkpoints of ours."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tests import forked, tiny
from tests.layouts import LAYOUTS, case
from tests.ranks import free_port, run_ranks
from tests.small_weights import saved as saved_weights
from tests.test_docs import ROOT, blocks
from tests.training.test_optimizers import eager
from torchtitan.checkpoint.storage import Piece, SavedTensors, write_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is
MIXED = LAYOUTS["FSDP 2 x TP 2"]


def recipe(folder, layout, **sections):
    """Two steps, the last of which is saved."""
    defaults = {"training": {"steps": 2}, "optimizer": {"lr": 1e-3}, "checkpoint": {"enable": True}}
    return tiny.job(folder, **layout.recipe(**tiny.merged(defaults, sections)))


def loaded(path):
    """All tensors of a checkpoint, by torch."""
    reader = HuggingFaceStorageReader(str(path))
    kinds = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(k.size, dtype=k.properties.dtype) for n, k in kinds.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def same(found, path):
    """Whether tensors are all those of a checkpoint, to the bit."""
    wanted = SavedTensors(path)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    assert kinds == wanted.shapes()
    return all(torch.equal(bits(t), bits(wanted.read(name))) for name, t in found.items())


HALF = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
MOMENTUM = {"name": "SGD", "momentum": 0.9}
EXPORT = {"last_save_model_only": True, "export_dtype": "bfloat16"}
SMALL = {"dim": 4, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 3}
RECIPES = {
    "AdamW, nothing even": (MIXED, {}),
    "replicas": (LAYOUTS["HSDP 2 x 2"], {}),
    "bfloat16": (case(batch=8), {"training": HALF}),
    "momentum, several stages": (LAYOUTS["PP 2, Interleaved1F1B"], {"optimizer": MOMENTUM}),
    "no state, tied": (case(shard=2), {"model": {"flavor": "tied"}, "optimizer": {"name": "SGD"}}),
    "ranks without a row": (case(shard=4), {"model": SMALL}),
    "what is sent": (case(shard=2), {"communication": {"gradients": {"name": "half"}}}),
    "weights alone": (MIXED, {"checkpoint": EXPORT}),
}
"""Everything of a run that can be in a checkpoint, as some layout and recipe saves it."""


def run_each(folder, kinds):
    import tests.senders  # noqa: F401  (the name of a way to send)

    for kind in kinds:
        layout, sections = RECIPES[kind]
        eager(recipe(folder / kind, layout, **sections))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each recipe; those on as many ranks share their processes."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (1, 2, 4):
        kinds = [kind for kind, (layout, _) in RECIPES.items() if layout.ranks == ranks]
        run_ranks(run_each, ranks, folder, kinds)
    return folder


@pytest.mark.costs("a run of each recipe, on up to four ranks")
@pytest.mark.parametrize("kind", RECIPES)
def test_torch_opens_what_any_recipe_saves(kind, runs):
    path = runs / kind / "checkpoint/step-2"
    assert same(loaded(path), path)


def opens_what_a_recipe_saves(layout, sections, tmp_path):
    run_ranks(eager, layout.ranks, recipe(tmp_path, layout, **sections))
    path = tmp_path / "checkpoint" / "step-2"
    assert same(loaded(path), path)


def test_torch_opens_converted_weights(tmp_path):
    path = saved_weights(tmp_path / "ours", "tied")
    assert same(loaded(path), path)


# --- the script of the documentation ---


@pytest.fixture(scope="module")
def page(tmp_path_factory, runs):
    """A folder with the script and with the checkpoint that it opens."""
    folder = tmp_path_factory.mktemp("page")
    found = (block for block in blocks(ROOT / "docs/weights.md") if block.language == "python")
    [script] = [block for block in found if "file" in block.marks]
    (folder / script.marks["file"]).write_text(script.text)
    shutil.copytree(runs / "AdamW, nothing even", folder / "outputs/source")
    return folder


PYTHON = os.environ.get("READER_PYTHON", sys.executable)
"""What runs the script: a Python that has another torch, say."""
ALONE = """
import os, runpy, sys
sys.modules["torchtitan"] = None  # importing it, or anything in it, fails
import torch
import torch.distributed.checkpoint, torch.distributed.tensor  # once, not on each rank
ranks = int(os.environ["WORLD_SIZE"])
rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)
os.environ["RANK"] = str(rank)
state = runpy.run_path("open_checkpoint.py")["state"]
torch.save({name: tensor.to_local() for name, tensor in state.items()}, f"{ranks}-{rank}.pt")
sys.exit(any(os.wait()[1] for _ in range(1, ranks)) if rank == 0 else 0)
"""


def run_forked(world, folder):
    """Run the script without what is imported here already, but for torch."""

    def script():
        os.environ |= world
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]
        exec(ALONE, {})

    return forked.run(script, folder).status


def run_alone(world, folder):
    return subprocess.run([PYTHON, "-c", ALONE], cwd=folder, env=os.environ | world).returncode


@pytest.mark.parametrize(
    ("ranks", "run"),
    [(1, run_forked), (2, run_forked), pytest.param(2, run_alone, marks=pytest.mark.slow)],
)
def test_script_of_the_documentation_opens_it_without_torchtitan(ranks, run, page):
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    assert run(world, page) == 0
    parts = [torch.load(page / f"{ranks}-{rank}.pt") for rank in range(ranks)]
    whole = {
        name: torch.cat([part[name] for part in parts]) if tensor.ndim else tensor
        for name, tensor in parts[0].items()
    }
    assert same(whole, page / "outputs/source/checkpoint/step-2")


# --- what is kept ---


def test_a_file_has_one_piece_of_a_tensor(tmp_path):
    """Its name in the file is that of the tensor, so a second one would replace the first."""
    halves = [(Piece("a", torch.float32, (4,), (at,), (2,)), torch.zeros(2)) for at in (0, 2)]
    with pytest.raises(AssertionError, match="one piece of each tensor"):
        write_file(tmp_path / "a.safetensors", halves)

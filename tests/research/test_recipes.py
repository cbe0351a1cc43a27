"""The recipe of each system that is there is right, says nothing twice, and trains."""

import math
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.recipes.test_recipes import repeated
from tests.training.test_global_batch import assert_fits
from torchtitan import research
from torchtitan.checks import load_job
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.tools.cli import main
from torchtitan.tools.verify.measure import training

FOLDER = Path(__file__).parents[2] / "train_configs/research"
RANKS = {
    "auxiliary_tasks": 1,
    "demo": 2,
    "diloco": 2,
    "galore": 1,
    "hadamard_attention": 1,
    "loco": 2,
    "low_bit": 1,
    "qk_clip": 1,
    "qsdp": 2,
    "ranger21": 1,
    "rtp": 2,
    "simple_fsdp": 2,
}
"""The ranks that each is run on here."""
FULL_SIZE = {"galore_7b"}
"""Recipes that are too large to be run here; tests/research/test_galore.py plans it."""
SYSTEMS = [name for name in RANKS if (Path(research.__file__).parent / name).is_dir()]
SMALL = [
    *("--training.steps=3", "--training.seq_len=32", "--training.local_batch_size=2"),
    "--training.global_batch_size=-1",
    *("--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq=1"),
    *("--data.report_unigram_loss=false", "--job.dump_folder=unused"),
    "--metrics.save_events=false",
    *("--model.n_layers=2", "--model.dim=64", "--model.n_heads=4", "--model.n_kv_heads=2"),
    *("--model.ffn_dim=192", "--lr_scheduler.warmup_steps=2"),
]


def test_every_system_has_a_recipe() -> None:
    # What is about images is in test_vit_mae_recipes.py.
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*RANKS, *FULL_SIZE, "vit_mae"}


@pytest.mark.parametrize("name", [*SYSTEMS, *FULL_SIZE])
def test_nothing_is_said_twice(name: str) -> None:
    assert list(repeated(FOLDER / f"{name}.toml")) == []


ELSEWHERE = {
    "auxiliary_losses_debug": "auxiliary_tasks",
    "low_precision_attention_debug": "hadamard_attention",
}
"""Recipes of systems that have stood with those of the main road, and the system of each."""


@pytest.mark.parametrize("name", [n for n, system in ELSEWHERE.items() if system in SYSTEMS])
def test_a_recipe_of_before_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER.parent / f"{name}.toml"
    assert main(["check", str(path), "--world-size", "1"]) == 0
    assert capsys.readouterr().out.startswith("valid on 1 rank")
    assert list(repeated(path)) == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_fits_up_to_eight_ranks(name: str) -> None:
    assert_fits(FOLDER / f"{name}.toml", [ranks for ranks in (1, 2, 4, 8) if ranks >= RANKS[name]])


def losses(job: JobConfig) -> list[float]:
    return [row["loss"] for _, row in training(job, Device("cpu"), uneven=False)]


@pytest.mark.parametrize(
    "name",
    [
        # Inductor compiles the whole model, or the updates.
        pytest.param(name, marks=pytest.mark.slow) if name in ("simple_fsdp", "low_bit") else name
        for name in SYSTEMS
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_it_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From about the loss of guessing evenly among all 2,048 tokens."""
    monkeypatch.chdir(tmp_path)
    recipe = load_job(FOLDER / f"{name}.toml", SMALL, RANKS[name], "cpu")
    for found in run_ranks(losses, RANKS[name], recipe.config):
        assert len(found) == 3
        assert found[0] == pytest.approx(math.log(2048), rel=0.05)
        assert found[-1] < found[0]

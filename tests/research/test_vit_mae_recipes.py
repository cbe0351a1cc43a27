"""The recipes and studies of ViT-MAE are right, say nothing twice, and train."""

import pytest
from PIL import Image

from tests.compare.test_study import assert_can_run
from tests.ranks import run_ranks
from tests.recipes import test_recipes
from tests.recipes.test_recipes import FOLDER, assert_comment_says_what_it_needs, repeated
from tests.runs import rows, train
from tests.tiers import tiers
from tests.training.test_global_batch import assert_fits
from torchtitan.checks import load_job

RANKS = {"15b": 64, "1b": 8, "3b": 8, "5b": 16, "base": 8, "debug": 1, "huge": 8}
RANKS = {f"vit_mae_{size}": ranks for size, ranks in RANKS.items()}
RECIPES = sorted(FOLDER.glob("vit_mae*.toml"))
OWN = FOLDER / "research/vit_mae.toml"
LARGE = [path for path in RECIPES if "debug" not in path.stem]


def test_all_are_here():
    assert [path.stem for path in RECIPES] == list(RANKS)


@pytest.fixture
def images(tmp_path):
    """One image in the place of those that a user has to bring."""
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    return ["--data.dataset_path", str(tmp_path)]


@pytest.fixture
def checked(images, says):
    def check(path, *words):
        words += tuple(images) if path in LARGE else ()
        test_recipes.checked(says, path, RANKS.get(path.stem, 1), *words, model="vit_mae")

    return check


def test_recipes_are_valid_on_the_ranks_they_are_meant_for(checked):
    for path in (*RECIPES, OWN):
        checked(path)


@pytest.mark.parametrize("path", tiers([OWN, *LARGE], [OWN], LARGE), ids=lambda path: path.stem)
def test_a_valid_recipe_is_planned(path, checked):
    checked(path, "--plan")


def test_settings(images):
    """Table 8 of arXiv:2111.06377, which names no limit of the gradient norm."""
    for path in LARGE:
        job = load_job(path, images, RANKS[path.stem], "cuda").config
        batch = job.global_batch(job.degrees(RANKS[path.stem]))
        assert (batch, job.optimizer.lr) == (4096, pytest.approx(1.5e-4 * batch / 256)), path
        options = job.optimizer.options()
        assert (options["betas"], options["weight_decay"]) == ((0.9, 0.95), 0.05), path
        assert job.training.max_norm == 0, path


def test_comments_say_what_a_recipe_needs():
    for path in LARGE:
        assert_comment_says_what_it_needs(path, RANKS[path.stem])


def test_nothing_is_said_twice():
    paths = [*RECIPES, OWN, FOLDER / "base/vit_mae.toml"]
    assert [said for path in paths for said in repeated(path)] == []


@pytest.mark.parametrize("name", ["vit_mae_3b", "vit_mae_debug"])
def test_studies_can_run_where_they_are_meant_to(name, images):
    assert_can_run(FOLDER / f"studies/{name}.toml", images, [])


def test_recipes_of_a_laptop_fit_up_to_eight_ranks():
    for path in (FOLDER / "vit_mae_debug.toml", OWN):
        assert_fits(path, [1, 2, 4, 8])


def test_it_trains(tmp_path):
    """From about 1, the loss of the mean of each patch."""
    small = ["--training.steps=4", "--training.global_batch_size=16", "--validation.steps=1"]
    flags = [*small, "--validation.freq=4", f"--job.dump_folder={tmp_path}", "--metrics.log_freq=1"]
    run_ranks(train, 1, load_job(OWN, flags, 1, "cpu").config)
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 2.5
    assert (tmp_path / "pictures/step-000004.png").exists()

"""`[data.images]` is known to every recipe, and imported by those that read images."""

import subprocess
import sys

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import train
from tests.test_docs import ROOT
from torchtitan.build import resume_policy
from torchtitan.checks import load_job
from torchtitan.job import JobConfig
from torchtitan.provenance import to_toml
from torchtitan.research.vit_mae.images.settings import ImagesConfig

TEXT = ROOT / "train_configs/debug_model.toml"
IMAGES = ROOT / "train_configs/vit_mae_debug.toml"


def job(recipe, *flags):
    return load_job(recipe, flags, None, "cpu").config


def images(of):
    return of.data.images


@pytest.mark.gate
def test_a_recipe_of_text_imports_nothing_of_images():
    code = (
        "import sys\nfrom torchtitan.checks import load_job\n"
        f"load_job({str(TEXT)!r}, ['--data.dataset=synthetic'], None, 'cpu').config.flat()\n"
        "print(*(name for name in sys.modules if 'vit_mae' in name))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_recipe_and_flags_set_it():
    assert not images(job(IMAGES)).augment, "as the recipe says"
    assert images(job(IMAGES, "--data.images.augment")).augment
    changed = images(job(IMAGES, "--data.images.bands", "1", "--data.images.crop=window"))
    assert (changed.bands, changed.crop) == ((1,), "window")
    flat = job(IMAGES).flat()
    assert [key for key in flat if key.startswith("data.images.")] == [
        f"data.images.{key}" for key in ImagesConfig.model_fields
    ]


def test_what_a_run_of_text_recorded_before_loads(tmp_path):
    """It recorded the keys of every section, those of images among them."""
    recorded = tmp_path / "recipe.toml"
    toml = to_toml(job(TEXT, "--no-data.images.augment"))
    assert "[data.images]\ncrop = " in toml
    recorded.write_text(toml)
    assert not images(job(recorded)).augment
    assert job(recorded).data.dataset == job(TEXT).data.dataset


def test_a_run_of_text_from_before_resumes_without_a_notice(tmp_path, monkeypatch):
    """Its checkpoint records keys of `[data.images]`, which had no effect."""
    small = tiny.job(tmp_path, training={"steps": 2}, checkpoint={"enable": True, "interval": 1})
    flat, section = JobConfig.in_effect, ImagesConfig().model_dump(mode="json")
    before = {f"data.images.{key}": value for key, value in section.items()}
    with monkeypatch.context() as patched:
        patched.setattr(JobConfig, "in_effect", lambda job: flat(job) | before)
        run_ranks(train, 1, small)
    longer = small.model_copy(
        update={"training": small.training.model_copy(update={"steps": 3, "max_norm": 2.0})}
    )
    told = resume_policy(longer).start().changes
    assert [line.partition(":")[0] for line in told] == ["training.max_norm", "training.steps"]


def test_sections_without_effect_are_in_no_comparison():
    assert job(TEXT, "--no-data.images.augment").flat() == job(TEXT).flat()

"""Recipes that come with the package are found by name in any folder."""

import os
from pathlib import Path

import pytest

from torchtitan.checks import load_job
from torchtitan.config import RecipeError, find_recipe, packaged_folder, packaged_recipes
from torchtitan.parallel import ParallelismConfig
from torchtitan.tools.cli import main
from torchtitan.tools.recipes import least_ranks

pytestmark = pytest.mark.usefixtures("in_empty_folder")
FOLDER = Path(__file__).parents[2] / "train_configs"


def test_all_files_of_the_clone_are_packaged():
    assert packaged_folder() == FOLDER
    assert sorted(packaged_recipes().values()) == sorted(FOLDER.rglob("*.toml"))


def test_a_recipe_is_found_by_name():
    path = FOLDER / "debug_model.toml"
    expected = load_job(path, [], 1, "cpu").config
    for name in ("debug_model", "debug_model.toml", "train_configs/debug_model.toml"):
        assert find_recipe(name) == path
        found = load_job(name, [], 1, "cpu")
        assert found.config == expected
        assert found.notices[0] == f"{name}: the packaged recipe {path}"


def test_a_file_wins_over_a_packaged_recipe_and_a_folder_does_not():
    Path("debug_model.toml").write_text("[training]\nsteps = 3\n", encoding="utf-8")
    found = load_job("debug_model.toml", [], 1, "cpu")
    assert found.config.training.steps == 3
    assert not [line for line in found.notices if "packaged" in line]
    Path("debug_model").mkdir()
    assert find_recipe("debug_model") == FOLDER / "debug_model.toml"


def test_only_recipes_are_found():
    for name in ("../pyproject.toml", "/etc/passwd", "", ".", "a\0b"):
        assert find_recipe(name) == Path(name)


def test_a_packaged_recipe_can_be_extended():
    Path("base.toml").write_text("[training]\nsteps = 3\n", encoding="utf-8")
    for parent, steps in (("debug_model.toml", 100), ("base.toml", 3)):
        Path("mine.toml").write_text(f'extends = "{parent}"\n', encoding="utf-8")
        assert load_job("mine.toml", [], 1, "cpu").config.training.steps == steps


def test_a_recipe_that_is_not_there():
    for name, hint in [
        ("debug_modle", "did you mean debug_model?"),
        ("train_configs/lama3_8b.toml", "did you mean llama3_8b?"),
        ("configs/mine.toml", "there is no folder configs"),
        ("mine.toml", "see `torchtitan recipes` for those of the package"),
    ]:
        with pytest.raises(RecipeError) as error:
            load_job(name, [], 1, "cpu")
        assert error.value.lines == [f"{name}: there is no such recipe; {hint}"]


@pytest.mark.slow
def test_a_packaged_study_is_compared(capsys):
    assert main(["compare", "studies/layouts_debug.toml", "--check"]) == 0
    assert "in outputs/studies/layouts_debug" in capsys.readouterr().out


def test_list(says):
    head, *lines = says("recipes").splitlines()
    assert head.split() == ["recipe", "or", "study", "model", "ranks"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[:-2]}
    assert rows.keys() == {name for name in packaged_recipes() if not name.startswith("base/")}
    assert rows["llama3_8b"] == "llama3 8B 8 Llama 3.1 8B on 8 GPUs of 80 GB"
    assert rows["research/demo"].startswith("llama3 debugmodel 2+ Two replicas that")
    assert rows["studies/fsdp_debug"].startswith("4 Every strategy of PyTorch FSDP")
    assert not [line for line in lines if line.endswith(" ") or "#" in line or len(line) > 200]
    are_studies = [name.startswith("studies/") for name in rows]
    assert are_studies == sorted(are_studies)


@pytest.mark.costs("every recipe of the package, twice")
def test_a_copy_is_the_same_recipe(tmp_path, monkeypatch, says):
    for name in packaged_recipes():
        folder = tmp_path / name.replace("/", " ")
        folder.mkdir()
        monkeypatch.chdir(folder)
        copied = says("recipes", "copy", name, "mine").splitlines()
        assert copied[0] == f"mine/{name}.toml"
        for file in copied:
            assert Path(file).read_bytes() == (FOLDER / Path(file).relative_to("mine")).read_bytes()
        assert {str(path) for path in Path("mine").rglob("*.toml")} == set(copied)
        if not name.startswith("studies/"):
            before, after = (read(path) for path in (FOLDER / f"{name}.toml", Path(copied[0])))
            assert before == after, name


def read(path):
    sources = [f"data.sources.{number}.path" for number in range(7)]
    exempt = ["model.tokenizer_path", "data.dataset_path", *sources]
    return load_job(path, [], None, "cuda", exempt=exempt).config


def test_a_copy_has_the_name_of_a_file():
    assert main(["recipes", "copy", "llama3_8b", "mine/first.toml"]) == 0
    files = {str(path) for path in Path().rglob("*.toml")}
    assert files == {"mine/first.toml", "mine/base/llama3.toml"}


def test_a_file_cannot_extend_one_outside_its_folder(says):
    assert "copy to a folder" in says("recipes", "copy", "research/loco", "mine.toml", status=2)
    assert os.listdir() == []


def test_nothing_is_overwritten(says):
    assert main(["recipes", "copy", "llama3_8b"]) == 0
    assert main(["recipes", "copy", "llama3_70b"]) == 0, "which extends the same"
    Path("base/llama3.toml").write_text("mine", encoding="utf-8")
    Path("llama3_8b.toml").unlink()
    assert "base/llama3.toml exists" in says("recipes", "copy", "llama3_8b", status=2)
    assert Path("base/llama3.toml").read_text(encoding="utf-8") == "mine"
    assert not Path("llama3_8b.toml").exists()


@pytest.mark.parametrize(
    "degrees",
    [
        {"expert_parallel": 8, "context_parallel": 2},
        {"data_parallel_shard": 4, "tensor_parallel": 2, "expert_parallel": 4},
        {"pipeline_parallel": 2, "data_parallel_replicate": 3},
    ],
)
def test_the_list_has_the_ranks_that_a_recipe_needs(degrees):
    keys = {f"{kind}_degree": degree for kind, degree in degrees.items()}
    found = least_ranks({f"parallelism.{key}": degree for key, degree in keys.items()})
    assert found == ParallelismConfig.model_validate(keys).least_ranks

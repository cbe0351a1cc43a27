"""The recipes of this repository are right, say what they differ in, and nothing twice."""

import json
import re
import runpy
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
import tokenizers
import torch

from tests.plan import recorded
from tests.tables import table
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.config.files import read_recipe
from torchtitan.config.schema import places
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import count_parameters
from torchtitan.plan.messages import messages_of
from torchtitan.provenance import to_toml

FOLDER = Path(__file__).parents[2] / "train_configs"
SYSTEMS = ("vit_mae", "auxiliary_losses", "low_precision_attention")
"""Recipes of research/ whose tests are in tests/research/."""


def main_road(pattern):
    """Recipes or studies that need nothing of research/."""
    return sorted(path for path in FOLDER.glob(pattern) if not path.stem.startswith(SYSTEMS))


RECIPES = main_road("*.toml")
BASES = main_road("base/*.toml")
LARGE = [path for path in RECIPES if "debug" not in path.stem]
RANKS = {name: int(ranks) for name, ranks in table(__file__, "ranks.txt")}
FLAVORS = {name: name.removesuffix("_long").rpartition("_")[2].upper() for name in RANKS}
RATES = {"llama3_70b": 1.5e-4, "llama3_405b": 8e-5, "qwen3_32b": 1.5e-4}  # others: 3e-4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small tokenizer in the place of the one that a user has to bring."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "word": 2}, unk_token="word")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"}), encoding="utf-8"
    )
    return str(path.parent)


def is_read_again(path, flags, folder):
    """Whether what a run records of its recipe, every key that has a value, is the same."""
    job, recorded = load_job(path, flags, 1, "cpu").config, folder / "recipe.toml"
    recorded.write_text(to_toml(job))
    return load_job(recorded, (), 1, "cpu").config.flat() == job.flat()


@pytest.mark.parametrize("key", ["decay_ratio=none", "decay_from=60"])
def test_what_a_run_records_is_read_again(key, tmp_path):
    flags = ["--lr_scheduler.name=power_law", f"--lr_scheduler.{key}"]
    assert is_read_again(FOLDER / "debug_model.toml", flags, tmp_path)


def test_toml_can_hold_every_value():
    """It has no none, so a key may be none only by default."""
    for place in places(JobConfig):
        for key, info in place.settings.model_fields.items():
            if NoneType in get_args(info.annotation) and info.default is not None:
                named = {"name": place.choice} if place.choice else {}
                found = place.settings.model_validate({**named, key: None})
                assert getattr(found, key) is not None, (place.path, key)


def test_all_are_here():
    assert [path.stem for path in RECIPES] == list(RANKS)


PLANNED = [path for path in RECIPES if path.stem == "llama3_8b" or "debug" in path.stem]
"""The plans of the others wait for a release, and for tests/plan/test_shipped_recipes.py."""


@pytest.mark.costs("the shapes of every network")
def test_recipes_are_valid_on_the_ranks_they_are_meant_for(tokenizer, says):
    for path in RECIPES:
        checked(says, path, RANKS[path.stem], "--model.tokenizer_path", tokenizer)


@pytest.mark.parametrize(
    "path", tiers(RECIPES, PLANNED[1:2], gate=PLANNED), ids=lambda path: path.stem
)
def test_a_valid_recipe_is_planned(path, tokenizer, says):
    checked(says, path, RANKS[path.stem], "--model.tokenizer_path", tokenizer, "--plan")


def checked(says, path, ranks, *words, model=r"\w+"):
    """Look at what is said of a recipe on its ranks."""
    told = says("check", path, "--world-size", ranks, *words)
    assert told.startswith(f"valid on {ranks} rank"), path
    pattern = rf"{model} .*: [\d,]+ parameters( \([\d,]+ used by a token\))?, "
    assert re.search(pattern, told), path
    assert "--plan" not in words or re.search(r"^planned memory of .* GiB allocated", told, re.M)


def test_settings(tokenizer):
    for path in LARGE:
        ranks = RANKS[path.stem]
        job = load_job(path, ["--model.tokenizer_path", tokenizer], ranks, "cuda").config
        assert job.model.name == path.stem.split("_")[0]
        assert job.model.flavor.upper() == FLAVORS[path.stem]
        assert job.optimizer.lr == RATES.get(path.stem, 3e-4)
        assert job.lr_scheduler.warmup_steps == min(8000, job.training.steps // 50)
        assert job.data.dataset == "c4"
        assert job.job.dump_folder == f"outputs/{path.stem}"
        assert job.global_batch(job.degrees(ranks)) * job.training.seq_len == 2**23
        assert job.training.mixed_precision_param == "bfloat16"
        assert job.checkpoint.enable
        assert job.activation_checkpoint.mode != "none"


def test_comments_say_what_a_recipe_needs():
    for path in LARGE:
        assert_comment_says_what_it_needs(path, RANKS[path.stem])


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in LARGE if "# $ torchtitan plan" in path.read_text(encoding="utf-8")],
    ids=lambda path: path.stem,
)
def test_plans_in_comments_are_what_the_command_prints(path, monkeypatch):
    script = runpy.run_path(str(FOLDER.parent / "scripts/write_answers.py"))
    monkeypatch.chdir(FOLDER.parent)
    text = path.read_text(encoding="utf-8")
    assert text == script["planned"](text), "run python scripts/write_answers.py"


def assert_comment_says_what_it_needs(path, ranks):
    comment = path.read_text(encoding="utf-8").split("\nextends")[0].replace("\n# ", " ")
    said = re.search(r"on (\d+) GPUs .* = (\d+(?:\.\d)?) GB per GPU", comment)
    assert said
    name, _, size = path.stem.removesuffix("_long").rpartition("_")
    spec = MODELS[name]
    flavor = next(flavor for flavor in spec.flavors if flavor.lower() == size)
    with torch.device("meta"):
        model = spec.build(spec.flavors[flavor], 8)
    gigabytes = 16 * count_parameters(model).total / ranks / 1e9
    assert int(said[1]) == ranks
    assert float(said[2]) == pytest.approx(gigabytes, rel=0.03, abs=0.05)


def test_nothing_is_said_twice():
    assert [said for path in RECIPES + BASES for said in repeated(path)] == []


def repeated(path):
    """The keys of a recipe that have the value they would have without it."""
    problems = []
    *above, own = read_recipe(path, problems)
    assert not problems
    inherited = JobConfig().flat()
    for recipe in above:
        inherited |= {".".join(key): setting.value for key, setting in recipe.items()}
    for key, setting in own.items():
        if setting.value != {} and inherited.get(".".join(key)) == setting.value:
            yield f"{setting.origin}: {'.'.join(key)}"


def test_tokenizer_is_asked_for(says):
    line, fix = says("check", FOLDER / "llama3_8b.toml", status=2).splitlines()
    assert line.startswith(f"error: {FOLDER}/base/llama3.toml:8: model.tokenizer_path: got ")
    assert "hf download meta-llama/Llama-3.1-8B tokenizer.json" in fix


@pytest.mark.gate
def test_a_step_has_as_many_collectives_as_debugging_says():
    words, ranks = ["--model.tokenizer_path=none", "--compile.enable=false"], RANKS["llama3_8b"]
    job = load_job(FOLDER / "llama3_8b.toml", words, ranks, "cpu").config
    collectives = messages_of(recorded.step(job, ranks)).total()
    page = (FOLDER.parent / "docs/debugging.md").read_text(encoding="utf-8")
    assert f"a step of `llama3_8b.toml` has about {round(collectives, -3):,}." in page

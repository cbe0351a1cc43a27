"""Sources of settings: which wins, how flags are read, what is inherited."""

import json
import sys
from pathlib import Path

import pytest

from tests.tables import table
from torchtitan.checks import load_job
from torchtitan.config import Problem, RecipeError
from torchtitan.convert import MXFP8, Float8
from torchtitan.job import JobConfig
from torchtitan.optim import OPTIMIZERS
from torchtitan.provenance import to_toml

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def write(name, text):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def read(recipe=None, flags="", world=None):
    return load_job(recipe, flags.split(), world, "cpu")


def value(key, flags):
    return read(flags=flags).config.flat()[key]


def test_nothing_gives_the_defaults():
    assert read().config == JobConfig()
    assert read(write("empty.toml", "")).config == JobConfig()


def test_precedence():
    write("base/far.toml", "[training]\nsteps = 1\nseq_len = 1\ngc_freq = 1\nmax_norm = 1\n")
    write("base/near.toml", 'extends = "far.toml"\n[training]\nsteps = 2\nseq_len = 2\ngc_freq=2\n')
    mine = write("mine.toml", 'extends = "base/near.toml"\n[training]\nsteps = 3\nseq_len = 3\n')
    training = read(mine, "--training.steps 5 --training.steps 4").config.training
    assert (training.steps, training.seq_len, training.gc_freq, training.max_norm) == (4, 3, 2, 1.0)
    assert training.local_batch_size == JobConfig().training.local_batch_size


def test_origins():
    write("base.toml", "[training]\nseq_len = 16\n")
    mine = write("mine.toml", 'extends = "base.toml"\n\n[training]\nsteps = 3\n')
    assert read(mine, "--debug.seed 1").origins == {
        ("training", "seq_len"): "base.toml:2",
        ("training", "steps"): "mine.toml:4",
        ("debug", "seed"): "--debug.seed",
    }


@pytest.mark.parametrize(
    "flag",
    ["--compile.enable", "--compile.enable=true", "--compile.enable true", "--compile.enable True"],
)
def test_switch_on(flag):
    assert value("compile.enable", flag) is True


@pytest.mark.parametrize(
    "flag",
    ["--no-data.shuffle", "--data.no-shuffle", "--data.shuffle=false", "--data.shuffle False"],
)
def test_switch_off(flag):
    recipe = write("on.toml", "[data]\nshuffle = true\n")
    assert read(recipe, flag).config.data.shuffle is False


# Switched on alone, these are refused for what they need.
NOT_ALONE = {
    "debug.deterministic_warn_only",
    "fault_tolerance.enable",
    "optimizer.early_step_in_backward",
    "profiling.enable_memory_snapshot",
    "parallelism.enable_async_tensor_parallel",
}


def test_every_boolean_switches_both_ways():
    switches = [key for key, default in JobConfig().flat().items() if isinstance(default, bool)]
    assert len(switches) > 20
    for key in switches:
        section, _, name = key.rpartition(".")
        assert value(key, f"--no-{key}") is False
        assert value(key, f"--{section}.no-{name.replace('_', '-')}") is False
        if key in NOT_ALONE:
            needs = f"^(--{key}: got true; |defaults: (training|{section})\\.)"
            with pytest.raises(RecipeError, match=needs):
                value(key, f"--{key}")
        else:
            assert value(key, f"--{key}") is True


@pytest.mark.parametrize(("flags", "key", "expected"), table(__file__, "flags.txt"))
def test_flags(flags, key, expected):
    assert value(key, flags) == json.loads(expected)


def test_numbers_of_toml():
    recipe = write("r.toml", "[optimizer]\nlr = 1\n[training]\nmax_norm = 2\nsteps = 1_000\n")
    config = read(recipe).config
    lr, trained = config.optimizer.lr, config.training
    assert (lr, trained.max_norm, trained.steps) == (1.0, 2.0, 1000)
    assert isinstance(config.training.max_norm, float)


def test_changing_the_optimizer_leaves_out_what_it_does_not_have():
    write("base.toml", "[optimizer]\nlr = 0.5\nbeta1 = 0.8\neps = 1e-9\n")
    mine = write("mine.toml", 'extends = "base.toml"\n[optimizer]\nname = "SGD"\nmomentum = 0.9\n')
    recipe = read(mine)
    assert recipe.config.optimizer == OPTIMIZERS["SGD"](lr=0.5, momentum=0.9)
    assert recipe.notices == [
        "mine.toml:3: optimizer.name: SGD has no beta1; 0.8 of base.toml:3 is left out",
        "mine.toml:3: optimizer.name: SGD has no eps; 1e-09 of base.toml:4 is left out",
    ]


def test_changing_the_optimizer_by_a_flag():
    recipe = read(write("r.toml", "[optimizer]\nbeta1 = 0.8\n"), "--optimizer.name Adam")
    assert recipe.config.optimizer == OPTIMIZERS["Adam"](beta1=0.8)
    assert recipe.notices == []


def test_changing_the_optimizer_does_not_hide_a_mistake():
    write("base.toml", "[optimizer]\nbta1 = 0.8\n")
    mine = write("mine.toml", 'extends = "base.toml"\n[optimizer]\nname = "SGD"\n')
    with pytest.raises(RecipeError, match=r"^base.toml:2: optimizer.bta1: unknown key of SGD"):
        read(mine)


FLOAT8 = "[[convert]]\nname = 'float8'\nrecipe = 'rowwise'\nfilter_fqns = ['attention']\n"
MXFP8_OF_THE_REST = "[[convert]]\nname = 'mxfp8'\nfilter_fqns = ['feed_forward', 'output']\n"


def test_a_list_of_sections_keeps_its_order():
    recipe = read(write("r.toml", FLOAT8 + MXFP8_OF_THE_REST))
    rest = MXFP8(filter_fqns=("feed_forward", "output"))
    assert recipe.config.convert == (Float8(recipe="rowwise", filter_fqns=("attention",)), rest)
    assert {key: value for key, value in recipe.origins.items() if key[1] == "1"} == {
        ("convert", "1"): "r.toml:5",
        ("convert", "1", "name"): "r.toml:6",
        ("convert", "1", "filter_fqns"): "r.toml:7",
    }
    flat = recipe.config.flat()
    assert (flat["convert.0.recipe"], flat["convert.1.name"]) == ("rowwise", "mxfp8")
    assert flat["convert.0.filter_fqns"] == ["attention"]
    inline = (
        "convert = [{name = 'float8', recipe = 'rowwise', filter_fqns = ['attention']}, "
        "{name = 'mxfp8', filter_fqns = ['feed_forward', 'output']}]"
    )
    assert read(write("inline.toml", inline)).config == recipe.config
    assert read(write("again.toml", to_toml(recipe.config))).config == recipe.config
    assert read(write("none.toml", to_toml(JobConfig()))).config == JobConfig()


def test_a_list_of_sections_replaces_the_one_it_inherits():
    write("base.toml", FLOAT8 + MXFP8_OF_THE_REST)
    assert len(read(write("a.toml", 'extends = "base.toml"\n')).config.convert) == 2
    own = 'extends = "base.toml"\n[[convert]]\nname = "float8"\n'
    assert read(write("a.toml", own)).config.convert == (Float8(),)
    assert read(write("a.toml", 'extends = "base.toml"\nconvert = []\n')).config.convert == ()


def test_flags_change_sections_of_a_list_and_add_to_it():
    recipe = write("r.toml", FLOAT8)
    flags = "--convert.0.recipe=tensorwise --convert.0.filter_fqns wo,feed --no-convert.0.emulate"
    flags += " --convert.1.name mxfp8 --convert.1.emulate --convert.1.filter_fqns wq wk wv output"
    assert read(recipe, flags).config.convert == (
        Float8(filter_fqns=("wo", "feed")),
        MXFP8(emulate=True, filter_fqns=("wq", "wk", "wv", "output")),
    )
    assert read(flags="--convert.0.name float8").config.convert == (Float8(),)
    other = read(recipe, "--convert.0.name mxfp8")
    assert other.config.convert == (MXFP8(filter_fqns=("attention",)),)
    assert other.notices == [
        '--convert.0.name: mxfp8 has no recipe; "rowwise" of r.toml:3 is left out'
    ]


def test_a_problem_may_be_in_a_list_of_sections():
    recipe = read(write("r.toml", FLOAT8))
    paths = ["convert.0.recipe", "convert.0.emulate", "convert"]
    assert [recipe.line(Problem(path, "no")) for path in paths] == [
        'r.toml:3: convert.0.recipe: got "rowwise"; no',
        "r.toml:1: convert.0.emulate: got false; no",
        'r.toml: convert: got ["float8"]; no',
    ]


def test_imports_may_add_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(
        "my_optimizers.py",
        "from typing import Literal\n"
        "from pydantic import Field\n"
        "from torchtitan.optim import OPTIMIZERS, OptimizerConfig\n"
        "class Mine(OptimizerConfig):\n"
        "    name: Literal['Mine'] = Field('Mine', description='.')\n"
        "    warmth: int = Field(1, description='.')\n"
        "    def build(self, groups): ...\n"
        "OPTIMIZERS['Mine'] = Mine\n",
    )
    flags = "--optimizer.name Mine --optimizer.warmth 7"
    recipe = write("mine.toml", '[job]\nimports = ["my_optimizers"]\n')
    by_flag = f"--job.imports my_optimizers {flags}"
    for source, words in ((recipe, flags), (None, by_flag)):
        OPTIMIZERS.pop("Mine", None)
        sys.modules.pop("my_optimizers", None)
        loaded = read(source, words)
        assert loaded.config.optimizer.name == "Mine"
        assert loaded.config.flat()["optimizer.warmth"] == 7


def test_a_mistake_in_a_section_holds_back_what_rests_on_the_section():
    recipe = write("r.toml", '[data]\nlanes = "12"\nnum_workers = 3\n')
    with pytest.raises(RecipeError) as error:
        read(recipe)
    assert error.value.lines == ['r.toml:2: data.lanes: got "12"; wanted an integer >= -1']


def test_recipes_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        read().config.training.steps = 3

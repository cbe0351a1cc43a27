"""Sizes of a model in a recipe: over those of the flavor, and in effect wherever one looks."""

import dataclasses
import itertools

import pytest

from tests import tiny
from torchtitan.config import RecipeError
from torchtitan.models import MODELS, spec_in_recipe, with_sizes
from torchtitan.models.layers import RopeScaling
from torchtitan.models.llama3 import FLAVORS, Llama3Config
from torchtitan.provenance import to_toml


@pytest.mark.parametrize("flavor", FLAVORS)
def test_what_a_recipe_does_not_say_is_the_flavors(flavor):
    args = FLAVORS[flavor]
    config = Llama3Config(flavor=flavor)
    assert MODELS["llama3"].args(config) == args
    assert MODELS["llama3"].args(Llama3Config(**Llama3Config.sizes_of(args))) == args
    assert list(config.size_problems(args)) == []


def test_every_size_can_be_said():
    args = MODELS["llama3"].args(Llama3Config(flavor="8B", n_layers=4, tied=True, rope_scaling=32))
    expected = dataclasses.replace(
        FLAVORS["8B"], n_layers=4, tied=True, rope_scaling=RopeScaling(factor=32)
    )
    assert args == expected
    assert MODELS["llama3"].args(Llama3Config(flavor="8B", rope_scaling=1.0)).rope_scaling is None
    fields = {field.name for field in dataclasses.fields(args)}
    facts = {"multi_token", "auxiliary_heads"}  # of auxiliary losses; and of other families
    facts |= {"head_norms", "joint_norms", "block_norms", "qkv_bias", "query_scalar", "full_every"}
    facts |= {"local_rope_theta", "activation", "scaled_embeddings"}
    assert fields - facts <= set(Llama3Config.sizes())


def test_a_recorded_recipe_tells_the_sizes_in_effect():
    job = tiny.job(model={"n_layers": 3})
    recorded = job.in_effect()
    assert job.model_args() == dataclasses.replace(tiny.ARGS, n_layers=3)
    assert spec_in_recipe(recorded).flavors["tiny"] == job.model_args()
    assert (recorded["model.n_layers"], recorded["model.dim"]) == (3, 32)
    assert with_sizes({"model.name": "tiny", "model.flavor": "tiny"})["model.n_layers"] == 2
    assert "# in effect: dim 32, n_layers 3, n_heads 4, " in to_toml(job)


NOT_SIZES = {"max_position_embeddings", "initial_context_length", "bos_token_id", "eos_token_id"}
NOT_SIZES |= {"max_window_layers", "sliding_window_pattern"}


@pytest.mark.parametrize("family", [n for n, of in MODELS.items() if "debugmodel" in of.flavors])
def test_any_value_in_a_config_of_other_software_is_read_or_refused(family):
    spec = MODELS[family]
    read, write = spec.formats["hf"].args, spec.formats["hf"].config
    config = write(spec.flavors["debugmodel"], None)
    huge = 10**9
    for key, value in itertools.product(config, (None, huge, 10**30, -1, True, "x", [], {}, 0.5)):
        told = ""
        try:
            read(config | {key: value})
        except RecipeError as error:
            told = str(error)
        if value == huge and type(config[key]) is int and key not in NOT_SIZES:
            assert told, key

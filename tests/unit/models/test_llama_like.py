"""Published models that are Llama's network in other sizes, by their config.json."""

import dataclasses
import json

import pytest

from tests.tables import table
from tests.unit.models.families import lines, published, refuses_bad_configs
from torchtitan.checkpoint.weights.network import Network
from torchtitan.config import RecipeError
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters

SPEC = MODELS["llama3"]
HUGGING_FACE = SPEC.formats["hf"]


PUBLISHED = {
    name: (published(*bases.split(), **json.loads(sizes)), int(parameters))
    for name, bases, sizes, parameters in table(__file__, "llama_like.txt")
}
"""What matters of the configs, and the published numbers of parameters."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_and_written_back(name):
    config, parameters = PUBLISHED[name]
    args = HUGGING_FACE.args(config)
    assert count_parameters(build_empty(SPEC.build, args, 1)).total == parameters
    written = HUGGING_FACE.config(args, 2048)
    assert HUGGING_FACE.args(written) == args
    has_window = bool(config.get("sliding_window"))
    assert written["architectures"] == [("Llama", "Mistral")[has_window] + "ForCausalLM"]
    assert written.get("sliding_window") == config.get("sliding_window")
    usual = config["hidden_size"] // config["num_attention_heads"]
    assert written["head_dim"] == config.get("head_dim", usual)
    assert (args.head_dim is None) == (written["head_dim"] == usual)


def test_section_of_a_recipe_has_the_nearest_flavor_and_what_differs():
    common = {"name": "llama3", "flavor": "8B", "vocab_size": 32000}
    common |= {"rope_theta": 10000, "rope_scaling": 1.0}
    for name, more in {
        "Llama-2-7b": {"n_kv_heads": 32, "ffn_dim": 11008},
        "Mistral-7B-v0.1": {"sliding_window": 4096},
    }.items():
        section = Network(SPEC, HUGGING_FACE.args(PUBLISHED[name][0])).section()
        assert section == common | more


def test_section_of_a_recipe_selects_the_network():
    for name in (*PUBLISHED, *SPEC.flavors):
        args = SPEC.flavors.get(name) or HUGGING_FACE.args(PUBLISHED[name][0])
        section = Network(SPEC, args).section()
        assert SPEC.args(SPEC.settings.model_validate(section)) == args
        if name in SPEC.flavors and name not in SPEC.open_vocabulary:
            assert section == {"name": "llama3", "flavor": name}


def test_vocabulary_that_follows_the_tokenizer_is_written():
    """So that another tokenizer does not change the shape of the weights."""
    assert Network(SPEC, SPEC.flavors["debugmodel"]).section()["vocab_size"] == 2048


def test_defaults_of_mistral_are_those_of_transformers():
    from transformers import MistralConfig

    config = PUBLISHED["Mistral-7B-v0.1"][0]
    absent = {k: v for k, v in config.items() if k not in ("sliding_window", "num_key_value_heads")}
    args, theirs = HUGGING_FACE.args(absent), MistralConfig()
    assert (args.sliding_window, args.n_kv_heads) == (4096, 8)
    assert args.sliding_window == theirs.sliding_window
    assert args.n_kv_heads == theirs.num_key_value_heads


LLAMA_2, MISTRAL = PUBLISHED["Llama-2-7b"][0], PUBLISHED["Mistral-7B-v0.1"][0]


def test_everything_that_a_config_has_and_the_network_has_not_is_told():
    for name in ("Llama-2-7b", "Mistral-7B-v0.1"):
        refuses_bad_configs(HUGGING_FACE.args, name, PUBLISHED[name][0])


def test_keys_that_change_nothing_are_allowed():
    change = {"layer_types": ["sliding_attention"] * 32, "num_experts": 0, "head_dim": None}
    for key, value in change.items():
        assert HUGGING_FACE.args(MISTRAL | {key: value}) == HUGGING_FACE.args(MISTRAL)


def test_meta_has_no_such_sizes():
    args = dataclasses.replace(SPEC.flavors["debugmodel"], sliding_window=8, head_norms=True)
    args = dataclasses.replace(args, head_dim=32)
    assert lines(SPEC.formats["meta"].config, args, None) == [
        f"{key}; Meta's params.json has no such size; use the format hf"
        for key in ("sliding_window: got 8", "head_dim: got 32", "head_norms: got true")
    ]


def test_no_format_has_a_network_without_norms():
    args = dataclasses.replace(SPEC.flavors["debugmodel"], norm="none")
    for name, told in {"hf": "LlamaForCausalLM", "meta": "Meta's Llama"}.items():
        found = lines(SPEC.formats[name].config, args, None)
        assert found == [f'norm: got "none"; {told} has "rms"']


VALUES = [
    *(None, True, -1, 0, 2.5, "", "x", 10**400, float("nan"), [], [1], {}, {"a": 1}),
    {"rope_type": ["llama3"]},
    {"rope_type": "llama3", "factor": "x", "low_freq_factor": None}
    | {"high_freq_factor": [], "original_max_position_embeddings": {}},
]
KEYS = [*LLAMA_2, "head_dim", "sliding_window", "use_sliding_window", "max_window_layers"]
KEYS += ["layer_types", "rope_parameters", "quantization_config", "partial_rotary_factor"]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_any_value_of_any_key_is_read_or_refused(family):
    """And nothing else is raised."""
    read = MODELS[family].formats["hf"].args
    refusals = 0
    for base in (LLAMA_2, MISTRAL, LLAMA_2 | {"use_sliding_window": True}):
        for key in KEYS:
            for value in VALUES:
                try:
                    read(base | {key: value})
                except RecipeError:
                    refusals += 1
    assert refusals > 300

"""What Llama 3's spec says of other formats, against what others say of it."""

import dataclasses

import pytest
import torch
from llama_models.sku_list import all_registered_models

from tests.unit.models.families import lines, published, refuses_bad_configs
from torchtitan.models import MODELS
from torchtitan.models.layers import RopeScaling

SPEC = MODELS["llama3"]
HUGGING_FACE, META = SPEC.formats["hf"], SPEC.formats["meta"]

PUBLISHED = {"8B": published("llama3_8B")}
SMALL = {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
SMALL |= {"rope_scaling": PUBLISHED["8B"]["rope_scaling"] | {"factor": 32.0}}
PUBLISHED["1B"] = PUBLISHED["8B"] | SMALL | {"tie_word_embeddings": True}
SIZES = {"head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 28}
PUBLISHED["3B"] = PUBLISHED["1B"] | SIZES
"""What matters of the config.json of Llama 3.1 8B and of Llama 3.2 1B and 3B."""


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_configs_are_those_of_our_flavors(flavor):
    args = SPEC.flavors[flavor]
    assert HUGGING_FACE.args(PUBLISHED[flavor]) == args
    written = HUGGING_FACE.config(args, 131072)
    known = written.keys() & PUBLISHED[flavor].keys()
    assert {key: written[key] for key in known} == {key: PUBLISHED[flavor][key] for key in known}
    assert len(known) == len(written) - ("head_dim" not in PUBLISHED[flavor])


@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_a_flavor_is_read_back_from_its_config(flavor):
    args = SPEC.flavors[flavor]
    assert HUGGING_FACE.args(HUGGING_FACE.config(args, None)) == args
    found = META.args(META.config(args, None))
    assert found.ffn_dim == args.ffn_dim
    scaling = args.rope_scaling and RopeScaling(factor=8.0)
    assert found == dataclasses.replace(args, tied=False, rope_scaling=scaling)


@pytest.mark.parametrize("sku", ["3.1-8B", "3.1-70B", "3.1-405B:bf16-mp8", "3.2-1B", "3.2-3B"])
def test_params_of_meta_are_those_of_our_flavors(sku):
    name = f"Llama{sku}"
    params = next(m.arch_args for m in all_registered_models() if m.descriptor() == name)
    flavor = sku[4:].partition(":")[0]
    assert META.args(params) == META.args(META.config(SPEC.flavors[flavor], None))


@pytest.mark.filterwarnings("default")
def test_names_are_those_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    args = dataclasses.replace(SPEC.flavors["debugmodel"], n_layers=12)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**HUGGING_FACE.config(args, 64))).state_dict()
        ours = SPEC.build(args, 64).state_dict()
    shapes = {HUGGING_FACE.name(name): weight.shape for name, weight in ours.items()}
    assert shapes == {name: weight.shape for name, weight in theirs.items()}


@pytest.mark.parametrize("heads", [{"wq": 4}, {"wk": 2}], ids=str)
def test_rows_are_a_permutation_within_each_head(heads):
    args = dataclasses.replace(SPEC.flavors["debugmodel"], dim=32, n_heads=4, n_kv_heads=2)
    (projection, count), *_ = heads.items()
    rows = HUGGING_FACE.rows(args, f"layers.0.attention.{projection}.weight").view(count, 8)
    assert rows[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(rows, rows[0] + 8 * torch.arange(count)[:, None])
    assert HUGGING_FACE.rows(args, "layers.0.attention.wv.weight") is None


def test_a_network_of_another_kind_is_refused_in_words():
    refuses_bad_configs(HUGGING_FACE.args, "Llama-3.1-8B", PUBLISHED["8B"])


def test_params_that_are_not_ours_are_refused_in_words():
    params = META.config(SPEC.flavors["8B"], None)
    of_llama_2 = params | {"vocab_size": -1, "rope_theta": None}
    assert lines(META.args, of_llama_2) == [
        "vocab_size: got -1; wanted a number above 0",
        "rope_theta: got nothing; wanted the base of the rotary embedding",
    ]
    with_experts = params | {"moe_args": {"num_experts": 16}}
    assert lines(META.args, with_experts) == ["moe_args: not supported by llama3"]

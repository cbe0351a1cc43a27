"""Qwen2, Mistral, Mixtral, OLMo 2 and Gemma 3 against transformers', and their facts."""

import dataclasses
import json

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.tables import table
from tests.unit.models import families
from torchtitan.checkpoint.weights.network import identify
from torchtitan.config import ConfigError, RecipeError
from torchtitan.models import MODELS
from torchtitan.models.layers import Linear
from torchtitan.models.spec import initialize

SIZES = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 128}
WINDOW = {"sliding_window": 9}
TWICE = {**WINDOW, "full_every": 2, "rope_scaling": Linear(factor=4.0), "query_scalar": 20}
SWITCHED = {"gemma3": TWICE, "mistral": WINDOW, "mixtral": WINDOW}
"""Families with blocks that attend to a window."""
pytestmark = pytest.mark.filterwarnings("default")  # what transformers deprecates is its concern


def small(name, **changes):
    """A small network of a family, whose heads are of 6 elements, and of Gemma of 64."""
    own = {"expert_dim": 40} if name == "mixtral" else {}
    return dataclasses.replace(MODELS[name].flavors["debugmodel"], **SIZES | own | changes)


SWITCHES = [
    *[("qwen2", {"tied": True}), ("qwen2", {"tied": False, "head_dim": 16, **WINDOW})],
    *[("mistral", WINDOW), ("mistral", {"sliding_window": 0, "head_dim": 16, "tied": True})],
    *[("mixtral", {}), ("mixtral", {"tied": True, "top_k": 3, "head_dim": 16, **WINDOW})],
    *[("olmo2", {}), ("olmo2", {"tied": True, "head_dim": 16})],
    *[("gemma3", {}), ("gemma3", {"tied": False, **TWICE}), ("gemma3", {"sliding_window": 0})],
]


def twin(name, args, model):
    """The network of transformers with the weights of ours."""
    spec = MODELS[name]
    theirs = families.of_transformers(spec.formats["hf"].config(args, None)).float().eval()
    weights = families.to_transformers(spec, args, model.state_dict().items())
    theirs.load_state_dict(weights, strict=False)
    return theirs


# Gemma's many norms, of factors 1 + weight, keep the stream large, and so roundings.
SPREAD = {"gemma3": {"std": 0.04, "of_norms": 0.5}}


@pytest.mark.parametrize(("name", "change"), SWITCHES)
def test_logits_and_gradients_equal_those_of_transformers(name, change):
    args = small(name, **change)
    model = families.drawn(MODELS[name], args, **SPREAD.get(name, {}))
    families.equals_transformers(MODELS[name], args, model)
    written = MODELS[name].formats["hf"]
    assert written.args(written.config(args, None)) == args


class InFloat64(TorchFunctionMode):
    """All that is computed in float32 is computed in float64, tables of RoPE included."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return function(*args, **kwargs)


PARTS = {
    "qwen2": ({"qkv_bias": False},),
    "mistral": ({"sliding_window": 0},),
    "mixtral": ({"renormalize": False},),
    "olmo2": ({"joint_norms": False},),
    "gemma3": (
        *[{"activation": "silu"}, {"scaled_embeddings": False}, {"query_scalar": None}],
        *[{"local_rope_theta": None}, {"full_every": 3}, {"rope_scaling": None}, {"norm": "rms"}],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_comparison_sees_each_part(name):
    """Without any of them the logits are others."""
    args = small(name, **SWITCHED.get(name, {}))
    model, tokens = families.drawn(MODELS[name], args), torch.arange(64)[None]
    for part in PARTS[name]:
        other = MODELS[name].build(dataclasses.replace(args, **part), 64)
        other.load_state_dict(model.state_dict(), strict=False)
        assert (other(tokens) - model(tokens)).abs().max() > 1e-3, part


@pytest.mark.parametrize("name", PARTS)
def test_logits_differ_from_those_of_transformers_by_roundings_alone(name):
    """With large weights, those in float32 differ by up to 3e-5."""
    # The factor of embeddings, the root of dim, is a tensor in float32 there: here it is exact.
    args, tokens = small(name, dim=64, **SWITCHED.get(name, {})), torch.arange(64)[None]
    with InFloat64(), torch.no_grad():
        ours = families.drawn(MODELS[name], args).double()
        theirs = twin(name, args, ours)
        if name == "mixtral":
            theirs.set_experts_implementation("eager")  # the other has no float64
        expected = theirs(tokens, use_cache=False).logits
        assert expected.dtype == torch.float64
        torch.testing.assert_close(ours(tokens), expected, atol=1e-12, rtol=0)


def test_a_text_is_continued_with_blocks_of_both_kinds():
    families.continues_a_text(families.drawn(MODELS["gemma3"], small("gemma3", **TWICE)))


@pytest.mark.parametrize("name", PARTS)
def test_packed_documents_are_those_of_transformers(name):
    """To which positions that start again tell where a document does."""
    args, tokens = small(name, **SWITCHED.get(name, {})), torch.arange(64)[None]
    model = families.drawn(MODELS[name], args, **SPREAD.get(name, {}))
    documents = (torch.arange(64)[None] >= 30).long()
    positions = torch.arange(64)[None] - 30 * documents
    expected = twin(name, args, model)(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(model(tokens, positions, documents), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", PARTS)
def test_greedy_text_is_that_of_transformers(name):
    args, tokens = small(name, **SWITCHED.get(name, {})), torch.arange(5)[None]
    model = families.drawn(MODELS[name], args)
    theirs = twin(name, args, model)
    expected = theirs.generate(tokens, min_new_tokens=16, max_new_tokens=16, do_sample=False)
    with torch.no_grad():
        for _ in range(16):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, expected)


def test_factors_of_norms_start_at_1():
    spec, args = MODELS["gemma3"], small("gemma3")
    model = spec.build(args, 8)
    initialize(model.named_parameters(), lambda name: spec.init_std(args, name), seed=0)
    x = torch.randn(2, 8, args.dim, generator=torch.Generator().manual_seed(0))
    normed = model.layers["0"].ffn_out_norm(x)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(2, 8), atol=1e-4, rtol=0)
    norm, half = model.layers["0"].ffn_out_norm.bfloat16(), x.bfloat16()
    before = norm(half)
    norm.weight.data.fill_(2**-9)  # less than the precision of 1 in bfloat16
    assert not torch.equal(norm(half), before)


@pytest.mark.parametrize(
    ("name", "flavor"), [(name, flavor) for name in PARTS for flavor in families.FLAVORS[name]]
)
def test_flavors_have_the_published_sizes(name, flavor):
    _, config, written = families.has_published_sizes(name, flavor)
    shared = written.keys() & config.keys() - {"rope_scaling"}
    assert {key: written[key] for key in shared} == {key: config[key] for key in shared}


def test_every_flavor_is_compared_with_a_published_one():
    for name, published in families.FLAVORS.items():
        assert ["debugmodel", *published] == [*MODELS[name].flavors]


NAMED = {"Qwen2.5-7B": "qwen2 7B", "Mistral-7B-v0.3": "mistral 7B", "Mixtral-8x7B": "mixtral 8x7B"}
NAMED |= {"OLMo-2-7B": "olmo2 7B", "Gemma-3-4B": "gemma3 4B", "Qwen3-8B": "qwen3 8B"}
NAMED |= {"Qwen3-30B-A3B": "qwen3_moe 30B-A3B", "gpt-oss-20b": "gpt_oss 20B"}
NAMED |= {"DeepSeek-V3": "deepseek_v3 671B"}


@pytest.mark.parametrize("name", NAMED)
def test_a_network_of_another_kind_is_refused_in_words(name):
    family, flavor = NAMED[name].split()
    config, *_ = families.FLAVORS[family][flavor]
    families.refuses_bad_configs(MODELS[family].formats["hf"].args, name, config)


@pytest.mark.parametrize(("architecture", "nearest", "why"), table(__file__, "near_misses.txt"))
def test_a_near_miss_is_named(architecture, nearest, why, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=f"differs from {nearest}, the nearest: .*{why}"):
        identify(path, "hf", MODELS.values())
    for other in ("olmo2", "mistral"):  # llama3 reads folders of the latter, too
        path.write_text(json.dumps({"architectures": [f"{other.capitalize()}ForCausalLM"]}))
        with pytest.raises(ConfigError, match=rf'which model\.name = "{other}" has'):
            identify(path, "hf", [MODELS["qwen2"]])


def test_what_a_format_cannot_express_is_refused():
    for name, change, message in (
        ("olmo2", WINDOW, "sliding_window: got 9; Olmo2ForCausalLM has 0"),
        ("mixtral", {"router_bias": True}, "router_bias: got true; MixtralForCausalLM has false"),
        ("qwen3_moe", {"shared_dim": 8}, "shared_dim: got 8; Qwen3MoeForCausalLM has 0"),
        ("gpt_oss", {"router_bias": True}, "router_bias: got true; GptOssForCausalLM has false"),
        ("gpt_oss", {"renormalize": False}, "renormalize: got false; GptOssForCausalLM has true"),
        ("deepseek_v3", {"router_bias": False}, "router_bias: got false; Deepseek.* has true"),
        ("deepseek_v3", {"router_scores": "softmax"}, 'router_scores: got "softmax"; .* "sigmoid"'),
        ("deepseek_v3", {"expert_dim": 40, "shared_dim": 41}, "got 41; .* a multiple of .* 40"),
        ("deepseek_v3", WINDOW, "sliding_window: got 9; DeepseekV3ForCausalLM has 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            MODELS[name].formats["hf"].config(small(name, **change), None)


def test_windows_of_transformers_are_read():
    """In its own form, where RoPE is described for each kind of attention."""
    from transformers import Gemma3TextConfig

    for change in ({}, TWICE, {"sliding_window": 0}, {"n_layers": 12}):
        args = small("gemma3", **change, local_rope_theta=100.0)
        written = MODELS["gemma3"].formats["hf"]
        config = Gemma3TextConfig(**written.config(args, 64)).to_dict()
        config.pop("rope_local_base_freq", None)  # rope_parameters have it, too
        assert written.args(config | {"architectures": ["Gemma3ForCausalLM"]}) == args
    # A kind that is not described has the usual frequencies.
    only = {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}
    assert written.args(config | only).rope_theta == 5e5
    config = written.config(small("gemma3", n_layers=12), 64)
    del config["layer_types"]
    assert written.args(config).full_every == 6
    assert families.lines(written.args, config | {"layer_types": ["full_attention"]}) == [
        "num_hidden_layers 12 and layer_types of 1 blocks; make them equal"
    ]
    two = {"sliding_window_pattern": 6, "layer_types": ["sliding_attention", "full_attention"] * 6}
    (told,) = families.lines(written.args, config | two)
    assert told.startswith("sliding_window_pattern 6 and layer_types of every 2 are one fact")

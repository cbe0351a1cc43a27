"""Settings that carry over from a narrow model: deviations, rates and factors, and the export."""

import dataclasses
import math

import pytest
import torch

from tests import tiny  # noqa: F401  (its families)
from torchtitan.checkpoint.weights.foreign import Translated
from torchtitan.checkpoint.weights.network import Network
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.optim import OPTIMIZERS, SGD, AdamW, Muon, name_parameters
from torchtitan.optim.grouping import assign

FAMILIES = [name for name in MODELS if name.startswith("tiny")]
DEVIATIONS = {"usual": 1.0, "root": 0.5, "whole": 0.25}
"""Factors of initial deviations in a model 4 times as wide as its base."""
USUAL = ["embed", "output.", "norm", "bias", "sinks", ".b1", ".b2", ".b3", "wq_b.", "wkv_b."]
WHOLE = ["router.weight", "wq_a.", "wkv_a."]


def widened(name, ratio=4, **changes):
    """A family's network that is as much wider than its base, which has heads of 2."""
    spec = MODELS[name]
    args = dataclasses.replace(spec.flavors["wide"], base_width=64 // ratio, **changes)
    return spec, args, build_empty(spec.build, args, 16)


def kind(name):
    if any(part in name for part in USUAL):
        return "usual"
    return "whole" if any(part in name for part in WHOLE) else "root"


def named(spec, args, network):
    def growth(name):
        return spec.growth(args, name)

    return name_parameters([network], spec.role, growth=growth)


@pytest.mark.parametrize("family", FAMILIES)
def test_deviations_and_rates_are_those_of_the_paper(family):
    spec, args, network = widened(family, multi_token=1)
    plain = dataclasses.replace(args, base_width=None)
    parameters = named(spec, args, network)
    adam = {a.parameter.name: a.rule for a in assign(parameters, AdamW(lr=1.0, weight_decay=0.5))}
    for parameter in parameters:
        name, found = parameter.name, spec.initial(args, parameter.name)
        usual = spec.init_std(plain, name)
        assert found == (usual if isinstance(usual, str) else usual * DEVIATIONS[kind(name)])
        rate = 1.0 if kind(name) == "usual" else 0.25
        assert (adam[name].lr, adam[name].weight_decay) == (rate, 0.5 / rate), name


def test_rates_of_other_optimizers():
    parameters = named(*widened("tiny_latent"))
    w1, router, table, out = "feed_forward.w1", "router", "tok_emb", "output"
    latent = ("wkv_a.", "wkv_b.")
    wanted = [
        (SGD(lr=1.0), {w1: 1, router: 1 / 4, table: 4, out: 4, latent[0]: 1 / 4, latent[1]: 4}),
        # Of a matrix with more columns, its scale is that of all widths; else that of its rows.
        (Muon(lr=1.0, scale="original"), {w1: 1, router: 1 / 4, out: 1, latent[1]: 1}),
        (Muon(lr=1.0), {w1: 1 / 2, router: 1 / 4, table: 1, latent[1]: 1}),
    ]
    for optimizer, rates in wanted:
        rules = {a.parameter.name: a.rule.lr for a in assign(parameters, optimizer)}
        for part, rate in rates.items():
            found = {lr for name, lr in rules.items() if part in name and "norm" not in name}
            assert sorted(found) == pytest.approx([rate]), (optimizer, part)
    without = {name for name, it in OPTIMIZERS.items() if it().width_factor(parameters[0]) is None}
    assert without == {"Adam", "GaLore", "Ranger21"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_wide_as_its_base_is_the_plain_one(family):
    spec, args, network = widened(family, ratio=1)
    plain = dataclasses.replace(args, base_width=None)
    for parameter in named(spec, args, network):
        assert parameter.growth == (1.0, 1.0)
        assert spec.initial(args, parameter.name) == spec.init_std(plain, parameter.name)
    if spec.experts(args) is None:  # the first forward of experts takes seconds
        wide, tokens = with_weights(spec, args), torch.arange(8)[None]
        assert torch.equal(wide(tokens), with_weights(spec, plain, wide.state_dict())(tokens))


def with_weights(spec, args, state=None):
    """A network with weights of the size of 1, at which each factor of a logit is seen."""
    network = spec.build(args, 16)
    if state is None:
        weights = network.state_dict()
        torch.manual_seed(0)
        state = {n: 0.3 * torch.randn(w.shape) + ("norm" in n) for n, w in weights.items()}
    network.load_state_dict(state)
    return network


def test_logits_of_output_and_attention_shrink_with_the_width():
    spec, args, _ = widened("tiny_qwen3")  # whose heads are as wide as in the base
    plain = dataclasses.replace(args, base_width=None)
    wide = with_weights(spec, args)
    tokens = torch.arange(8)[None]
    expected = with_weights(spec, plain, wide.state_dict())(tokens) / 4
    torch.testing.assert_close(wide(tokens), expected)
    assert args.query_factor == 1
    spec, args, network = widened("tiny")
    assert args.query_factor == network.get_submodule("layers.0.attention").scale == 1 / 2
    spec, args, network = widened("tiny_gemma3")
    assert network.embedding_scale == math.sqrt(16)


class Weights:
    """Weights of a network as a checkpoint has them."""

    def __init__(self, network):
        self.found = {f"model.{name}": w for name, w in network.state_dict().items()}

    def shapes(self):
        return {name: (w.dtype, tuple(w.shape)) for name, w in self.found.items()}

    def read(self, name):
        return self.found[name]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["tiny", "tiny_qwen2", "tiny_olmo2", "tiny_gemma3"])
def test_an_export_is_a_plain_network_with_the_same_logits(family, tied):
    spec, args, _ = widened(family, tied=tied)
    wide = with_weights(spec, args)
    written = Translated(Weights(wide), Network(spec, args, "wide"), "hf")
    theirs, rows = spec.formats["hf"].name, spec.formats["hf"].rows
    state = {}
    for name in wide.state_dict():
        weight, order = written.read(theirs(name)), rows(args, name)
        state[name] = weight if order is None else weight[order]
    plain = with_weights(spec, dataclasses.replace(args, base_width=None), state)
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(plain(tokens), wide(tokens), atol=1e-5, rtol=1e-5)

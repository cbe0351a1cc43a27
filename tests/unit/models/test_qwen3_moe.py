"""Qwen3-MoE against transformers' on the same weights, and the facts of its spec."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.models import families
from torchtitan.convert import Conversion, linears
from torchtitan.convert.float8 import Float8
from torchtitan.models import MODELS
from torchtitan.models.experts import MixtureOfExperts
from torchtitan.models.sparse_decoder import SparseArgs
from torchtitan.models.spec import build_empty

SPEC = MODELS["qwen3_moe"]
SEQ_LEN = 64
SIZES = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
ROUTED = {"n_experts": 11, "top_k": 3, "expert_dim": 40}  # more than 10: experts sort as numbers
FACTS = {"head_norms": True, "vocab_size": 128, "norm_eps": 1e-6, "rope_theta": 1e6}
ARGS = SparseArgs(**SIZES, **ROUTED, **FACTS)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize(
    "change",
    [{}, {"renormalize": False, "dense_layers": 1}],
    ids=["renormalized", "not renormalized, first block dense"],
)
def test_logits_and_gradients_equal_those_of_transformers(change):
    families.equals_transformers(SPEC, dataclasses.replace(ARGS, **change))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("flavor", families.FLAVORS["qwen3_moe"])
def test_flavors_have_the_published_sizes(flavor):
    args, config, written = families.has_published_sizes("qwen3_moe", flavor)
    assert {key: config[key] for key in written} == written
    # A token's share of attention to 4,096 others; the embedding is a look-up.
    in_products = families.FLAVORS["qwen3_moe"][flavor][2] - 151_936 * args.dim
    scores = 12 * args.n_layers * args.n_heads * 128 * 4096
    assert SPEC.flops_per_unit(args, 4096) == 6 * in_products + scores


@pytest.mark.parametrize("shared_dim", [0, 24])
def test_operations_are_those_that_torch_counts(shared_dim):
    args = dataclasses.replace(ARGS, shared_dim=shared_dim)
    mixture = MixtureOfExperts(48, 11, 40, args.routing, shared_dim=shared_dim)
    with FlopCounterMode(display=False) as counter:
        mixture(torch.zeros(2, 8, 48, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 16 * 6 * args.ffn_parameters


def test_roles_are_those_that_optimizer_groups_select():
    names = [name for name, _ in build_empty(SPEC.build, ARGS, 16).named_parameters()]
    roles = {name.removeprefix("layers.2."): SPEC.role(name, 2) for name in names}
    assert roles["mixture.router.weight"] == "router"
    assert {roles[f"mixture.experts.{w}"] for w in ("w1", "w2", "w3")} == {"expert"}
    assert roles["attention.wq.weight"] == "matrix"


def test_weights_that_add_to_the_stream_start_smaller():
    stds = {name: SPEC.init_std(ARGS, f"layers.0.mixture.{name}") for name in WEIGHTS}
    assert stds == pytest.approx(
        {name: 0.02 / (6**0.5 if "w2" in name else 1) for name in WEIGHTS}, rel=1e-9
    )


WEIGHTS = ("router.weight", "experts.w1", "experts.w2", "experts.w3", "shared.w2.weight")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_a_shrunk_network_has_the_structure_of_the_large_one(flavor, tp):
    large = dataclasses.replace(SPEC.flavors[flavor], dense_layers=3, shared_dim=512)
    small = families.shrunk(SPEC, large, tp)
    assert (small.n_experts, small.top_k, small.dense_layers) == (8, 2, 1)
    assert small.expert_dim % (8 * tp) == small.shared_dim % (8 * tp) == 0
    assert small.expert_dim / small.dim < 1.5


def test_float8_says_that_experts_are_not_converted():
    model, done = build_empty(SPEC.build, ARGS, SEQ_LEN), Conversion()
    assert all("experts" not in name for name, _ in linears(model, Float8(), done))
    skipped = [name for name, why in done.skipped.items() if why == "grouped products"]
    assert skipped == [f"layers.{number}.mixture.experts" for number in range(3)]

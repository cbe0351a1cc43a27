"""DeepSeek-V3 against transformers' on the same weights, YaRN, and the facts of its spec."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny
from tests.unit.models import families
from torchtitan.models import MODELS
from torchtitan.models.experts import Router
from torchtitan.models.latent_attention import LatentArgs
from torchtitan.models.layers import Yarn, rope_frequencies

SPEC = MODELS["deepseek_v3"]
HUGGING_FACE = SPEC.formats["hf"]
SEQ_LEN = 64
SIZES = {"dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 96, "vocab_size": 128}
# Each width another, values narrower than queries.
HEADS = {"query_rank": 28, "latent_rank": 20, "plain_dim": 12, "rotated_dim": 8, "value_dim": 10}
ROUTED = {"dense_layers": 1, "n_experts": 12, "top_k": 3, "expert_dim": 40, "shared_dim": 80}
GROUPED = {"expert_groups": 4, "top_groups": 2, "router_scale": 2.5}
SCORES = {"router_scores": "sigmoid", "router_bias": True}
# All three bands of pairs matter.
YARN = Yarn(factor=4.0, original_context=16, beta_fast=4.0, beta_slow=0.5, mscale_all_dim=1.0)
FACTS = {"norm_eps": 1e-5, "rope_theta": 100.0, "rope_scaling": YARN}
ARGS = LatentArgs(**SIZES, **HEADS, **ROUTED, **GROUPED, **SCORES, **FACTS)


def build(args):
    """A network with biases that change choices."""
    model = families.drawn(SPEC, args)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, Router):
            module.bias.copy_(torch.rand(module.bias.shape, generator=generator))
    return model


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"query_rank": 0, "rope_scaling": None, "expert_groups": 1, "top_groups": 1},
        {"rope_scaling": dataclasses.replace(YARN, mscale=0.7, mscale_all_dim=0.5)},
        {"rope_scaling": dataclasses.replace(YARN, mscale_all_dim=0.0), "renormalize": False},
    ],
    ids=["all", "as in 16B", "two scales of YaRN", "scaled where rotated, not renormalized"],
)
def test_logits_and_gradients_equal_those_of_transformers(change):
    args = dataclasses.replace(ARGS, **change)
    families.equals_transformers(SPEC, args, build(args))


def test_the_comparison_sees_groups_bias_and_scales():
    """Without any of them the logits are others."""
    model, tokens = build(ARGS), torch.arange(SEQ_LEN)[None]
    whole = model(tokens)
    for change in (
        {"expert_groups": 1, "top_groups": 1},
        {"router_bias": False},
        {"rope_scaling": None},
        {"rope_scaling": dataclasses.replace(YARN, mscale_all_dim=0.0)},
    ):
        other = SPEC.build(dataclasses.replace(ARGS, **change), SEQ_LEN)
        other.load_state_dict(model.state_dict(), strict="router_bias" not in change)
        assert (other(tokens) - whole).abs().max() > 1e-3, change


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (64, 150_000.0), (32, 50.0)])
def test_yarn_is_that_of_transformers(head_dim, theta, truncate):
    """Also with the limits of pairs as they are, and all of a head rotated, as in GPT-OSS."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = Yarn(factor=32.0, original_context=4096, truncate=truncate)
    fields = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": truncate}
    rope = {"rope_type": "yarn", "rope_theta": theta, **fields}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131_072
    )
    config.rope_parameters = rope
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(
        rope_frequencies(head_dim, theta, scaling), theirs.inv_freq, rtol=1e-5, atol=0
    )
    assert scaling.rotated_factor == pytest.approx(theirs.attention_scaling)
    assert scaling.rotated_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert scaling.logits_factor == 1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("flavor", families.FLAVORS["deepseek_v3"])
def test_flavors_have_the_published_sizes(flavor):
    """Moonlight counts 2.24 billion active parameters, without the embedding and the output."""
    args, config, written = families.has_published_sizes("deepseek_v3", flavor)
    assert written.pop("rope_interleave")
    scaling = dict(written.pop("rope_scaling") or {})
    if scaling:
        assert (scaling.pop("rope_type"), scaling.pop("truncate")) == ("yarn", True)
        assert scaling == {k: v for k, v in config["rope_scaling"].items() if k != "type"}
    assert {key: config[key] for key in written} == written
    # A token's share of attention to 4,096 others; the embedding is a look-up.
    in_products = families.FLAVORS["deepseek_v3"][flavor][2] - args.vocab_size * args.dim
    scores = 6 * args.n_layers * args.n_heads * (192 + 128) * 4096
    assert SPEC.flops_per_unit(args, 4096) == 6 * in_products + scores


@pytest.mark.parametrize("truncate", [True, False])
def test_a_config_is_read_as_it_was_written(truncate):
    """What the scaling leaves out, or gives as null, has transformers' defaults."""
    scaling = dataclasses.replace(YARN, truncate=truncate, beta_fast=40.0)
    args = dataclasses.replace(ARGS, rope_scaling=scaling)
    assert HUGGING_FACE.args(HUGGING_FACE.config(args, None)) == args
    short = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    published, *_ = families.FLAVORS["deepseek_v3"]["671B"]
    for rope in (short, short | {"beta_fast": None, "mscale": None}):
        read = HUGGING_FACE.args(published | {"rope_scaling": rope})
        assert read.rope_scaling == Yarn(factor=40.0)


@pytest.mark.parametrize("query_rank", [0, 28])
def test_operations_are_those_that_torch_counts(query_rank):
    """But for norms, which it does not count, and for zeros that fill up values, which it does."""
    args = dataclasses.replace(ARGS, query_rank=query_rank, dense_layers=3, value_dim=20)
    model = SPEC.build(args, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    of_norms = 6 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert SPEC.flops_per_unit(args, 16) - of_norms == counter.get_total_flops() / 32
    narrow = dataclasses.replace(args, value_dim=12)
    fewer = SPEC.flops_per_unit(args, 16) - SPEC.flops_per_unit(narrow, 16)
    assert fewer == 6 * 3 * 8 * 4 * (16 + args.latent_rank + args.dim)  # scores, W_kvb, W_o


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_a_shrunk_network_has_the_structure_of_the_large_one(flavor, tp):
    large = SPEC.flavors[flavor]
    small = families.shrunk(SPEC, large, tp)
    assert small.n_heads == small.n_kv_heads
    assert small.n_heads % tp == 0
    assert (small.query_rank > 0) == (large.query_rank > 0)
    assert (small.expert_groups > 1) == (large.expert_groups > 1)
    assert small.rope_scaling == large.rope_scaling
    assert small.latent_rank < small.dim


MODEL = {"name": "deepseek_v3", "flavor": "debugmodel"}


def test_keys_change_sizes_and_scaling():
    keys = {"n_heads": 4, "rope_scaling": 8, "rope_mscale": 0.5}
    args = tiny.job(model=MODEL | keys).model_args()
    assert (args.n_heads, args.n_kv_heads) == (4, 4)
    assert args.rope_scaling == Yarn(factor=8.0, mscale=0.5, mscale_all_dim=1.0)


@pytest.mark.parametrize("key", ["n_kv_heads", "head_dim", "rope_low_freq_factor"])
def test_sizes_of_other_families_are_refused(key):
    with pytest.raises(ValueError, match=key):
        tiny.job(model=MODEL | {key: 4})

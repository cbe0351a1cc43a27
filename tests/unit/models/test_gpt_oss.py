"""GPT-OSS against transformers' on the same weights, sinks, and the facts of its spec."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny
from tests.dense import dense_attention
from tests.unit.models import families
from torchtitan.models import MODELS
from torchtitan.models.attention import causal_attention
from torchtitan.models.gpt_oss import GptOssArgs
from torchtitan.models.layers import Yarn

SPEC = MODELS["gpt_oss"]
HUGGING_FACE = SPEC.formats["hf"]
SEQ_LEN = 64
SIZES = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16}
# Each width another, a window that hides most of a sequence, a limit that most rows reach.
ROUTED = {"n_experts": 12, "top_k": 3, "expert_dim": 40, "ffn_dim": 40, "swiglu_limit": 0.05}
# All three bands of pairs matter.
YARN = Yarn(factor=4.0, original_context=16, beta_fast=4.0, beta_slow=0.5, truncate=False)
FACTS = {"vocab_size": 128, "sliding_window": 9, "rope_theta": 100.0, "rope_scaling": YARN}
ARGS = GptOssArgs(**SIZES, **ROUTED, **FACTS)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize(
    "change", [{}, {"swiglu_limit": 7.0, "rope_scaling": None}, {"sliding_window": 0}], ids=str
)
def test_logits_and_gradients_equal_those_of_transformers(change):
    families.equals_transformers(SPEC, dataclasses.replace(ARGS, **change))


def test_the_comparison_sees_each_part():
    """Without any of them the logits are others."""
    model, tokens = families.drawn(SPEC, ARGS), torch.arange(SEQ_LEN)[None]
    whole = model(tokens)
    for change in ({"swiglu_limit": 7.0}, {"sliding_window": 0}, {"rope_scaling": None}):
        other = SPEC.build(dataclasses.replace(ARGS, **change), SEQ_LEN)
        other.load_state_dict(model.state_dict())
        assert (other(tokens) - whole).abs().max() > 1e-3, change
    for part in ("sinks.weight", "wq.bias", "wo.bias", "logit_bias", ".b1", ".b2", ".b3"):
        weights = {
            name: torch.zeros_like(weight) if name.endswith(part) else weight
            for name, weight in model.state_dict().items()
        }
        other = SPEC.build(ARGS, SEQ_LEN)
        other.load_state_dict(weights)
        assert (other(tokens) - whole).abs().max() > 1e-3, part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("has_documents", [False, True])
def test_sinks_are_one_more_key_without_a_value(has_documents, window, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    given = draw(2, 4, 24, 8), draw(2, 2, 24, 8), draw(2, 2, 24, 8), draw(4)
    documents = torch.arange(48).view(2, 24) // 7 if has_documents else None
    weights = torch.randn(2, 4, 24, 8, generator=generator, dtype=dtype)
    found = []
    for attention in (causal_attention, dense_attention):
        out = attention(*given[:3], documents, window, given[3])
        found.append((out, *torch.autograd.grad((out * weights).sum(), given)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_text_is_continued_with_sinks_and_windows():
    families.continues_a_text(families.drawn(SPEC, ARGS), SEQ_LEN)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("flavor", families.FLAVORS["gpt_oss"])
def test_flavors_have_the_published_sizes(flavor):
    """OpenAI counts 20.9 and 116.8 billion, and without the embedding 3.6 and 5.1 active ones."""
    args, config, written = families.has_published_sizes("gpt_oss", flavor)
    scaling = written.pop("rope_scaling")
    assert {key: scaling.pop(key) for key in config["rope_scaling"]} == config["rope_scaling"]
    assert scaling == {"mscale": 1.0, "mscale_all_dim": 0.0}
    assert written.pop("swiglu_alpha") == 1.702
    assert {key: config[key] for key in written} == written
    # A token's share of attention to 4,096 others, or 128; sinks and the embedding cost nothing.
    in_products = families.FLAVORS["gpt_oss"][flavor][2] - args.vocab_size * args.dim
    scores = 6 * args.n_layers // 2 * 64 * (64 + 64) * (4096 + 128)
    assert SPEC.flops_per_unit(args, 4096) == 6 * in_products + scores


def test_a_config_is_read_as_it_was_written():
    for change in ({}, {"sliding_window": 0}, {"rope_scaling": None}, {"tied": True}):
        args = dataclasses.replace(ARGS, **change)
        assert HUGGING_FACE.args(HUGGING_FACE.config(args, None)) == args


def test_operations_are_those_that_torch_counts():
    """But for vectors, which it does not count, and scores, computed again in the backward."""
    model = SPEC.build(ARGS, 16)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    biases = 3 * ARGS.top_k * (2 * ARGS.expert_dim + ARGS.dim)
    again = 2 * (9 + 16 + 9) * ARGS.n_heads * ARGS.head_dim
    counted = counter.get_total_flops() / 32 - again
    assert SPEC.flops_per_unit(ARGS, 16) - 6 * (vectors + biases) == counted


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_a_shrunk_network_has_the_structure_of_the_large_one(flavor, tp):
    large = SPEC.flavors[flavor]
    small = families.shrunk(SPEC, large, tp)
    assert small.ffn_dim == small.expert_dim
    assert 0 < small.sliding_window < 16
    assert SPEC.attention(small).is_mixed
    assert small.rope_scaling == large.rope_scaling


def test_vectors_are_no_matrices_for_an_optimizer():
    parameters = families.drawn(SPEC, ARGS).named_parameters()
    roles = {name: SPEC.role(name, weight.ndim) for name, weight in parameters}
    block = {n.removeprefix("layers.1."): role for n, role in roles.items() if "layers.1." in n}
    assert {name for name, role in block.items() if role == "expert"} == {
        f"mixture.experts.w{number}" for number in (1, 2, 3)
    }
    biases = {name for name, role in block.items() if role == "bias"}
    assert len(biases) == 8
    assert block["attention.sinks.weight"] == "norm"


MODEL = {"name": "gpt_oss", "flavor": "debugmodel"}


def test_keys_change_sizes():
    args = tiny.job(model=MODEL | {"expert_dim": 96, "swiglu_limit": 5}).model_args()
    assert (args.expert_dim, args.ffn_dim, args.swiglu_limit) == (96, 96, 5.0)


def test_work_that_differs_between_blocks_is_not_balanced_by_documents():
    parallelism = {"context_parallel_degree": 2, "context_parallel_load_balancer": "documents"}
    given = MODEL | {"attn_mask_type": "block_causal", "sliding_window": 8}
    (found,) = tiny.problems(tiny.job(model=given, parallelism=parallelism), ranks=2)
    assert found.path == "parallelism.context_parallel_load_balancer"
    assert 'use "headtail", or model.sliding_window = 0' in found.message
    given["sliding_window"] = 0
    assert not tiny.problems(tiny.job(model=given, parallelism=parallelism), ranks=2)


@pytest.mark.parametrize("key", ["ffn_dim", "dense_layers", "shared_dim", "rope_low_freq_factor"])
def test_sizes_of_other_families_are_refused(key):
    with pytest.raises(ValueError, match=key):
        tiny.job(model=MODEL | {key: 4})

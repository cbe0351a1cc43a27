"""Our network against two others' on the same weights: transformers' and Meta's own."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracles import code_of_meta
from torchtitan.models import MODELS
from torchtitan.models.decoder import Decoder, DecoderArgs
from torchtitan.models.initialize import initialize
from torchtitan.models.layers import RopeScaling, rope_frequencies

SPEC = MODELS["llama3"]
BATCH, SEQ_LEN = 2, 96
SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 192, "vocab_size": 128}
# The original context is shorter than the sequence, so that all three bands of pairs matter.
SCALING = RopeScaling(factor=8.0, original_context=32)


def build(**changes):
    """A small network whose weights are large enough for attention to be far from uniform."""

    def rule(name):
        return 1.0 if name.endswith("norm.weight") else 0.1

    args = DecoderArgs(**{**SHAPE, **changes})
    model = SPEC.build(args, SEQ_LEN)
    initialize(model.named_parameters(), rule, seed=0)
    return args, model


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHAPE["vocab_size"], (BATCH, SEQ_LEN), generator=generator)


def to_transformers(args, named):
    written = SPEC.formats["hf"]
    return {
        written.name(name): value
        if (rows := written.rows(args, name)) is None
        else value[rows.argsort()]
        for name, value in named
    }


def transformers_model(args, model):
    from transformers import LlamaConfig, LlamaForCausalLM

    about = SPEC.formats["hf"].config(args, SEQ_LEN)
    config = LlamaConfig(**about, attn_implementation="eager")
    theirs = LlamaForCausalLM(config).float()
    weights = to_transformers(args, model.state_dict().items())
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing == (["lm_head.weight"] if args.tied else [])
    assert not unexpected
    return theirs


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("scaling", [None, SCALING], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_gradients_equal_those_of_transformers(scaling, tied):
    args, ours = build(rope_scaling=scaling, tied=tied)
    theirs = transformers_model(args, ours)
    inputs, targets = tokens(), tokens().roll(-1, dims=1)
    logits, expected = ours(inputs), theirs(inputs, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

    for out in (logits, expected):
        F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
    gradients = to_transformers(args, [(n, p.grad) for n, p in ours.named_parameters()])
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(gradients, wanted, atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def meta():
    with code_of_meta() as module:
        yield module


def meta_model(meta, args, model):
    theirs = meta.Transformer(
        meta.ModelArgs(
            dim=args.dim,
            n_layers=args.n_layers,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            vocab_size=args.vocab_size,
            multiple_of=args.ffn_dim,  # they round the width up to a multiple of this
            norm_eps=args.norm_eps,
            rope_theta=args.rope_theta,
            use_scaled_rope=args.rope_scaling is not None,
            max_batch_size=BATCH,
            max_seq_len=SEQ_LEN,
        )
    )
    theirs.load_state_dict(model.state_dict())  # the names are the same, every one
    return theirs


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0)], ids=["unscaled", "scaled"])
def test_logits_equal_those_of_meta(meta, scaling):
    args, ours = build(rope_scaling=scaling)
    theirs = meta_model(meta, args, ours)
    with torch.no_grad():
        logits, expected = ours(tokens()), theirs(tokens(), start_pos=0)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("flavor", ["8B", "70B", "405B"])
def test_frequencies_equal_those_of_meta(meta, flavor):
    args = SPEC.flavors[flavor]
    plain = rope_frequencies(args.head_size, args.rope_theta, None)
    scaled = rope_frequencies(args.head_size, args.rope_theta, args.rope_scaling)
    torch.testing.assert_close(scaled, meta.apply_scaling(plain), atol=0, rtol=3e-7)
    assert not torch.allclose(scaled, plain, atol=0, rtol=0.5)


def test_table_equals_that_of_meta_over_the_whole_context(meta):
    args = DecoderArgs(**SHAPE)
    table = Decoder(args, seq_len=8192).rope.table
    expected = meta.precompute_freqs_cis(args.head_size, 8192, args.rope_theta, use_scaled=False)
    torch.testing.assert_close(table, torch.view_as_real(expected), atol=1e-6, rtol=0)

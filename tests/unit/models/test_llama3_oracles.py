"""Our network against two others' on the same weights: transformers' and Meta's own."""

import pytest
import torch

from tests.oracles import code_of_meta
from tests.unit.models.families import drawn, equals_transformers
from torchtitan.models import MODELS
from torchtitan.models.decoder import Decoder, DecoderArgs
from torchtitan.models.layers import RopeScaling, rope_frequencies

SPEC = MODELS["llama3"]
BATCH, SEQ_LEN = 2, 96
SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 192, "vocab_size": 128}
# The original context is shorter than the sequence, so that all three bands of pairs matter.
SCALING = RopeScaling(factor=8.0, original_context=32)


def build(**changes):
    """A small network whose weights are large enough for attention to be far from uniform."""

    args = DecoderArgs(**{**SHAPE, **changes})
    return args, drawn(SPEC, args, SEQ_LEN)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHAPE["vocab_size"], (BATCH, SEQ_LEN), generator=generator)


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("scaling", [None, SCALING], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_gradients_equal_those_of_transformers(scaling, tied):
    args = DecoderArgs(**SHAPE, rope_scaling=scaling, tied=tied)
    equals_transformers(SPEC, args, seq_len=SEQ_LEN)


@pytest.fixture(scope="module")
def meta():
    with code_of_meta() as module:
        yield module


def meta_model(meta, args, model):
    same = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta")
    own = {key: getattr(args, key) for key in same} | {"max_batch_size": BATCH}
    own |= {"max_seq_len": SEQ_LEN, "use_scaled_rope": args.rope_scaling is not None}
    # They round the width up to a multiple of this.
    theirs = meta.Transformer(meta.ModelArgs(**own, multiple_of=args.ffn_dim))
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

"""Qwen3 against transformers' on the same weights, and the facts of its spec."""

import dataclasses

import pytest
import torch

from tests.unit.models import families
from torchtitan.models import MODELS
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.spec import build_empty, count_parameters

SPEC = MODELS["qwen3"]
HUGGING_FACE = SPEC.formats["hf"]
# 8 heads of 16, so heads are together wider than the residual stream.
SIZES = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 160}
FACTS = {"head_norms": True, "vocab_size": 128, "norm_eps": 1e-6, "rope_theta": 1e6}
ARGS = DecoderArgs(**SIZES, **FACTS)


def published(flavor):
    return families.FLAVORS["qwen3"][flavor][0]


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_gradients_equal_those_of_transformers(tied, window):
    args = dataclasses.replace(ARGS, tied=tied, sliding_window=window)
    families.equals_transformers(SPEC, args, seq_len=96)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("flavor", families.FLAVORS["qwen3"])
def test_flavors_have_the_published_sizes(flavor):
    args, config, written = families.has_published_sizes("qwen3", flavor)
    assert {key: config[key] for key in written} == written
    ours = build_empty(SPEC.build, args, 16)
    assert count_parameters(ours).embedding == 151_936 * args.dim
    with torch.device("meta"):
        theirs = families.of_transformers(config)
    shapes = {HUGGING_FACE.name(name): w.shape for name, w in ours.state_dict().items()}
    aliases = {"lm_head.weight"} if args.tied else set()
    assert {n: w.shape for n, w in theirs.state_dict().items() if n not in aliases} == shapes


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("layer_types", [False, True], ids=["older", "newer"])
def test_windows_are_read_back(window, layer_types):
    from transformers import Qwen3Config

    args = dataclasses.replace(ARGS, sliding_window=window)
    config = HUGGING_FACE.config(args, 64)
    if layer_types:  # as transformers writes it
        config = Qwen3Config(**config).to_dict()
        assert len(config["layer_types"]) == args.n_layers
    assert HUGGING_FACE.args(config) == args


def test_absent_keys_have_the_defaults_of_transformers():
    from transformers import Qwen3Config

    absent = ("head_dim", "sliding_window", "use_sliding_window", "max_window_layers")
    config = {key: value for key, value in published("0.6B").items() if key not in absent}
    assert Qwen3Config().head_dim == 128
    assert HUGGING_FACE.args(config) == SPEC.flavors["0.6B"]
    config |= {"use_sliding_window": True, "max_window_layers": 0}
    assert HUGGING_FACE.args(config).sliding_window == Qwen3Config(**config).sliding_window == 4096


def test_no_block_has_a_window_without_use_sliding_window():
    config = published("8B") | {"sliding_window": 4096, "max_window_layers": 0}
    assert HUGGING_FACE.args(config) == SPEC.flavors["8B"]
    config |= {"use_sliding_window": True, "max_window_layers": 36}
    assert HUGGING_FACE.args(config) == SPEC.flavors["8B"]

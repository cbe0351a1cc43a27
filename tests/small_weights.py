"""A small Llama in every variation, its weights, and a checkpoint of them."""

import dataclasses

import torch

from tests import tiny
from torchtitan.checkpoint.storage import SavedTensors, write_tensors
from torchtitan.checkpoint.weights.conversion import ConvertOptions, convert
from torchtitan.models import MODELS
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import initialize

SEQ_LEN = 96
ARGS = dataclasses.replace(tiny.ARGS, dim=64, n_layers=3, n_heads=8)
# The original context is shorter than the sequence, so that all three bands of pairs matter.
SCALING = RopeScaling(factor=8.0, original_context=32)
FLAVORS = {
    "plain": ARGS,
    "tied": dataclasses.replace(ARGS, tied=True, n_kv_heads=4),
    "scaled": dataclasses.replace(ARGS, rope_scaling=SCALING, ffn_dim=80),
    "both": dataclasses.replace(ARGS, rope_scaling=SCALING, tied=True, n_kv_heads=8),
    "window": dataclasses.replace(ARGS, sliding_window=12, head_dim=16),
}
IN_META = [flavor for flavor in FLAVORS if flavor != "window"]
"""The flavors that Meta's format can express."""
SPEC = dataclasses.replace(MODELS["llama3"], name="small", flavors=FLAVORS)


def network(flavor="plain"):
    """A network whose weights are large enough for attention to be far from uniform."""
    model = SPEC.build(FLAVORS[flavor], SEQ_LEN)
    initialize(model.named_parameters(), lambda n: 1.0 if "norm" in n else 0.1, seed=len(flavor))
    return model


def weights(flavor="plain"):
    return {f"model.{name}": p.detach() for name, p in network(flavor).state_dict().items()}


def write_run(folder, name, sizes, network):
    """A checkpoint of a run of the debug model of a family, with these sizes."""
    folder.mkdir()
    recipe = {f"model.{key}": value for key, value in sizes.items()}
    recipe |= {"model.name": name, "model.flavor": "debugmodel", "training.seq_len": SEQ_LEN}
    weights = ((f"model.{n}", w) for n, w in network.state_dict().items())
    write_tensors(folder, weights, {"recipe": recipe}, 10**9)
    return folder


def saved(folder, flavor="plain", recipe=None):
    folder.mkdir(parents=True)
    named = {"model.name": "small", "model.flavor": flavor, "training.seq_len": SEQ_LEN}
    about = {"recipe": {**named, **(recipe or {})}}
    write_tensors(folder, weights(flavor).items(), about, 10**9)
    return folder


def content(folder):
    tensors = SavedTensors(folder)
    return {name: tensors.read(name) for name in tensors.shapes()}


def run(source, destination, **options):
    convert(source, destination, ConvertOptions(**options), {})
    return destination


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(ARGS.vocab_size, (2, SEQ_LEN), generator=generator)

"""Stage 1: what one device can run, each step compared with the CPU's.

Every case trains five steps of a small model on the device and the same recipe, plain and eager,
on the CPU, from the same weights and data; losses, gradient norms and weights are compared after
each. In float32 they have to agree to rounding. In bfloat16 and Float8 the two round differently,
and a weight is judged by how far it is off in parts of how far it has moved.
"""

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from functools import cache, reduce
from typing import Any, get_args

import torch

from tests import layouts, tiny
from tests.dense import dense_attention
from tests.research.layouts import BESIDE_LATENT, LATENT_LOSSES
from tests.runs import trace
from tests.tables import data
from torchtitan.convert import ConverterConfig, Float8
from torchtitan.job import JobConfig
from torchtitan.losses import AuxiliaryLossConfig
from torchtitan.models.attention import causal_attention
from torchtitan.research.common.codec import BACKENDS, Codec, Form
from torchtitan.research.hadamard_attention import LowPrecisionAttention
from torchtitan.torch_private.attention_kernels import attention_backward, attention_forward

Sections = Mapping[str, dict[str, Any]]

TABLE = data(__file__)
CHANGES = layouts.CHANGES | TABLE["changes"]
BF16, COMPILE, CHUNKS = (CHANGES[each] for each in ("bf16", "compiled", "loss in chunks"))


def optimizer(**keys):
    return {"optimizer": keys}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How far two runs may be apart: losses and norms in parts, weights by element or movement."""

    loss: float
    norm: float
    weight: float = float("inf")
    """Of the largest difference of an element."""
    moved: float = float("inf")
    """Of a difference's 2-norm, in parts of that of the movement since the start."""


ROUNDING = Bounds(loss=1e-5, norm=1e-4, weight=1e-5)
HALF = Bounds(loss=3e-3, norm=3e-2, moved=0.1)
EIGHT = Bounds(loss=1e-2, norm=1e-1, moved=0.3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe for the device, and one for the CPU that it has to agree with."""

    sections: Sections = dataclasses.field(default_factory=dict)
    bounds: Bounds = ROUNDING
    convert: tuple[ConverterConfig, ...] = ()
    auxiliary: tuple[AuxiliaryLossConfig, ...] = ()
    like: Sections = dataclasses.field(default_factory=dict)
    """What the CPU's recipe has besides data, precision and optimizer."""
    on_device: bool = False
    """Whether the device trains that recipe too."""


def case(*sections, **rest):
    found = reduce(tiny.merged, sections, {})
    # The CPU's recipe has the same model and data, unless it is given.
    like = {name: found[name] for name in ("model", "data") if name in found}
    return Case(found, **{"like": like, **rest})


def named(name):
    """The case of the changes in its name."""
    words = name.split(", ")
    return case(*(CHANGES[each] for each in words), bounds=HALF if "bf16" in words else ROUNDING)


def updated(*sections, bounds=ROUNDING, **keys):
    """An optimizer with these settings, on the device as on the CPU."""
    return case(optimizer(**keys), *sections, like=optimizer(**keys), bounds=bounds)


MUON = {"name": "Muon", "ns_dtype": "float32", "adamw": {"eps": 1e-6}}
PICTURES = {"model": tiny.VIT_MAE, "data": {"dataset": "scenes"}}
FLOAT8 = {name: (Float8(recipe=name),) for name in ("tensorwise", "rowwise")}
HIGH_PRECISION = (Float8(recipe="rowwise_with_gw_hp"),)
ROTATED = (LowPrecisionAttention(dtype="int8", rotation="qkv"),)
CASES = {
    **{name: named(name) for name in TABLE["cases"]},
    "Float8 tensorwise": case(BF16, COMPILE, convert=FLOAT8["tensorwise"], bounds=EIGHT, like=BF16),
    "Float8 rowwise": case(BF16, COMPILE, convert=FLOAT8["rowwise"], bounds=EIGHT),
    "Float8 rowwise_with_gw_hp": case(BF16, COMPILE, convert=HIGH_PRECISION, bounds=EIGHT),
    "Float8 tensorwise, eager": case(BF16, convert=FLOAT8["tensorwise"], bounds=EIGHT),
    "Float8 rowwise, eager": case(BF16, convert=FLOAT8["rowwise"], bounds=EIGHT),
    "states in bfloat16": updated(state_dtype="bfloat16", bounds=HALF),
    "states in Float8": updated(state_dtype="float8", bounds=HALF),
    "states in 8 bits": updated(state_dtype="8bit", bounds=HALF),
    "states in 4 bits": updated(state_dtype="4bit", bounds=EIGHT),
    "updates in the backward": case(
        optimizer(early_step_in_backward=True),
        {"training": {"local_batch_size": 8, "max_norm": 0.0}},
        like={"training": {"max_norm": 0.0}},
        on_device=True,  # SGD without clipping amplifies what a CPU rounds otherwise
    ),
    "Muon": updated(**MUON),
    "Muon, compiled": updated(COMPILE, **MUON),
    "Muon in bf16": updated(name="Muon", bounds=HALF),
    "GaLore": updated(name="GaLore", rank=8, bounds=HALF),
    "Ranger21": updated(name="Ranger21"),
    "ViT-MAE": case(PICTURES),
    "ViT-MAE, compiled": case(PICTURES, COMPILE),
    "auxiliary losses": case(auxiliary=BESIDE_LATENT),
    "auxiliary losses, compiled": case(COMPILE, auxiliary=layouts.BESIDE),
    "multi-token prediction": case(CHUNKS, auxiliary=LATENT_LOSSES, like=CHUNKS),
    "attention in Float8": case(convert=(LowPrecisionAttention(),), bounds=EIGHT),
    "attention in int8, rotated": case(convert=ROTATED, bounds=EIGHT),
}


def job(sections, name, this, emulated):
    """The small recipe with SGD or AdamW, or the optimizer that its sections name."""
    base = {
        "model": {"flavor": "even"},
        "training": {"max_norm": 0.3},
        "optimizer": {"name": name, **layouts.OPTIMIZERS[name]},
    }
    recipe = tiny.job(**tiny.merged(base, sections))
    convert = tuple(
        c.model_copy(update={"emulate": True}) if emulated and isinstance(c, Float8) else c
        for c in this.convert
    )
    return recipe.model_copy(update={"convert": convert, "auxiliary_losses": this.auxiliary})


def eager_on_cpu(recipe):
    """What a CPU trains; nothing is compiled, an optimizer's arithmetic neither."""
    with torch.compiler.set_stance("force_eager"):
        return trained(recipe, "cpu")


def trained(recipe, kind):
    """All steps; microbatches of tokens have different numbers of targets."""
    return trace(recipe, uneven=True, device=kind)


@cache
def on_cpu(recipe):
    return eager_on_cpu(JobConfig.model_validate_json(recipe))


def plain(this, name):
    """What the CPU trains: the same precision, nothing compiled, recomputed or offloaded."""
    precision = {"mixed_precision_param": "float32"} | {
        key: value
        for key, value in this.sections.get("training", {}).items()
        if key in ("mixed_precision_param", "local_batch_size")
    }
    return job(tiny.merged({"training": precision}, this.like), name, this, emulated=True)


def check(name, device, backend):
    """Compare a case with the CPU; how far apart they were at most."""
    if name in FUNCTIONS:
        return FUNCTIONS[name](device)
    this = CASES[name]
    names = ["AdamW", "SGD"]
    if {"name", "state_dtype", "implementation"} & this.sections.get("optimizer", {}).keys():
        names = ["AdamW"]
    elif this.like == PICTURES:  # as in tests/research/test_vit_mae_layouts.py
        names = ["SGD"]
    worst = {"loss": 0.0, "norm": 0.0, "weight": 0.0, "moved": 0.0}
    on_cuda = device.type == "cuda"
    for optimizer_name in names:
        sections = copy.deepcopy(dict(this.sections))
        if "compile" in sections:
            sections["compile"]["backend"] = backend
        recipe = job(sections, optimizer_name, this, emulated=not on_cuda)
        reference = plain(this, optimizer_name)
        own = this.convert or this.auxiliary
        if this.on_device:
            expected = trained(reference, device.type)
        else:
            expected = eager_on_cpu(reference) if own else on_cpu(reference.model_dump_json())
        torch._dynamo.reset()
        found = trained(recipe, "cuda") if on_cuda else eager_or(recipe)
        for kind, value in differences(found, expected).items():
            worst[kind] = max(worst[kind], value)
    bounds = dataclasses.asdict(this.bounds)
    over = {kind: value for kind, value in worst.items() if not value <= bounds[kind]}
    assert not over, f"too far off: {over}; allowed {bounds}; all: {worst}"
    return worst


def eager_or(recipe):
    """A rehearsal: what the recipe compiles is compiled, an optimizer's arithmetic is not."""
    return trained(recipe, "cpu") if recipe.compile.enable else eager_on_cpu(recipe)


def differences(found, expected):
    """How far two runs of one rank are apart at most, over all steps."""
    apart = {"loss": 0.0, "norm": 0.0, "weight": 0.0, "moved": 0.0}

    def note(kind, value):
        apart[kind] = max(apart[kind], value if value == value else float("inf"))

    assert len(found.losses) == len(expected.losses)
    for step, weights in enumerate(expected.weights):
        note("loss", abs(found.losses[step] / expected.losses[step] - 1))
        note("norm", abs(found.grad_norms[step] / expected.grad_norms[step] - 1))
        assert weights.keys() == found.weights[step].keys()
        off = moved = 0.0
        for key, part in weights.items():
            difference = found.weights[step][key].local.float() - part.local.float()
            note("weight", difference.abs().max().item())
            off += difference.square().sum().item()
            moved += (part.local - expected.weights[0][key].local).float().square().sum().item()
        if step:
            note("moved", (off / moved) ** 0.5)
    return apart


ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""How far attention may be off, as 2-norms."""


def note_worst(worst, names, found, expected, dtype, where):
    """Note how far tensors of a dtype are off at most; an AssertionError says which and `where`."""
    kind = str(dtype).removeprefix("torch.")
    for what, mine, right in zip(names, found, expected, strict=True):
        assert mine.shape == right.shape, (what, mine.shape, right.shape)
        off = ((mine.float() - right).norm() / right.norm()).item()
        assert off <= ALLOWED[dtype], f"{what} is off by {off:.2g}: {dtype}, {where}"
        worst[kind] = max(worst.get(kind, 0.0), off)


def attention(device):
    """The kernels that tell their normaliser, forward and backward, against the CPU's."""
    worst = {}
    sizes, kinds = ((128, 4, 4, 64), (96, 8, 2, 32), (77, 4, 2, 128)), ("causal", "full", "biased")
    for dtype, shape, kind in itertools.product(ALLOWED, sizes, kinds):
        length, heads, kv_heads, size = shape
        torch.manual_seed(0)
        q = torch.randn(2, heads, length, size)
        k, v = torch.randn(2, 2, kv_heads, length, size)
        grad = torch.randn_like(q)
        masked = torch.rand(2, 1, length, length) < 0.3
        masked.diagonal(dim1=-2, dim2=-1).fill_(False)
        bias = torch.zeros(masked.shape).masked_fill(masked, -1e4)
        results = []
        for where in ("cpu", device.torch_device):
            given = [x.to(where, dtype) for x in (q, k, v)]
            options = {"causal": kind == "causal", "bias": None}
            if kind == "biased":
                options["bias"] = bias.to(where, dtype)
            out, lse = attention_forward(*given, **options)
            gradients = attention_backward(grad.to(where, dtype), *given, out, lse, **options)
            results.append([x.float().cpu() for x in (out, lse, *gradients)])
        expected, found = results
        names = ("out", "lse", "grad q", "grad k", "grad v")
        where = f"{kind}, {length} tokens, {heads}/{kv_heads} heads of {size}"
        note_worst(worst, names, found, expected, dtype, where)
    return worst


def document_attention(device):
    """Attention within documents and windows, forward and backward, against a dense mask."""
    worst = {}
    # Of one token, of all kinds of lengths, padding at the end, and a row that is one document.
    lengths = ((1, 7, 64, 100, 1, 27, 57, 43), (300,))
    documents = torch.stack(
        [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in lengths]
    )
    sizes = ((4, 4, 64), (8, 2, 128))
    whole = torch.zeros_like(documents)
    masks = ((documents, 0), (None, 50), (documents, 50), (documents, 2), (whole, 0), (whole, 400))
    for dtype, (heads, kv_heads, size), (ids, window) in itertools.product(ALLOWED, sizes, masks):
        torch.manual_seed(0)
        shapes = [(2, count, 300, size) for count in (heads, kv_heads, kv_heads, heads)]
        *given, grad = (torch.randn(x, device=device.torch_device).to(dtype) for x in shapes)
        results = []
        for core, wide in ((causal_attention, dtype), (dense_attention, torch.float32)):
            own = [x.to(wide).requires_grad_() for x in given]
            mask = ids
            if core is dense_attention and ids is not None:
                mask = ids.to(device.torch_device)
            out = core(*own, mask, window)
            results.append([out, *torch.autograd.grad(out, own, grad.to(wide))])
        where = f"documents {ids is not None}, window {window}, {heads}/{kv_heads} heads of {size}"
        note_worst(worst, ("out", "grad q", "grad k", "grad v"), *results, dtype, where)
    return worst


def codec(device):
    """What few bits hold: compiled on the device, it is that of eager code there and on the CPU."""
    apart = 0
    for bits, form, scales in itertools.product((2, 3, 4, 8), get_args(Form), ALLOWED):
        torch.manual_seed(0)
        numbers, chosen = torch.randn(3, 1000), Codec(bits, 64, form, scales)
        here, own = chosen.encode(numbers), numbers.to(device.torch_device)
        there = chosen.encode(own)
        back = chosen.decode(there, 1000)
        with torch.compiler.set_stance("force_eager"):
            apart += int((chosen.encode(own) != there).sum() + (here != there.cpu()).sum())
            apart += int((chosen.decode(there, 1000) != back).sum())
        assert torch.allclose(back.cpu(), chosen.decode(here, 1000), atol=1e-6)
    assert device.type == "cpu" or device.type in BACKENDS, "it was not compiled"
    assert apart == 0, f"{apart} bytes and numbers differ"
    return {"bytes and numbers apart": float(apart)}


def attention_memory(device):
    """Attention never holds all scores, whatever dtype and mask: memory in parts of them."""
    if device.type == "cpu":
        return {}
    worst, limits = {}, {}
    masks = {"": (0, 0), ", documents": (1000, 0), ", window": (0, 1000)}
    for dtype in (torch.bfloat16, torch.float32):
        for masked, (size, window) in masks.items():
            q = torch.randn(1, 8, 8192, 64, device="cuda", dtype=dtype, requires_grad=True)
            k, v = torch.randn(2, 1, 2, 8192, 64, device="cuda", dtype=dtype)
            documents = torch.arange(8192)[None] // size if size else None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            causal_attention(q, k, v, documents, window).sum().backward()
            scores = 8 * 8192 * 8192 * dtype.itemsize
            part = (torch.cuda.max_memory_allocated() - before) / scores
            name = f"{str(dtype).removeprefix('torch.')}{masked}"
            worst[name] = part
            limits[name] = 0.25 if masked else 0.7
    over = {name: part for name, part in worst.items() if part > limits[name]}
    assert not over, f"memory in parts of all scores: {worst}"
    return worst


FUNCTIONS = {
    "attention kernels": attention,
    "attention holds no scores": attention_memory,
    "document attention": document_attention,
    "codec": codec,
}


def names(rehearsed):
    """All cases; in a rehearsal not those that take longest."""
    cases = [*CASES, *FUNCTIONS]
    return [name for name in cases if "compiled" not in name] if rehearsed else cases

"""Stage 3: how fast one device trains, beside the shortest loop that one would write by hand."""

import dataclasses
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests import tiny
from tests.dense import dense_attention
from tests.gpu import mixture
from tests.gpu.planned import calibration, planned
from tests.gpu.timing import fresh, in_turns, relative, timed
from tests.tables import data
from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import GIB
from torchtitan.models import MODELS
from torchtitan.models.attention import causal_attention
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.spec import build_empty, initialize
from torchtitan.parallel import open_world
from torchtitan.research.common.codec import BACKENDS, Codec
from torchtitan.research.hadamard_attention import STEP, hadamard
from torchtitan.research.loco import Compensation, LoCo
from torchtitan.trainer import Trainer

ROUNDS, STEPS, WARMUP = 5, 4, 3

RECIPES = data(__file__)
ROWS = RECIPES["rows"]


class Model(NamedTuple):
    flavor: str
    batch: int
    seq_len: int
    sizes: dict[str, Any] = {}  # noqa: RUF012
    chunk: int = 16384
    window: int = 1024
    rows: tuple[str, ...] = ()
    """Those that are tried; none: all."""


MODELS_HERE = {name: Model(**given) for name, given in RECIPES["models"].items()}
TOY = Model("debugmodel", 2, 64, {}, 512, 16)

BY_HAND = {"by hand, compiled by block": "block", "by hand, compiled whole": "model"}
TRANSFORMERS = "transformers, compiled"
HADAMARD = {f"Hadamard transform of {size:,}": size for size in (128, 256, 1024, 4096, 32768)}
CODECS = {f"codec of {bits} bits": bits for bits in (8, 4, 2)}
CALIBRATION = "calibration"
ATTENTION = {"attention, 8,192 tokens": 8192, "attention, 32,768 tokens": 32768}
EXPERTS = {f"experts, {name}": layer for name, layer in mixture.LAYERS.items()}
MASKS = RECIPES["masks"]
"""Tokens of each document, and the window; 0: none."""
DENSE = "documents of 1,000, dense mask"


def names(rehearsed):
    models = ["toy"] if rehearsed else list(MODELS_HERE)
    rows = [*ROWS][:5]
    rows += BY_HAND
    if importlib.util.find_spec("transformers"):
        rows.append(TRANSFORMERS)
    rows += [*ROWS][5:]
    cases = ["matrix product", CALIBRATION, *CODECS, *HADAMARD, *ATTENTION, *EXPERTS]
    for model in models:
        chosen = MODELS_HERE[model].rows if model in MODELS_HERE else ()
        cases += [f"{model}: {row}" for row in [*(chosen or rows), "compiled, again"]]
    return cases


def check(name, device, backend):
    if name == "matrix product":
        return {"TFLOP/s": matrix_product(device) / 1e12}
    if name in HADAMARD:
        return hadamard_transform(HADAMARD[name], device, backend)
    if name in CODECS:
        return codec(CODECS[name], device, backend)
    if name in ATTENTION:
        return document_attention(ATTENTION[name], device, backend)
    if name in EXPERTS:
        layer, rounds = EXPERTS[name], 20 if device.type == "cuda" else 2
        layer = layer if device.type == "cuda" else layer.shrunk(64)
        return mixture.timed(layer, device, torch.bfloat16, rounds)
    if name == CALIBRATION:
        model = MODELS_HERE["8B, 4 layers"] if device.type == "cuda" else TOY
        return calibration(job_of("compiled", model, device, backend), device)
    flavor, row = name.split(": ")
    model = MODELS_HERE.get(flavor, TOY)
    fresh(device)
    row = row.removesuffix(", again")
    if row in BY_HAND:
        return measured(by_hand(model, BY_HAND[row], device, backend), model, device)
    if row == TRANSFORMERS:
        return measured(transformers(model, device, backend), model, device)
    try:
        job = job_of(row, model, device, backend)
    except RecipeError as error:
        return {"left out": "; ".join(error.lines)}
    with open_world(job.degrees(1), job.comm, device) as world:
        run = build(job, world)
        with closing(run.batches), run.meter:
            figures = measured(Trainer(run).step, model, device)
    del run
    return figures | planned(job, 1, 0, device)


def job_of(row, model, device, backend):
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "row.toml"
        recipe.write_text(extended(ROWS[row], model, folder, backend))
        return load_job(recipe, [], 1, device.type, is_here=True).config


def extended(row, model, folder, backend):
    """The whole recipe of a row."""
    import tomlkit

    numbers, rest = model._asdict(), {key: row[key] for key in row.keys() & {"convert"}}
    found = tiny.merged(RECIPES["base"], {key: row[key] for key in row if key not in rest})
    found = {
        section: {key: numbers.get(value, value) for key, value in keys.items()}
        for section, keys in found.items()
    }
    found["model"].update(model.sizes)
    if "compile" in found:
        found["compile"]["backend"] = backend
    return tomlkit.dumps({"job": {"dump_folder": folder}, **found, **rest})


def arguments(model):
    return dataclasses.replace(LLAMA3.flavors[model.flavor], **model.sizes)


def measured(step, model, device):
    """Time `step`, and look at what the device did in two more."""
    rounds, steps, warmup = (ROUNDS, STEPS, WARMUP) if device.type == "cuda" else (3, 1, 1)
    begin = time.perf_counter()
    for _ in range(warmup):
        step()
    device.synchronize()
    warm = time.perf_counter() - begin
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        device.synchronize()
        seconds.append((time.perf_counter() - begin) / steps)
    tokens = model.batch * model.seq_len
    low, middle, high = statistics.quantiles((tokens / s for s in seconds), n=4)
    found = {
        "tokens/s": middle,
        "quartiles": [low, high],
        "GiB": device.memory_peak(),
        "warm-up s": warm,
    }
    peak = device.peak_flops(torch.bfloat16)
    flops = MODELS["llama3"].flops_per_unit(arguments(model), model.seq_len) * tokens
    found["TFLOP/s"] = flops / statistics.median(seconds) / 1e12
    if peak:
        found["MFU"] = flops / statistics.median(seconds) / peak
    if device.type == "cuda":
        found["GiB allocated"] = torch.cuda.max_memory_allocated() / GIB
        found |= traced(step, device)
    return found


def traced(step, device):
    """Launches a step, the part of the time in which the device is idle, and what takes longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        device.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation
    )
    if not kernels:
        return {}
    busy, last, gaps, took = 0.0, kernels[0][0], [], Counter[str]()
    for begin, end, name in kernels:
        if begin > last:
            gaps.append((begin - last, name[:60]))
        busy += max(end - max(begin, last), 0.0)
        last = max(last, end)
        took[name[:90]] += end - begin
    whole = last - kernels[0][0]
    return {
        "launches": len(kernels) / 2,
        "idle": 1 - busy / whole,
        "longest": [f"{t / whole:.1%} {name}" for name, t in took.most_common(8)],
        "gaps": [f"{gap:.0f} us before {name}" for gap, name in sorted(gaps, reverse=True)[:4]],
    }


def by_hand(model, granularity, device, backend):
    """The shortest loop: the same network, autocast, torch.compile, fused AdamW, clipping."""
    args = arguments(model)
    network = build_empty(LLAMA3.build, args, model.seq_len)
    network.to_empty(device=device.torch_device)
    network.init_buffers()
    initialize(network.named_parameters(), partial(LLAMA3.init_std, args), 0)
    forward = network
    if granularity == "model":
        forward = torch.compile(network, backend=backend)
    else:
        for block in LLAMA3.blocks(network).values():
            block.compile(backend=backend)
    return loop(network, forward, lambda out: out, args.vocab_size, model, device, backend)


def transformers(model, device, backend):
    """Hugging Face's Llama of the same sizes, in the same loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    args = arguments(model)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        max_position_embeddings=model.seq_len,
        tie_word_embeddings=args.tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(device.torch_device):
        network = LlamaForCausalLM(config)
    network.train()
    forward = torch.compile(network, backend=backend)
    return loop(network, forward, lambda out: out.logits, args.vocab_size, model, device, backend)


def loop(network, forward, logits_of, vocabulary, model, device, backend):
    shape = 16, model.batch, model.seq_len + 1
    batches = torch.randint(vocabulary, shape, device=device.torch_device)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def cross_entropy(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_of = torch.compile(cross_entropy, backend=backend)
    count = 0

    def step():
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = logits_of(forward(batch[:, :-1]))
        loss_of(logits, batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return step


def matrix_product(device):
    """FLOP/s of a bf16 product of two random matrices, the median of 20."""
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device.torch_device, dtype=torch.bfloat16)
    return 2 * size**3 / timed(lambda: a @ b, device)


def hadamard_transform(size, device, backend):
    """Milliseconds to rotate rows in bf16 and float32, and of a dense product and copies.

    The result is compared with the matrix in float64, and must be as near as the format allows.
    """
    on_cuda = device.type == "cuda"
    rows = 2**27 // size if on_cuda else 4
    x = torch.randn(rows, size, device=device.torch_device, dtype=torch.bfloat16)
    wide, few = x.float(), x[:64]
    expected = hadamard(few.double())

    def rotated(x):
        return hadamard(x).to(x.dtype)

    found = {"error": few, "error in float32": few.float()}
    errors = {
        name: float((hadamard(each).double() - expected).norm() / expected.norm())
        for name, each in found.items()
    }
    # Products of the first factor are exact; those of a second one keep 16 bits, as float32 does.
    assert errors["error"] < (2**-20 if size <= STEP else 2**-15), errors
    assert errors["error in float32"] < 2**-15, errors
    compiled, out = torch.compile(rotated, backend=backend), torch.empty_like(x)
    ways = {
        "transform": lambda: rotated(x),
        "transform, compiled": lambda: compiled(x),
        "float32, compiled": lambda: compiled(wide),
        "copy": lambda: out.copy_(x),
        "copy of float32": lambda: torch.empty_like(wide).copy_(wide),
    }
    if size <= 4096:
        dense = hadamard(torch.eye(size, device=device.torch_device)).to(x.dtype)
        ways["dense product"] = lambda: x @ dense
    times = {f"{name}, ms": 1000 * timed(way, device) for name, way in ways.items()}
    return times | errors


def codec(bits, device, backend):
    """GB/s of float32 numbers that are encoded, decoded and copied, in rows as of 8 ranks."""
    shape = (8, 2**25) if device.type == "cuda" else (2, 2**14)
    numbers = torch.randn(shape, device=device.torch_device)
    this, noise = Codec(bits, 1024, "minmax"), torch.Generator(device.torch_device)
    loco = Compensation(LoCo(bits=bits), Codec(bits, 256), *shape, device.torch_device)
    size, out = numbers.numel() * numbers.itemsize, torch.empty_like(numbers)
    ways = {
        "encode": lambda: this.encode(numbers),
        "encode, stochastic": lambda: this.encode(numbers, noise=noise),
        "encode with errors": lambda: loco.encode(numbers),
        "decode": lambda: this.decode(sent, shape[1]),
        "decode and add up": lambda: this.decode(sent, shape[1], is_sum=True),
    }
    with mock.patch.dict(BACKENDS, {device.type: backend}):
        begin = time.perf_counter()
        sent = ways["encode"]()
        decoded = ways["decode"]()
        device.synchronize()
        first = time.perf_counter() - begin
        assert torch.equal(eagerly(ways["encode"]), sent), "compiled, it has other bytes"
        assert torch.equal(eagerly(ways["decode"]), decoded), "compiled, it has other numbers"
        ways |= {f"{name}, eager": partial(eagerly, way) for name, way in ways.items()}
        ways["copy"] = lambda: out.copy_(numbers)
        rates = {f"{name}, GB/s": size / timed(way, device) / 1e9 for name, way in ways.items()}
        assert device.type in BACKENDS, "it was not compiled"
    return rates | {"compilation, s": first}


def eagerly(way):
    with torch.compiler.set_stance("force_eager"):
        return way()


def each_alone(q, k, v, documents, window):
    """The causal kernel, called for each document: where it is faster than packing them."""
    bounds = [0, *(documents[0].diff().nonzero()[:, 0] + 1).tolist(), q.shape[2]]
    parts = (slice(*span) for span in itertools.pairwise(bounds))
    alone = (causal_attention(*(x[:, :, part] for x in (q, k, v)), None) for part in parts)
    return torch.cat(list(alone), 2)


def flex_ways(given, backend):
    """Attention by FlexAttention, and what makes its block mask: all layers of a batch share it."""
    attend = torch.compile(flex_attention, backend=backend, dynamic=False)
    create = torch.compile(create_block_mask, backend=backend, dynamic=False)
    length, where = given[0].shape[2], given[0].device
    if where.type == "cpu":  # which has no backward of it
        given = [x.detach() for x in given]

    def block_mask(documents, window):
        ids = torch.zeros(length, dtype=torch.int64, device=where)
        ids = ids if documents is None else documents[0].to(where)
        limit = torch.tensor(window or length, device=where)

        def sees(_, head, i, j):
            return (ids[i] == ids[j]) & (i >= j) & (i - j < limit)

        return create(sees, None, None, length, length, device=where)

    def forward_backward(mask):
        out = attend(*given, block_mask=mask, enable_gqa=True)
        if out.requires_grad:
            torch.autograd.grad(out, given, out.detach())

    return block_mask, forward_backward


def document_attention(length, device, backend):
    """Milliseconds of attention forward and backward by mask, and ratios to causal attention."""
    on_cuda = device.type == "cuda"
    scale, rounds = (1, 20) if on_cuda else (length // 256, 3)
    length //= scale
    q, k, v = (
        torch.randn(1, heads, length, 128, device=device.torch_device, dtype=torch.bfloat16)
        for heads in (32, 8, 8)
    )
    given = [x.requires_grad_() for x in (q, k, v)]

    def forward_backward(core, documents, window):
        torch.autograd.grad(core(*given, documents, window), given, q.detach())

    ways, (block_mask, flex) = {}, flex_ways(given, backend)
    for name, (size, window) in MASKS.items():
        documents = torch.arange(length)[None] // max(size // scale, 1) if size else None
        mask = documents, window // scale
        ways[name] = partial(forward_backward, causal_attention, *mask)
        if size:
            ways[f"{name}, a call each"] = partial(forward_backward, each_alone, documents, 0)
        if window or size in (1000, 8000):  # few, as each may be compiled
            ways[f"{name}, FlexAttention"] = partial(flex, block_mask(*mask))
    ways["a block mask"] = partial(block_mask, *mask)
    whole = torch.zeros(1, length, dtype=torch.int64)
    ways["one document"] = partial(forward_backward, causal_attention, whole, 0)
    dense = torch.arange(length, device=device.torch_device)[None] // max(1000 // scale, 1)
    ways[DENSE] = partial(forward_backward, dense_attention, dense, 0)
    taken, first = in_turns(ways, device, rounds)
    figures = relative(taken, "causal")
    return {name: found | {"GiB": first[name][1]} for name, found in figures.items()}

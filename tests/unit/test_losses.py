"""The loss a chunk of the vocabulary at a time is the same loss, and never has the logits."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests import tiny
from tests.ranks import run_ranks
from tests.unit.models import families
from torchtitan.losses import (
    LossConfig,
    ZLoss,
    cross_entropy,
    linear_losses,
    vocabulary_parallel_cross_entropy,
)
from torchtitan.models import MODELS
from torchtitan.parallel import CompileConfig, loss
from torchtitan.parallel.loss import AuxiliaryLosses

TOKENS, VOCABULARY, DIM = 24, 101, 16


def inputs(dtype, tokens=TOKENS, vocabulary=VOCABULARY, dim=DIM):
    """Hidden states, the weight of an output, and targets of which a few do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, dim, dtype=dtype, generator=generator)
    weight = torch.randn(vocabulary, dim, dtype=dtype, generator=generator) / 4
    targets = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    targets[0, :3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(value, of):
    """Of a mean, as training has it."""
    return list(torch.autograd.grad(value / TOKENS, of))


def whole(hidden, weight, targets):
    """Torch's own, rounding where `cross_entropy` does."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk", [7, 50, 101, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)],
    ids=["float64", "float32", "bfloat16"],
)
def test_loss_and_gradients_are_those_of_whole_logits(dtype, tolerance, chunk):
    hidden, weight, targets = inputs(dtype)
    expected = whole(hidden, weight, targets)
    found = linear_losses(hidden, weight, targets, chunk, None, VOCABULARY)[0]
    # Logits are rounded at the same place; what follows is precise, but for a last rounding.
    torch.testing.assert_close(found, expected, rtol=min(tolerance, 1e-6), atol=0)
    for ours, theirs in zip(
        gradients(found, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
    ):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_targets_that_do_not_count():
    hidden, weight, targets = inputs(torch.float32)
    of_hidden, _ = gradients(
        linear_losses(hidden, weight, targets, 10, None, VOCABULARY)[0], (hidden, weight)
    )
    assert (of_hidden[0, :3] == 0).all()
    assert (of_hidden[0, 3:] != 0).any(-1).all()

    none = torch.full_like(targets, -100)
    value = linear_losses(hidden, weight, none, 10, None, VOCABULARY)[0]
    assert value == 0
    assert all((gradient == 0).all() for gradient in gradients(value, (hidden, weight)))


def test_large_logits_overflow_nowhere():
    hidden, weight, targets = inputs(torch.float32)
    hidden, weight = hidden.detach() * 1e3, weight.detach() * 1e3
    found = linear_losses(hidden, weight, targets, 10, None, VOCABULARY)[0]
    torch.testing.assert_close(found, whole(hidden, weight, targets))


def in_chunks(model, args, auxiliary=None):
    of = {"compile_config": CompileConfig(), "auxiliary": auxiliary or AuxiliaryLosses([])}
    config = LossConfig(vocabulary_chunk=64)
    loss.apply(model, config, args.vocab_size, None, sequence_parallel=False, **of)


@pytest.mark.parametrize("flavor", ["tiny", "tied"])
def test_a_model_gives_its_loss(flavor):
    args = tiny.FLAVORS[flavor]
    model = families.drawn(tiny.LLAMA3, args, 16, std=0.3, of_norms=0.3)
    ids = torch.randint(args.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    in_chunks(model, args)
    expected = cross_entropy(model(tokens), targets)
    found = model(tokens, targets=targets)
    torch.testing.assert_close(found, expected)
    ours, theirs = (gradients(each, [*model.parameters()]) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_auxiliary_losses_of_a_model_are_their_formulas():
    """Of later tokens those of DeepSeek-V3, section 2.2; the z-loss of the next token alone."""
    args = dataclasses.replace(tiny.FLAVORS["tiny"], multi_token=2, base_width=16)
    model = families.drawn(tiny.LLAMA3, args, 16, std=0.3, of_norms=0.3)
    auxiliary = AuxiliaryLosses(("multi_token_1", "multi_token_2"), [ZLoss(weight=0.5)])
    auxiliary.attach([model], [], None)
    in_chunks(model, args, auxiliary)
    ids = torch.randint(args.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    tokens, targets = ids[:, :-3], ids[:, 1:-2].clone()
    targets[0, :3] = -100
    pairs = ids.unfold(1, 2, 1)
    later = {"ahead_tokens": pairs[:, 1:-1], "ahead_targets": pairs[:, 2:]}
    weights, positions = [*model.parameters()], torch.arange(16)[None]
    with auxiliary.recording(torch.tensor(TOKENS)) as found:
        ours = gradients(model(tokens, targets=targets, **later), weights)
    hidden = model.tok_embeddings(tokens)
    for block in model.layers.values():
        hidden = block(hidden, positions, None)
    logits = model.output(model.norm(hidden)) / 2
    z_loss = logits.logsumexp(-1)[targets != -100].square().sum()
    torch.testing.assert_close(found["loss/z_loss"], z_loss / TOKENS)
    total = cross_entropy(logits, targets) + 0.5 * z_loss
    for depth in (1, 2):
        tokens, targets = (each[..., depth - 1] for each in later.values())
        module, embedded = model.auxiliary[str(depth)], model.tok_embeddings(tokens)
        both = torch.cat((module.hidden_norm(hidden), module.token_norm(embedded)), -1)
        hidden = module.block(module.project(both), positions, None)
        expected = cross_entropy(model.output(module.norm(hidden)) / 2, targets)
        torch.testing.assert_close(found[f"loss/multi_token_{depth}"], expected / TOKENS)
        total = total + expected
    torch.testing.assert_close(ours, gradients(total, weights), rtol=1e-4, atol=1e-5)


def test_a_model_that_ends_in_no_linear_loss_is_refused(monkeypatch):
    def build(args, seq_len):
        model = tiny.LLAMA3.build(args, seq_len)
        model.loss = nn.Identity()
        return model

    plain = dataclasses.replace(MODELS["tiny"], name="plain", build=build)
    monkeypatch.setitem(MODELS, "plain", plain)
    keys = {"model": {"name": "plain"}, "loss": {"vocabulary_chunk": 64}}
    message = "plain does not end in a LinearLoss, which computes the chunks; use 0"
    (problem,) = tiny.problems(tiny.job(**keys))
    assert problem[:2] == ("loss.vocabulary_chunk", message)


def test_a_setting_that_changes_nothing_is_told():
    keys = {"loss": {"vocabulary_chunk": 64}, "parallelism": {"disable_loss_parallel": True}}
    (note,) = tiny.problems(tiny.job(**keys), severity="note")
    assert note.path == "parallelism.disable_loss_parallel"
    assert note.message.startswith("it has no effect with loss.vocabulary_chunk")


def allocations(function):
    """Bytes that were in use at a time, at most, and bytes of the largest tensor."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)), max(sizes)


def peak_bytes(n, v, d, chunk, dtype, is_compiled=False):
    """The formulas of docs/loss.md, and for float32."""
    size = dtype.itemsize
    if not chunk:
        return (2 * size if is_compiled else 12) * n * v
    if is_compiled and dtype == torch.bfloat16:
        return 4 * n * chunk + 4 * n * d + size * v * d
    # While the gradient of a chunk is cast; or while what it adds to the sum is there.
    casting, adding = (4 + size) * n * chunk + 4 * n * d, size * n * chunk + 8 * n * d
    return (adding if dtype == torch.float32 else casting) + size * v * d


SIZES = (512, 4000, 64)


def count(dtype, chunk, backend):
    """`allocations` of forward and backward of output and loss, once it is compiled."""
    n, v, d = SIZES
    hidden, weight, targets = inputs(dtype, n, v, d)
    of_logits = torch.compile(cross_entropy, backend=backend) if backend else cross_entropy

    def step():
        if chunk:
            value = linear_losses(hidden, weight, targets, chunk, None, v, backend)[0]
        else:
            value = of_logits(F.linear(hidden, weight), targets)
        value.backward()
        hidden.grad = weight.grad = None

    step()
    return allocations(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_is_that_of_the_formula(dtype):
    """As the allocator counts it in forward and backward; nothing is as large as all logits."""
    for chunk in (0, 500, 1000):
        peak, largest = count(dtype, chunk, "")
        assert peak == pytest.approx(peak_bytes(*SIZES, chunk, dtype), rel=0.02)
        n, v, d = SIZES
        # Some CPUs multiply bfloat16 in a buffer of their own, some bytes larger than the result.
        assert largest == pytest.approx(max(4 * n * (chunk or v), dtype.itemsize * v * d), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_when_compiled(dtype, chunk):
    ((peak, _),) = run_ranks(count, 1, dtype, chunk, "inductor")
    assert peak == pytest.approx(peak_bytes(*SIZES, chunk, dtype, is_compiled=True), rel=0.02)


def test_page_gives_what_the_formulas_say():
    page = (Path(__file__).parents[2] / "docs/loss.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for chunk, *cells in rows:
        for cell, is_compiled in zip(cells, (False, True), strict=True):
            sizes = (8192, 128_256, 4096, int(chunk))
            assert cell == f"{peak_bytes(*sizes, torch.bfloat16, is_compiled) / 2**30:.2f}"


def split_over_ranks(vocabulary):
    """The loss of every token of a vocabulary and its gradient: from parts, in both ways, whole."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    hidden, targets = torch.randn(1, vocabulary, 4), torch.arange(vocabulary)[None]
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    part = weight.detach().chunk(ranks)[rank].requires_grad_()
    split = vocabulary_parallel_cross_entropy(F.linear(hidden, part), targets, group, vocabulary)
    half = F.linear(hidden, part).bfloat16()
    assert (
        vocabulary_parallel_cross_entropy(half, targets, group, vocabulary).dtype == torch.float32
    )
    chunked, lse = linear_losses(hidden, part, targets, 2, group, vocabulary)
    torch.testing.assert_close(lse, F.linear(hidden, weight).logsumexp(-1))
    total = cross_entropy(F.linear(hidden, weight), targets)
    (gradient,) = torch.autograd.grad(total, weight)
    found = [(each.detach(), *torch.autograd.grad(each, part)) for each in (split, chunked)]
    return [*found, (total.detach(), gradient.chunk(ranks)[rank])]


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 7), (3, 10)])
def test_parts_of_a_vocabulary_that_ranks_do_not_divide(ranks, vocabulary):
    """Every token is a target: bytes of English text are all in the first half."""
    for split, chunked, expected in run_ranks(split_over_ranks, ranks, vocabulary):
        torch.testing.assert_close(split, expected)
        torch.testing.assert_close(chunked, expected)

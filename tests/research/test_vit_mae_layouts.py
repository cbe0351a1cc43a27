"""ViT-MAE trains the same run on every layout, and resumes on another."""

from functools import cache

import pytest
import torch

from tests import layouts, tiny
from tests.layouts import NO_SEQUENCE, OPTIMIZERS, case
from tests.ranks import run_ranks
from tests.research.layouts import of_system
from tests.runs import assert_complete, compare, compare_converted, losses, trace, train
from tests.tables import data
from tests.tiers import tiers
from torchtitan import parallel
from torchtitan.job import JobConfig
from torchtitan.models.spec import initialize
from torchtitan.plan.expansion import expand
from torchtitan.plan.fake_rank import record

MODEL = tiny.VIT_MAE
EVEN = {**MODEL, "n_layers": 2, "decoder_dim": 32, "decoder_ffn_dim": 64}
"""Matrices whose halves are in multiples of 16, as a converter needs them."""
BY_HAND = (
    ("embeddings", "layers.0", "layers.1"),
    ("layers.2", "bridge", "decoder.0", "decoder.1", "decoder_norm", "output"),
)

TABLE = data(__file__)
LAYOUTS = {
    **{name: of_system(name) for name in TABLE["of_systems"]},
    **{
        name: layouts.layout(f"{name}, no sequence parallelism")
        for name in TABLE["whole_sequences"]
    },
    "PP 2, cut by hand": case(2, module_fqns_per_model_part=BY_HAND),
    "FSDP 2, Float8 rowwise": case(shard=2, batch=16, convert=layouts.ROWWISE),
    "FSDP 2, Float8 tensorwise": case(shard=2, batch=16, convert=layouts.TENSORWISE),
}
DRIFT = 2e-3
"""What Float8 may make of rounding in five steps; a nudge of all weights made 5e-4 of it."""


def job(layout, optimizer, **sections):
    """A tiny ViT-MAE in `layout`; clipping acts in every step, so its scale is compared too."""
    training = {"max_norm": 0.3} | sections.pop("training", {})
    if layout.convert:
        training["global_batch_size"] = 32
    folder = sections.pop("job", {}).get("dump_folder", "unused")
    recipe = layout.recipe(
        model=(EVEN if layout.convert else MODEL) | layout.model,
        data={"dataset": "scenes"},
        optimizer={"name": optimizer, **OPTIMIZERS[optimizer]},
        training=training,
        **sections,
    )
    made = tiny.job(folder, **recipe).model_copy(update={"convert": layout.convert})
    assert not tiny.problems(made)
    return made


def traces(jobs):
    """A run of each job on this rank, one after the other.

    A key's bias moves all scores of a query alike, which the softmax takes away again: its gradient
    is rounding alone, and Adam makes steps of any gradient. So that bias is compared with SGD only.
    """
    found = [trace(job) for job in jobs]
    for job, each in zip(jobs, found, strict=True):
        for weights in each.weights if job.optimizer.name == "AdamW" else ():
            for name in [name for name in weights if name.endswith("attention.wk.bias")]:
                del weights[name]
    return found


def reference(layout, optimizers):
    one = case(batch=16 if layout.convert else 8, convert=layout.convert)
    return _reference(*(job(one, name).model_dump_json() for name in optimizers))


@cache
def _reference(*recipes):
    jobs = [JobConfig.model_validate_json(recipe) for recipe in recipes]
    (result,) = run_ranks(traces, 1, jobs)
    return result


@pytest.mark.parametrize("name", tiers(LAYOUTS, TABLE["daily"], gate=TABLE["gate"]))
def test_layout_trains_the_same_run_as_one_rank(name):
    layout = LAYOUTS[name]
    optimizers = layouts.compared_by(layout)
    results = run_ranks(traces, layout.ranks, [job(layout, each) for each in optimizers])
    same = compare_converted if layout.convert else compare
    for optimizer, expected, *found in zip(
        optimizers, reference(layout, optimizers), *results, strict=True
    ):
        assert_complete(found, expected)
        for rank, own in enumerate(found):
            same(own, expected, f"{optimizer}, rank {rank}")


def nudged_traces(jobs):
    """Runs that begin with weights off by what float32 can just tell, each otherwise."""
    draw = torch.Generator().manual_seed(0)

    def nudged(named, *rule):
        weights = list(named)
        initialize(weights, *rule)
        with torch.no_grad():
            for _, weight in weights:
                weight.mul_(1 + 2**-23 * torch.randn(weight.shape, generator=draw).sign())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "initialize", nudged)
        return traces(jobs)


def drift(found, expected):
    """How far a loss comes to be from that of the other run, relatively."""
    pairs = zip(found.losses, expected.losses, strict=True)
    return max(abs(one - other) / other for one, other in pairs)


@pytest.mark.slow
def test_float8_with_tensor_parallelism_differs_as_rounding_does():
    """A sum that ranks share is rounded otherwise, and what lies between two numbers of 8 bits may
    then become the other: so also on one rank, whose weights are nudged. In the first step, from
    the same weights, the loss is not off yet, and gradients only as far as a nudge takes them.
    """
    layout = case(tp=2, batch=16, convert=layouts.ROWWISE, **NO_SEQUENCE)
    jobs = [job(layout, optimizer) for optimizer in OPTIMIZERS]
    alone = [job(case(batch=16, convert=layouts.ROWWISE), optimizer) for optimizer in OPTIMIZERS]
    expected = reference(layout, list(OPTIMIZERS))
    (nudged,) = run_ranks(nudged_traces, 1, alone)
    split = run_ranks(traces, 2, jobs)
    for found in split:
        assert_first_steps_agree(found, expected)
    for found in (nudged, *split):
        for one, other in zip(found, expected, strict=True):
            assert drift(one, other) <= DRIFT


def assert_first_steps_agree(found, expected):
    for name, one, other in zip(OPTIMIZERS, found, expected, strict=True):
        assert one.losses[0] == pytest.approx(other.losses[0], rel=1e-6), name
        assert one.grad_norms[0] == pytest.approx(other.grad_norms[0], rel=1e-4), name
        for weight, part in one.weights[0].items() if name == "SGD" else ():
            after, later = (other.weights[step][weight] for step in (0, 1))
            off = (part.of(after) - part.local).abs().max()
            assert off <= 2e-3 * (later.local - after.local).abs().max() + 1e-8, weight


@pytest.mark.gate
def test_a_run_goes_on_with_another_layout(tmp_path):
    def run(folder, layout, steps):
        sections = {"job": {"dump_folder": str(tmp_path / folder)}, **layouts.resumed(steps)}
        run_ranks(train, layout.ranks, job(layout, "AdamW", **sections))
        return losses(tmp_path / folder)

    whole = run("whole", case(batch=8), 4)
    run("parts", LAYOUTS["HSDP 2 x 2"], 2)
    resumed = run("parts", LAYOUTS["TP 2"], 4)
    assert list(resumed) == list(whole) == [1, 2, 3, 4]
    assert list(resumed.values()) == pytest.approx(list(whole.values()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FSDP 2, full recomputation", "PP 2, 1F1B"])
def test_blocks_of_both_widths_are_left_out_of_a_plan(name):
    layout = LAYOUTS[name].of(n_layers=12, decoder_layers=8)
    made, ranks = job(layout, "AdamW"), layout.ranks
    for rank in range(ranks):
        found, whole = (record(made, ranks, rank, shorten=each) for each in (True, False))
        assert len(found.recording.events) < len(whole.recording.events)
        passes = made.accumulation(made.degrees(ranks))
        short, long = (expand(each, passes).peak() for each in (found, whole))
        assert short[1].total() == pytest.approx(long[1].total(), rel=1e-3)

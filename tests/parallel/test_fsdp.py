"""Strategies of FSDP (arXiv:2304.11277): what each sends and holds, and what they do on CUDA."""

from collections import Counter
from functools import partial

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tests import layouts
from tests.layouts import RESHARD, case
from tests.plan import recorded
from tests.ranks import run_ranks
from tests.runs import trace
from torchtitan.comm import Communicator, PlainGather, PlainGradients, PlainReduce, PlainWeights
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel.sharding import FullyShard, ShardingTarget
from torchtitan.plan.messages import link_traffic

ALWAYS, NEVER = {RESHARD: "always"}, {RESHARD: "never"}
STRATEGIES = {
    "no shard": (case(replicate=4, batch=2), 2 * 3 / 4, 0),
    "grad-op": (case(shard=4, **NEVER), 2 * 3 / 4, 0),
    "full shard": (case(shard=4, **ALWAYS), 2 * 3 / 4, 3 / 4),
    "regathered by 2": (case(shard=4, sharding=layouts.REGATHER, **ALWAYS), 2 * 3 / 4, 1 / 2),
    "hybrid full shard": (case(replicate=2, shard=2, **ALWAYS), 2 / 2 + 2 * 1 / 2 / 2, 1 / 2),
    "hybrid grad-op": (case(replicate=2, shard=2, **NEVER), 2 / 2 + 2 * 1 / 2 / 2, 0),
}
"""Each with what a rank sends in a step, in parameters of the model, and what it sends to gather
those that the backward needs again: all but the embedding's."""


def recipe(layout, **sections):
    """One whose matrices all ranks divide."""
    return layouts.job(layout, "AdamW", model={"flavor": "even"}, **sections)


def sent(layout):
    """Bytes that a rank sends in a step, by operation."""
    found = Counter[str]()
    for one in link_traffic(recorded.step(recipe(layout), layout.ranks), layout.ranks):
        found[one.operation] += one.bytes
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_sends_what_the_paper_says(name):
    layout, once, again = STRATEGIES[name]
    job = recipe(layout)
    assert job.accumulation(job.degrees(layout.ranks)) == 1
    spec = MODELS[job.model.name]
    model = build_empty(spec.build, job.model_args(), job.training.seq_len)
    size = sum(parameter.nbytes for parameter in model.parameters())
    expected = once * size + again * (size - model.get_parameter("tok_embeddings.weight").nbytes)
    # Rows of the tables are filled up.
    assert sent(layout).total() == pytest.approx(expected, rel=5e-3)


def test_accumulating_whole_reduces_once():
    """With 4 microbatches, gathers are the same, and there is one reduction in place of 4."""
    parts, whole = (sent(case(shard=2, batch=1, sharding=how)) for how in ({}, layouts.WHOLE))
    assert parts["all_gather"] == whole["all_gather"] > 0
    assert parts["reduce_scatter"] == 4 * whole["reduce_scatter"] > 0


@pytest.mark.parametrize("flavor", ["tiny", "tied"])
def test_embedding_and_output_are_gathered_only_while_they_are_used(flavor):
    """Of a large vocabulary each is most of the model; one matrix for both is used all the time."""
    job = layouts.job(case(shard=2).of(flavor=flavor, vocab_size=8192), "AdamW")
    model = build_empty(MODELS[job.model.name].build, job.model_args(), job.training.seq_len)
    table = model.get_parameter("tok_embeddings.weight").nbytes
    step = recorded.step(job, 2)
    held = {segment.name: level["gathered"] for segment, level in step.levels()}
    for name in ("forward of layers.0", "backward of layers.0"):
        assert (held[name] > table) is (flavor == "tied")
    assert table < held["backward"] < 1.1 * table


def overlapped(job):
    """A run that gathers ahead as on CUDA, where a CPU has it done at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardingTarget, "overlaps", True)
        return trace(job)


@pytest.mark.gate
def test_gathering_ahead_changes_nothing():
    ahead = {"name": "fsdp2", "forward_prefetch": 2, "backward_prefetch": 2}
    expected, _ = run_ranks(trace, 2, recipe(case(shard=2, **ALWAYS)))
    found, _ = run_ranks(overlapped, 2, recipe(case(shard=2, sharding=ahead, **ALWAYS)))
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms


class Noted(Communicator):
    """A communicator that notes each call before it makes it."""

    def __init__(self, note, call):
        self.note, self.call = note, call

    def __call__(self, *buffers):
        self.note()
        self.call(*buffers)


def order_of_issue(job, *, prefetches=True):
    """What a step as on CUDA does with which unit: "gather", "compute" (forward) or "reduce"."""
    order = []
    apply = FullyShard.apply

    def noting(what, unit):
        return lambda *_: order.append((what, unit))

    def opening(what, method):
        return lambda _, unit, group: Noted(noting(what, unit.name), method(group))

    def applied(self, part, blocks):
        apply(self, part, blocks)
        for name, block in blocks.items():
            block.register_forward_hook(noting("compute", name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardingTarget, "overlaps", True)
        patch.setattr(FullyShard, "apply", applied)
        patch.setattr(PlainWeights, "open", opening("gather", PlainGather))
        patch.setattr(PlainGradients, "open", opening("reduce", PlainReduce))
        if not prefetches:
            patch.setattr(FSDPParamGroup, "_prefetch_unshard", lambda *_: None)
        trace(job)
    return order


def gathered_ahead(order, blocks, event):
    """How many of the following `blocks` are gathered at the `event` of each."""
    begin = min(order.index(("gather", block)) for block in blocks)
    ahead = []
    for number, block in enumerate(blocks):
        issued = order[begin : order.index((event, block))]
        ahead.append(sum(("gather", later) in issued for later in blocks[number + 1 :]))
    return ahead


@pytest.mark.parametrize(
    ("forward", "backward", "prefetches"), [(0, 1, True), (2, 3, True), (2, 1, False)]
)
def test_blocks_are_gathered_ahead(forward, backward, prefetches):
    """The next gathers are issued before a block is computed, or its gradients are reduced."""
    sharding = {"name": "fsdp2", "forward_prefetch": forward, "backward_prefetch": backward}
    layout = case(shard=2, batch=4, sharding=sharding, **ALWAYS)
    job = layouts.job(layout, "SGD", model={"flavor": "deep"}, training={"steps": 1})
    blocks = [f"layers.{number}" for number in range(6)]
    # The norm and the output are a unit, which is gathered for the forward and for the backward.
    once, both_times = (["norm"], ["norm"]) if forward and prefetches else ([], ["norm", "norm"])
    expected = ["tok_embeddings", *blocks, *once, *both_times, *blocks[::-1]]
    for order in run_ranks(partial(order_of_issue, prefetches=prefetches), 2, job):
        assert [unit for what, unit in order if what == "gather"] == expected
        turn = order.index(("compute", blocks[-1])) + 1
        both = order[:turn], order[turn:]
        for half, named, event, ahead in zip(
            both,
            (blocks, blocks[::-1]),
            ("compute", "reduce"),
            (forward, backward) if prefetches else (0, 0),
            strict=True,
        ):
            assert gathered_ahead(half, named, event) == [min(ahead, 5 - n) for n in range(6)]


def inputs_of_fsdp(job):
    """Train on this rank; the names of inputs that FSDP2 would move to its device."""
    seen = set()
    shown = FSDPState._root_pre_forward

    def watched(self, module, args, inputs):
        seen.update(inputs)
        return shown(self, module, args, inputs)

    FSDPState._root_pre_forward = watched
    trace(job, True, "cpu")
    return seen


def test_tensors_on_the_host_stay_there():
    """FSDP2 moves the inputs of a model to its device; attention reads documents on the host."""
    job = recipe(case(shard=2, documents=True), training={"steps": 1})
    assert not set().union(*run_ranks(inputs_of_fsdp, 2, job)) & {"documents", "positions"}

"""What a recipe names in [communication] is what carries weights and gradients."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests import layouts, tiny
from tests.layouts import AFTERWARDS, LAYOUTS, case
from tests.ranks import run_ranks
from tests.runs import each, trace, train
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.comm import GRADIENTS, WEIGHTS, NarrowReduce
from torchtitan.config import RecipeError
from torchtitan.torch_private.distributed import reduce_scatter_into

STEPS = 3
HALF = {"weights": {"name": "half"}, "gradients": {"name": "half"}}
COUNTED = {"replicas": {"name": "counted"}}


class Used(NamedTuple):
    """What a rank saw of a run."""

    losses: list[float]
    norms: list[float]
    weights: list[torch.Tensor]
    calls: Counter[str]
    buffers: dict[str, tuple[int, int]]


def used(job):
    from tests import senders  # as `job.imports` has it, in the process that forked this one too

    senders.USED.clear()
    found = trace(job)
    weights = [part.local for part in found.weights[-1].values()]
    calls, buffers = senders.USED.copy(), senders.BUFFERS.copy()
    return Used(found.losses, found.grad_norms, weights, calls, buffers)


def job(layout, communication, **sections):
    imports = {"imports": ["tests.senders"], "dump_folder": "unused"}
    load_job(None, ["--job.imports", "tests.senders"], 1, "cpu")
    training = {"steps": STEPS}
    recipe = layouts.job(
        layout, "SGD", communication=communication, training=training, job=imports, **sections
    )
    assert "half" in WEIGHTS
    return recipe


def test_weights_and_gradients_are_sent_as_named():
    plain = run_ranks(used, 2, job(case(shard=2), {}))
    half = run_ranks(used, 2, job(case(shard=2), HALF))
    for rank, (found, expected) in enumerate(zip(half, plain, strict=True)):
        # Two microbatches a step; the embedding, the last block, and the norm with the output are
        # gathered once in each.
        passes = 2 * STEPS
        assert found.calls == {
            "gather tok_embeddings": passes,
            "gather layers.0": 2 * passes,
            "gather layers.1": passes,
            "gather norm": passes,
            **{f"reduce {u}": passes for u in ("tok_embeddings", "layers.0", "layers.1", "norm")},
        }, rank
        assert not expected.calls
        assert found.losses == pytest.approx(expected.losses, rel=2e-2)
        assert found.losses != expected.losses
        assert all(in_unit == sent for in_unit, sent in found.buffers.values())


def test_copies_and_parts_are_sent_as_named():
    layout, ways = case(replicate=2, shard=2, batch=1), (HALF, COUNTED, HALF | COUNTED)
    ranks = run_ranks(each, 4, used, [job(layout, way) for way in ({}, *ways)])
    for plain, *others in ranks:
        for way, found in zip(ways, others, strict=True):
            tolerance = 2e-2 if "weights" in way else 1e-6
            assert found.losses == pytest.approx(plain.losses, rel=tolerance)
            assert found.norms == pytest.approx(plain.norms, rel=tolerance)
            assert bool(found.calls["reduce layers.0"]) == ("weights" in way)
            assert found.calls["agree"] == STEPS * ("replicas" in way)
    # Copies stay the same to the bit: ranks 0 and 2, and ranks 1 and 3.
    for one, other in ((0, 2), (1, 3)):
        for found, copy in zip(ranks[one], ranks[other], strict=True):
            pairs = zip(found.weights, copy.weights, strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def saved(layout, communication, steps, folder, interval=2):
    """Train, saving every `interval` steps; the weights at the end."""
    recipe = layouts.saving(layout, "AdamW", folder, steps, interval, communication=communication)
    return train(recipe)


def both(folder):
    """Save with copies that agree afterwards; resume so, and as copies are added up by FSDP2."""
    layout = LAYOUTS["HSDP 2 x 2"]
    return [saved(layout, way, n, folder) for n, way in ((2, AFTERWARDS), (4, AFTERWARDS), (4, {}))]


def test_checkpoints_do_not_depend_on_how_copies_agree(tmp_path):
    for _, resumed, loaded in run_ranks(both, 4, str(tmp_path)):
        assert all(torch.equal(loaded[name], weight) for name, weight in resumed.items())


def stopped(folder):
    """Train four steps at once; two and two; then resume on another layout, and without a state."""
    sharded, half = case(shard=2), {"gradients": {"name": "half"}}
    return [
        saved(layout, half, steps, f"{folder}/{name}")
        for name, steps, layout in (
            *(("a", 4, sharded), ("b", 2, sharded), ("b", 4, sharded)),
            *(("c", 2, sharded), ("c", 4, case(replicate=2))),
        )
    ]


@pytest.mark.gate
def test_what_a_way_keeps_is_in_a_checkpoint(tmp_path):
    load_job(None, ["--job.imports", "tests.senders"], 1, "cpu")
    for at_once, _, resumed, *_ in run_ranks(stopped, 2, str(tmp_path)):
        assert all(torch.equal(at_once[name], weight) for name, weight in resumed.items())
    saved = SavedTensors(tmp_path / "a" / "checkpoint" / "step-4").shapes()
    names = {f"communication.{rank}.gradients.{n}.error" for rank in range(2) for n in range(4)}
    assert {name for name in saved if name.startswith("communication.")} == names


def apart(folder, layout, steps):
    """Train replicas that agree in every second step; a step later than that, they differ."""
    return saved(layout, {"replicas": {"every": 2, "verify_steps": 1}}, steps, folder, steps)


def test_replicas_that_were_apart_agree_on_another_layout(tmp_path):
    run_ranks(apart, 4, str(tmp_path), case(replicate=2, shard=2, batch=1), 3)
    one, other = run_ranks(apart, 2, str(tmp_path), case(replicate=2, batch=2), 4)
    assert all(torch.equal(other[name], weight) for name, weight in one.items())


def test_a_sharding_from_outside_trains_the_run_of_fsdp():
    layout = case(shard=2)
    jobs = [job(layout, {}), job(layout, {}, sharding={"name": "whole"})]
    expected, found = run_ranks(each, 2, used, jobs)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


def errors_of_sums():
    """What a sum of normal numbers is off, sent in bfloat16 and summed in float32 or bfloat16."""
    group = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    rows = [torch.randn(ranks, 4096, generator=torch.manual_seed(n)) for n in range(ranks)]
    whole, exact = rows[rank].flatten(), sum(row[rank].double() for row in rows)
    part, rounded = torch.empty(4096), torch.empty(4096, dtype=torch.bfloat16)
    NarrowReduce(group)(part, whole)
    reduce_scatter_into(rounded, whole.bfloat16(), group)
    expected = torch.stack([row[rank].bfloat16().float() for row in rows]).sum(0)
    assert torch.equal(part, expected)
    return [((found - exact).norm() / exact.norm()).item() for found in (part, rounded)]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_sum_in_float32_of_bfloat16_is_nearer(ranks):
    for narrow, rounded in run_ranks(errors_of_sums, ranks):
        assert narrow < 2**-9 < rounded < 2**-6


@pytest.mark.parametrize(
    "layout", [case(shard=2), case(replicate=2, shard=2)], ids=["FSDP", "HSDP"]
)
def test_gradients_are_sent_in_bfloat16(layout):
    narrow = {"gradients": {"dtype": "bfloat16", "sum": "float32"}}
    plain, found = (run_ranks(used, layout.ranks, job(layout, way)) for way in ({}, narrow))
    for ours, expected in zip(found, plain, strict=True):
        assert ours.losses == pytest.approx(expected.losses, rel=1e-3)
        assert ours.norms == pytest.approx(expected.norms, rel=1e-2)
        assert ours.norms != expected.norms


def test_bfloat16_needs_a_sum_in_float32():
    narrow = {"gradients": {"dtype": "bfloat16"}}
    training = {"mixed_precision_reduce": "bfloat16"}
    (problem,) = tiny.problems(tiny.job(communication=narrow, training=training), ranks=2)
    assert problem.path == "communication.gradients.dtype"
    (note,) = tiny.problems(tiny.job(communication=narrow), severity="note", ranks=1)
    assert note.message == "no two ranks share gradients, so this has no effect"


def having_bits():
    """The ways that have `bits`, in words."""
    names = [name for name, way in GRADIENTS.items() if "bits" in way.model_fields]
    *others, last = names
    return f"{', '.join(others)} and {last} have bits" if others else f"{last} has bits"


def test_settings_belong_to_the_way_that_has_them(tmp_path):
    recipe = tmp_path / "bad.toml"
    recipe.write_text('[job]\nimports = ["tests.senders"]\n[communication.gradients]\nbits = 8\n')
    with pytest.raises(RecipeError) as error:
        load_job(recipe, [], 2, "cpu")
    assert error.value.lines == [
        f"{recipe}:4: communication.gradients.bits: unknown key of plain; allowed: name, dtype, "
        f"sum; {having_bits()}"
    ]
    flags = ["--communication.gradients.name", "half"]
    gradients = load_job(recipe, flags, 2, "cpu").config.communication.gradients
    assert gradients.model_dump() == {"name": "half", "bits": 8}

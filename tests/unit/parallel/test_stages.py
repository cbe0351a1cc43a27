"""Where a model is cut, and what a stage is."""

import dataclasses
import itertools
import random

import pytest
from torch import nn

from tests import tiny
from torchtitan.models.llama3 import FLAVORS, LLAMA3
from torchtitan.models.spec import build_empty
from torchtitan.parallel import ParallelismConfig, stages
from torchtitan.parallel.stages import balance, costs, plan, predicted_bubble, prune, units

ARGS = dataclasses.replace(tiny.ARGS, n_layers=6)
SEQ_LEN = 32


def model():
    return build_empty(LLAMA3.build, ARGS, SEQ_LEN)


def config(pp=2, schedule="1F1B", **rest):
    keys = {"degree": pp, "schedule": schedule, **rest}
    parts = keys.pop("parts", ())
    return ParallelismConfig(
        module_fqns_per_model_part=parts,
        **{f"pipeline_parallel_{key}": value for key, value in keys.items()},
    )


def cut(pp=2, schedule="1F1B", **rest):
    return plan(config(pp, schedule, **rest), LLAMA3, ARGS, model(), SEQ_LEN)


def test_balance_is_the_best_of_all_cuts():
    choose = random.Random(0)
    for _ in range(200):
        weights = [choose.randint(0, 5) for _ in range(choose.randint(1, 8))]
        parts = choose.randint(1, len(weights))
        ends = [part.stop for part in balance(weights, parts)]

        def rank(ends, weights=weights):
            each = [sum(weights[i:j]) for i, j in itertools.pairwise((0, *ends))]
            return max(each), sum(cost**2 for cost in each), tuple(ends)

        inner = itertools.combinations(range(1, len(weights)), parts - 1)
        assert rank(ends) == min(rank([*some, len(weights)]) for some in inner)


def test_balance_gives_every_stage_something_and_the_first_ones_less():
    assert balance([0, 1, 1, 1, 1, 2], 4) == [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6)]
    assert balance([0, 0, 5], 3) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert balance([1] * 7, 2) == [slice(0, 3), slice(3, 7)]


def test_balance_of_many_stages():
    parts = balance([0.1, *[1.0] * 126, 0.7], 64)
    assert [part.stop - part.start for part in parts] == [2] * 64


def test_costs_add_up_to_the_whole_model():
    network = model()
    flops = costs(config(), LLAMA3, ARGS, network, SEQ_LEN)
    assert sum(flops) == LLAMA3.flops_per_unit(ARGS, SEQ_LEN)
    assert flops[0] == 0
    head = 6 * (ARGS.dim + ARGS.dim * ARGS.vocab_size)
    assert flops[-1] == head
    assert len(set(flops[1:-1])) == 1
    parameters = costs(config(balance="parameters"), LLAMA3, ARGS, network, SEQ_LEN)
    assert sum(parameters) == sum(p.numel() for p in network.parameters())
    assert parameters[0] == ARGS.dim * ARGS.vocab_size
    assert parameters[-1] == head / 6


def test_weights_of_embedding_and_head_are_in_layers():
    found = costs(config(embedding_weight=2.0, head_weight=0.5), LLAMA3, ARGS, model(), SEQ_LEN)
    assert found[0] == 2 * found[1]
    assert found[-1] == 0.5 * found[1]


def test_long_sequences_make_layers_dearer_than_the_head():
    args = FLAVORS["8B"]
    network = build_empty(LLAMA3.build, args, 8)
    short = costs(config(), LLAMA3, args, network, 1024)
    long = costs(config(), LLAMA3, args, network, 65536)
    assert short[-1] > 2 * short[1]
    assert long[-1] < long[1]


def test_a_cut_is_made_of_names():
    found = cut(embedding_weight=1.0, head_weight=1.0)
    assert found.units == (
        ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        ("layers.3", "layers.4", "layers.5", "norm", "output"),
    )
    assert found.ranks == (0, 1)


def test_each_schedule_has_its_stages():
    assert cut(2, "GPipe").ranks == (0, 1)
    assert cut(2, "Interleaved1F1B").ranks == (0, 1, 0, 1)
    assert cut(2, "ZBVZeroBubble").ranks == (0, 1, 1, 0)
    assert cut(2, "LoopedBFS", layers_per_stage=1).ranks == (0, 1, 0, 1, 0, 1)
    assert cut(3, "DualPipeV").of(1) == [1, 4]
    uneven = [len(part) for part in cut(4).units]
    assert sum(uneven) == 9
    assert min(uneven) >= 1


def test_one_rank_has_one_stage_whatever_else_is_asked():
    parts = (("tok_embeddings",), ("layers.0",))
    for rest in ({}, {"layers_per_stage": 1}, {"parts": parts}, {"schedule_csv": "none.csv"}):
        found = cut(1, "ZBVZeroBubble", **rest)
        assert found.ranks == (0,)
        whole = model()
        assert stages.build(whole, found, 0) is whole


def test_predicted_bubble_is_that_of_the_recipe(tmp_path):
    assert predicted_bubble(config(), 6, 4) == pytest.approx(1 / 5)
    assert predicted_bubble(config(2, "LoopedBFS"), 6, 4) == pytest.approx(1 / 9)
    assert predicted_bubble(config(2, "LoopedBFS", layers_per_stage=1), 6, 4) < 1 / 9
    path = tmp_path / "order.csv"
    path.write_text("0F0,0B0\n1F0,1B0")
    assert predicted_bubble(config(schedule_csv=str(path)), 6, 1) == 0.5


def test_parts_by_hand_are_taken_as_they_are():
    parts = (("tok_embeddings",), ("layers.0", "layers.1", "layers.2", "layers.3"))
    parts = (*parts, ("layers.4", "layers.5"), ("norm", "output"))
    found = cut(2, "ZBVZeroBubble", parts=parts)
    assert found.units == parts
    assert found.ranks == (0, 1, 1, 0)


def test_a_large_model_is_cut_evenly():
    args = FLAVORS["405B"]
    network = build_empty(LLAMA3.build, args, 8)
    asked = config(8, "Interleaved1F1B")
    each = costs(asked, LLAMA3, args, network, 8192)
    by_name = {unit[0]: cost for unit, cost in zip(units(LLAMA3, network), each, strict=True)}
    found = plan(asked, LLAMA3, args, network, 8192)
    loads = [sum(by_name.get(name, 0) for name in unit) for unit in found.units]
    assert sum(loads) == pytest.approx(sum(each))
    assert max(loads) <= sum(each) / 16 + by_name["layers.0"]


def test_a_stage_has_tables_of_its_own_and_leaves_the_model_as_it_is():
    whole, found = model(), cut(2)
    names = [name for name, _ in whole.named_modules()]
    first, second = (stages.build(whole, found, stage) for stage in range(2))
    first.register_forward_pre_hook(lambda module, inputs: None)
    assert not second._forward_pre_hooks
    assert not whole._forward_pre_hooks
    assert [name for name, _ in whole.named_modules()] == names


def test_prune_keeps_the_names_of_a_list():
    listed = nn.Sequential()
    listed.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    assert [name for name, _ in prune(listed, {"blocks.0"}).blocks.named_children()] == ["1", "2"]

"""The comparisons of the main road for other decoders than Llama's."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from tests import layouts, tiny
from tests.checkpoint import test_resume
from tests.layouts import EXPERT_PARALLEL, FAMILIES, LATENT, LAYOUTS, OSS, QWEN3, SPARSE, case
from tests.parallel import test_collectives, test_compile, test_muon, test_optimizers, test_parity
from tests.ranks import run_ranks
from tests.runs import train
from tests.tables import data
from tests.tiers import tiers
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.comm import GRADIENTS
from torchtitan.models import experts
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.torch_private.runtime import is_in_backward

ALL = [(family, name) for family, cases in FAMILIES.items() for name in cases if family != "Llama"]
LISTS = {
    kind: [(family, name) for family, names in chosen.items() for name in names]
    for kind, chosen in data(__file__).items()
}
DAILY, GATE = LISTS["daily"], LISTS["gate"]
"""Of the rest, test_cover.py has every pair of settings; all are compared before a release."""


@pytest.mark.parametrize(
    ("family", "name"), tiers(ALL, DAILY, [each for each in ALL if each not in DAILY + GATE])
)
def test_layout_trains_the_same_run_as_one_rank(family, name):
    test_parity.is_the_run_of_one_rank(FAMILIES[family][name], "cpu")


SOME = ["TP 2", "FSDP 2 x TP 2 x PP 2", "CP 2, ring"]


@pytest.mark.parametrize("name", tiers(SOME[:2], SOME[:1], SOME[1:2]))
def test_layouts_without_norms(name):
    test_parity.is_the_run_of_one_rank(LAYOUTS[name].of(norm="none"), "cpu")


@pytest.mark.parametrize("name", tiers(SOME, SOME[:1], SOME[1:]))
def test_layouts_with_a_base(name):
    test_parity.is_the_run_of_one_rank(LAYOUTS[name].of(base_width=8), "cpu", steps=2)


@pytest.mark.gate
def test_a_recomputed_forward_with_other_logits_has_the_same_choice(monkeypatch):
    """The gradient norm would differ if a row had changed its expert."""
    choose = experts.choose_experts

    def differently(values, *rule):
        return choose(-values if is_in_backward() else values, *rule)

    monkeypatch.setattr(experts, "choose_experts", differently)
    test_parity.is_the_run_of_one_rank(FAMILIES["Qwen3-MoE"]["FSDP 2, full recomputation"], "cpu")


@pytest.mark.gate
def test_the_run_of_each_family_is_another():
    cases = [family["TP 2"] for family in FAMILIES.values() if "TP 2" in family]
    norms = [test_parity.reference("cpu", each, "flat")[0].grad_norms for each in cases]
    for one, other in itertools.combinations(norms, 2):
        assert one != pytest.approx(other, rel=1e-3)


# Of 8 experts, so that the bias of a router is more than a few single numbers.
MODEL = {"Qwen3": QWEN3, "Qwen3-MoE": SPARSE, "DeepSeek-V3": LATENT}
MODEL |= {"GPT-OSS": OSS | layouts.EIGHT, "OLMo 2": layouts.OLMO, "Gemma 3": layouts.GEMMA}
MODEL |= {"Llama, sliding window": layouts.WINDOW, "Qwen3-MoE, expert parallelism": {}}


@pytest.mark.parametrize(
    ("family", "name"), tiers(LISTS["sent"], LISTS["sent_daily"], gate=LISTS["sent_gate"])
)
def test_step_sends_what_is_planned(family, name, monkeypatch):
    layout = EXPERT_PARALLEL[name] if name.startswith("EP") else layouts.layout(name)
    test_collectives.sends_what_is_planned(layout.of(**MODEL[family]), monkeypatch)


MUON = [("Qwen3", "FSDP 2 x TP 2")]
# Each expert is taken as a matrix.
MUON += [("Qwen3-MoE", name) for name in ("FSDP 2", "FSDP 2 x TP 2", "HSDP 2 x 2 x TP 2")]


@pytest.mark.parametrize(("family", "name"), tiers(MUON, [], MUON[-1:]))
def test_muon_trains_the_same_run_as_one_rank(family, name):
    test_muon.is_the_run_of_one_rank(FAMILIES[family][name])


@pytest.mark.gate
def test_steps_in_the_backward():
    # AdamW's first update of a weight whose gradient is nearly eps is rounding in part.
    test_optimizers.is_updated_in_the_backward(case(tp=2, batch=8).of(**QWEN3), 2e-5)


COMPILED = ("tiny_qwen3", "tiny_qwen2", "tiny_olmo2", "tiny_gemma3", "tiny_mixtral")


@pytest.mark.parametrize("family", tiers(COMPILED, [], gate=["tiny_gemma3"]))
def test_it_is_the_same_run_compiled(family):
    layout, graphs = test_compile.CASES["TP 2, loss in chunks"]
    has_two_kinds = family == "tiny_gemma3"  # blocks with a window are another graph
    test_compile.is_the_same_run(layout.of(name=family), graphs + has_two_kinds, has_two_kinds)


def held(run):
    """Shapes of the whole of an expert matrix, and of this rank's part; its share of the first."""
    name = "layers.1.mixture.experts.w1"
    weight = dict(run.model.parts[0].named_parameters())[name]
    shape, first = local_extent(weight)
    return list(weight.shape), list(shape), list(first)


def test_each_rank_has_its_experts_and_the_whole_has_the_shape_of_all(tmp_path):
    job = test_resume.recipe(tmp_path, EXPERT_PARALLEL["EP 2 of 4"], 1)
    off = {"checkpoint": job.checkpoint.model_copy(update={"enable": False})}
    ranks = run_ranks(partial(train, look=held), 4, job.model_copy(update=off))
    assert [whole for whole, _, _ in ranks] == [[6, 48, 32]] * 4
    assert [shape for _, shape, _ in ranks] == [[3, 48, 16]] * 4
    assert [first for _, _, first in ranks] == [[0, 0, 0], [3, 0, 0], [0, 0, 16], [3, 0, 16]]


def apart(shard, expert_parallel_degree=2, **keys):
    return case(shard=shard, expert_parallel_degree=expert_parallel_degree, **keys).of(**SPARSE)


APART_REFUSED = {
    "does not divide the 6 experts": (apart(4, expert_parallel_degree=4), 4),
    "does not divide the 4 ranks": (apart(4, expert_parallel_degree=3), 4),
    "has no experts; use 1": (layouts.layout("EP 2"), 2),
    'cannot be sent by "loco"': (apart(2, communication={"gradients": {"name": "loco"}}), 2),
    "the ranks of an expert are others": (apart(4, sharding={"regather_size": 2}), 4),
}


@pytest.mark.parametrize("message", APART_REFUSED)
def test_experts_that_cannot_be_on_these_ranks_are_refused(message):
    layout, ranks = APART_REFUSED[message]
    if "loco" in message and "loco" not in GRADIENTS:
        pytest.skip("research is not installed")
    found = [each.message for each in tiny.problems(layouts.job(layout, "AdamW"), ranks=ranks)]
    assert any(message in each for each in found), found


@pytest.mark.parametrize(
    "name", tiers(["EP 2", "EP 2 of 4, FSDP 4 x TP 2"], [], ["EP 2 of 4, FSDP 4 x TP 2"])
)
def test_muon_takes_experts_of_all_ranks(name, monkeypatch):
    layout = dataclasses.replace(EXPERT_PARALLEL[name], auxiliary=())
    test_muon.is_the_run_of_one_rank(layout)
    test_collectives.muon_sends_what_is_planned(layout, monkeypatch)


@pytest.mark.parametrize("name", tiers(["EP 2", "EP 2, operators recomputed"], [], gate=["EP 2"]))
def test_experts_of_other_ranks_are_the_same_run_compiled(name):
    layout = dataclasses.replace(EXPERT_PARALLEL[name], auxiliary=()).of(dense_layers=0)
    test_compile.is_the_same_run(layout, 2)


@pytest.mark.parametrize(
    "name",
    tiers(
        ["FSDP 2 x TP 2", "TP 2, operators recomputed", "CP 2, full recomputation"],
        [],
        gate=["CP 2, full recomputation"],
    ),
)
def test_experts_are_the_same_run_compiled(name):
    """A first block without them would be a graph of its own, as would one without a window."""
    layout, graphs = test_compile.CASES[name]
    test_compile.is_the_same_run(layout.of(**SPARSE, dense_layers=0), graphs)
    test_compile.is_the_same_run(layout.of(**LATENT, dense_layers=0), graphs)
    test_compile.is_the_same_run(layout.of(**OSS, sliding_window=0), graphs)


@pytest.mark.slow
def test_sinks_that_some_ranks_have_none_of_go_on_in_another_layout(tmp_path):
    few = FAMILIES["GPT-OSS"]["FSDP 4 x TP 2, few heads"]
    for folder, layout, steps in (
        ("whole", case(batch=1), 6),
        ("parts", few, 2),
        ("parts", case(shard=2), 4),
        ("parts", few, 6),
    ):
        recipe = test_resume.recipe(tmp_path / folder, layout.of(**few.model), steps)
        run_ranks(train, layout.ranks, recipe)
    test_resume.is_the_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    "is_balanced", tiers([False, True], [], slow=[False]), ids=["Qwen3", "Qwen3-MoE, balanced"]
)
def test_another_layout_goes_on_with_the_same_run(is_balanced, tmp_path):
    for folder, name, steps in (
        ("whole", test_resume.ALONE, 6),
        ("halves", "FSDP 2 x TP 2", 2),
        ("halves", "EP 2, FSDP 2 x TP 2", 4),
        ("halves", "PP 2, 1F1B", 6),
    ):
        if name in EXPERT_PARALLEL and not is_balanced:
            continue
        layout = (LAYOUTS | EXPERT_PARALLEL)[name]
        layout = layouts.balanced(layout) if is_balanced else layout.of(**QWEN3)
        run_ranks(train, layout.ranks, test_resume.recipe(tmp_path / folder, layout, steps))
    test_resume.is_the_same_run(tmp_path / "halves", tmp_path / "whole")
    folders = (tmp_path / f"{each}/checkpoint/step-6" for each in ("halves", "whole"))
    halves, whole = map(SavedTensors, folders)
    of_routers = [name for name in whole.shapes() if name.endswith((".router.bias", ".share"))]
    assert bool(of_routers) == is_balanced
    for name in of_routers:
        assert whole.read(name).unique().numel() > 1
        torch.testing.assert_close(halves.read(name), whole.read(name))

"""Bugs of other frameworks' mixtures of experts, planted here: each is found by a named assertion.

The loss did not show them. docs/experts.md has the table.
"""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import layouts
from tests.checkpoint import test_expert_weights
from tests.layouts import FAMILIES, SPARSE, case
from tests.parallel import test_parity
from tests.parallel.test_families import APART, BALANCED
from tests.small_weights import run
from tests.tiers import tiers
from tests.unit import test_expert_loads
from tests.unit.models import test_gpt_oss, test_qwen3_moe
from torchtitan.checkpoint.weights.foreign import ForeignWeights
from torchtitan.checks import mixtures
from torchtitan.config import PlannedWorld
from torchtitan.expert_loads import ExpertLoads
from torchtitan.models.experts import Experts, Router
from torchtitan.optim import norm
from torchtitan.parallel.activation_checkpoint import _Repeating
from torchtitan.parallel.expert_parallel import _RowExchange
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.sharding.fsdp2 import FullyShard
from torchtitan.parallel.tensor import SplitExperts, SplitRouter

ROOT = Path(__file__).parent.parent.parent


class Edit(NamedTuple):
    """A change of the source of a function."""

    owner: Any
    function: str
    old: str
    new: str


class Bug(NamedTuple):
    """A change of a line or two, and the assertion that finds it."""

    where: str
    """Where it was."""
    edits: tuple[Edit, ...]
    check: Callable[[Path], None]
    """Check in an empty folder."""
    found: str
    """Pattern of the message of the assertion."""


def parity(family: str, name: str, **model: Any) -> Callable[[Path], None]:
    """Training in a layout is that of one rank."""

    def check(_: Path) -> None:
        test_parity.is_the_run_of_one_rank(FAMILIES[family][name].of(**model), "cpu")

    return check


def loads(_: Path) -> None:
    """Each choice counts once, and moves the bias."""
    test_expert_loads.moves_by_the_training_forward_alone()


def hugging_face(folder: Path) -> None:
    """Experts are read in their order."""
    ours = test_expert_weights.write_ours(folder / "step-1")
    test_expert_weights.reads_a_block(run(ours, folder / "hf"))


def logits(_: Path) -> None:
    """Logits are those of transformers."""
    change = {"renormalize": False, "dense_layers": 1}
    test_qwen3_moe.test_logits_and_gradients_equal_those_of_transformers(change)


def logits_of_oss(_: Path) -> None:
    """Logits of GPT-OSS are those of transformers."""
    test_gpt_oss.test_logits_and_gradients_equal_those_of_transformers({})


def refusal(_: Path) -> None:
    """A layout without an equal number of experts on each rank is refused."""
    layout = case(shard=4, expert_parallel_degree=4).of(**SPARSE)
    found = mixtures.parallelism(layouts.job(layout, "AdamW"), PlannedWorld(4, "cpu"))
    assert any("does not divide the 6 experts" in each.message for each in found), "is not refused"


OTHERS = Edit(
    *(Router, "route"),
    "values = (logits if by_logits else scores).detach()",
    "values = (logits if by_logits else scores).detach()\n"
    "    values = -values if torch._C._current_graph_task_id() != -1 else values",
)
"""A recomputed forward has other logits, as different as can be."""
WITHOUT_EXPERTS = {"dense_layers": 3}
"""A first stage of a pipeline without experts."""
OFF = "is off by"
CHOICES = "self.is_counting and not is_in_backward()"
BUGS = {
    "gradients below the experts lack the sum over tensor ranks": Bug(
        "torchtitan#4054",
        (Edit(SplitExperts, "forward", "grad_placements=[Partial()]", "grad_placements=None"),),
        parity("Qwen3-MoE", "TP 2"),
        OFF,
    ),
    "gradients of the scores lack the sum over tensor ranks": Bug(
        "torchtitan#2416, #1878",
        (Edit(SplitRouter, "forward", "to_local(grad_placements=[Partial()])", "to_local()"),),
        parity("Qwen3-MoE", "TP 2"),
        OFF,
    ),
    "the gradient of the router lacks the sum over parts of a sequence": Bug(
        "torchtitan#2416",
        (
            Edit(
                *(SplitRouter, "forward"),
                "Partial() if x.placements[0].is_shard() else Replicate()",
                "Replicate()",
            ),
        ),
        parity("Qwen3-MoE", "TP 2"),
        OFF,
    ),
    "with sequence parallelism, a token gets the scores of another": Bug(
        "torchtitan#3604",
        (
            Edit(
                *(SplitRouter, "forward"),
                "(placements=[Replicate()]) for each",
                "(placements=[Replicate()]).flip(0) for each",
            ),
        ),
        parity("Qwen3-MoE", "TP 2"),
        OFF,
    ),
    "counts for the bias lack the sum over tensor ranks": Bug(
        "torchtitan#4154",
        (Edit(ExpertLoads, "end", "if self.splits_stream:", "if False:"),),
        parity(BALANCED, "TP 2"),
        OFF,
    ),
    "the gradient of the balance loss depends on the layout": Bug(
        "Megatron-LM#5047",
        (
            Edit(
                AuxiliaryLosses,
                "_join",
                "weight / self.count",
                "weight * torch.distributed.get_world_size() / self.count",
            ),
        ),
        parity(BALANCED, "TP 2"),
        OFF,
    ),
    "tokens of validation move the bias": Bug(
        "torchtitan#4148",
        (
            Edit(ExpertLoads, "_count", CHOICES, "not is_in_backward()"),
            Edit(
                *(ExpertLoads, "begin"),
                "= self._zeros(self.n_experts)",
                '= getattr(router, "tally", self._zeros(self.n_experts))',
            ),
            Edit(
                *(ExpertLoads, "end"),
                "loads[layer] = router.tally",
                "loads[layer], router.tally = router.tally, 0 * router.tally",
            ),
        ),
        loads,
        "validated: some choices do not count once",
    ),
    "a recomputed forward counts again": Bug(
        "torchtitan#1593",
        (Edit(ExpertLoads, "_count", CHOICES, "self.is_counting"),),
        loads,
        "recomputed: some choices do not count once",
    ),
    "the bias of some layers is not updated": Bug(
        "torchtitan#3686, #3666",
        (Edit(ExpertLoads, "update", "in self.own:", "in self.own[1:]:"),),
        loads,
        "a bias does not move against its load",
    ),
    "a pipeline stage without experts stacks an empty list": Bug(
        "torchtitan#1689, #1541",
        (
            Edit(
                *(ExpertLoads, "end"),
                "self.is_counting = False",
                "self.is_counting = not torch.stack([router.tally for _, router in self.own])",
            ),
        ),
        parity(BALANCED, "PP 2, 1F1B", **WITHOUT_EXPERTS),
        "ended with status 1",
    ),
    "a recomputed forward chooses other experts": Bug(
        "Automodel#3325",
        (OTHERS, Edit(_Repeating, "__torch_dispatch__", "if func in", "if False and func in")),
        parity("Qwen3-MoE", "FSDP 2, full recomputation"),
        OFF,
    ),
    "gradients of experts depend on the number of ranks with other experts": Bug(
        "pytorch#160285, torchtitan#1551, #1793",
        (
            Edit(
                *(FullyShard, "_shard"),
                "set_gradient_divide_factor(1.0)",
                "set_gradient_divide_factor(1.0 if mesh is target.mesh else 2.0)",
            ),
        ),
        parity(APART, "EP 2"),
        OFF,
    ),
    "rows return to other tokens": Bug(
        "torchtitan#3604",
        (Edit(_RowExchange, "__call__", "order.argsort()", "order"),),
        parity(APART, "EP 2"),
        OFF,
    ),
    "the gradient norm counts experts once for each of their copies": Bug(
        "SpecForge#882",
        (Edit(norm, "combined", "if not placement.is_replicate():", "if True:"),),
        parity(APART, "EP 2, HSDP 2 x 2"),
        "the gradient norm is off",
    ),
    "a number of ranks that does not divide the experts is accepted": Bug(
        "torchtitan#4258",
        (Edit(mixtures, "parallelism", "if args.n_experts % degree:", "if False:"),),
        refusal,
        "is not refused",
    ),
    "experts of Hugging Face's format are sorted as text, 10 before 2": Bug(
        "torchtitan#1918",
        (
            Edit(
                *(ForeignWeights, "read"),
                "range(offsets[0], offsets[0] + sizes[0])",
                "sorted(range(offsets[0], offsets[0] + sizes[0]), key=str)",
            ),
        ),
        hugging_face,
        "experts are out of order",
    ),
    "scores are renormalized though the model does not": Bug(
        "torchtitan#2319",
        (Edit(Router, "route", "if rule.renormalizes:", "if True:"),),
        logits,
        "not close",
    ),
    "the bias of an expert's output is added once for each tensor rank": Bug(
        "torchtitan#4245",
        (
            Edit(
                *(SplitExperts, "forward"),
                "F.pad(own, (first, width - first - own.shape[1]))",
                "self.b2.full_tensor()",
            ),
        ),
        parity("GPT-OSS", "TP 2"),
        OFF,
    ),
    "the bias of the router is left out": Bug(
        "torchtitan#2319",
        (Edit(Router, "route", "weight.to(wide), bias)", "weight.to(wide))"),),
        logits_of_oss,
        "not close",
    ),
    "scores are those of all experts, not of the chosen ones": Bug(
        "torchtitan#2319",
        (Edit(Router, "route", "if rule.renormalizes:", "if False:"),),
        logits_of_oss,
        "not close",
    ),
    "the limit of an expert's factors is ignored": Bug(
        "Primus@a89d28b5",
        (
            Edit(
                *(Experts, "compute"),
                "clamped_swiglu(gate, up, self.limit)",
                "clamped_swiglu(gate, up, float('inf'))",
            ),
        ),
        logits_of_oss,
        "not close",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Change the source of a function, in this process and the ranks that it forks."""
    function = inspect.unwrap(getattr(edit.owner, edit.function))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(edit.old) == 1, f"{edit.old!r} is not once in {edit.function}"
    source, made = source.replace(edit.old, edit.new), dict[str, Any]()
    exec(compile(source, f"<planted in {edit.function}>", "exec"), function.__globals__, made)
    monkeypatch.setattr(edit.owner, edit.function, made[edit.function])


DAILY = ["gradients below the experts lack the sum over tensor ranks"]


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("name", tiers(BUGS, DAILY))
def test_a_planted_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    for edit in bug.edits:
        plant(monkeypatch, edit)
    with pytest.raises(AssertionError, match=bug.found):
        bug.check(tmp_path)


def test_the_table_lists_the_bugs() -> None:
    page = (ROOT / "docs/experts.md").read_text(encoding="utf-8")
    table = page.partition("| bug | was in |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in table.splitlines()[2:]]
    assert rows == [[name, bug.where] for name, bug in BUGS.items()]


@pytest.mark.gate
def test_a_recomputed_forward_with_other_logits_has_the_same_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient norm differs by their scores, but no row has changed its expert."""
    plant(monkeypatch, OTHERS)
    parity("Qwen3-MoE", "FSDP 2, full recomputation")(tmp_path)


@pytest.mark.gate
def test_a_stage_without_experts_trains_the_same_run(tmp_path: Path) -> None:
    parity(BALANCED, "PP 2, 1F1B", **WITHOUT_EXPERTS)(tmp_path)

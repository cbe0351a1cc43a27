"""Layouts that together have every pair of settings train the same run as one rank."""

import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path

import pytest

from tests import layouts, tiny
from tests.layouts import Case
from tests.parallel import test_parity
from tests.tables import data

FILE = Path(__file__).with_name("cover.json")
MOST_RANKS = 4

DENSE = ("Qwen2", "OLMo 2", "Gemma 3", "Mistral, tied")
FACTORS = data(__file__)
CHANGES = layouts.CHANGES | {
    "Qwen2": {"model": layouts.QWEN2},
    "OLMo 2": {"model": layouts.OLMO},
    "Gemma 3": {"model": layouts.GEMMA},
    "Mistral": {"model": layouts.WINDOW},
    "Mixtral": {"model": layouts.MIXTRAL},
    "Qwen3-MoE": {"model": layouts.SPARSE},
    "DeepSeek-V3": {"model": layouts.LATENT},
    "GPT-OSS": {"model": layouts.OSS},
    "gradients kept whole": layouts.CHANGES["gradients whole"],
    "all-gather": {},
    "z-loss": layouts.CHANGES["auxiliary losses"],
    "all losses": {"auxiliary_losses": layouts.CHANGES["all auxiliary losses"]["auxiliary_losses"]},
    "Float8": layouts.CHANGES["Float8 rowwise"],
    "accumulating": {"training": {"local_batch_size": 1}},
}
SETTINGS = {name: layouts.changed(name, CHANGES) for levels in FACTORS.values() for name in levels}
FACTOR_OF = {name: factor for factor, levels in FACTORS.items() for name in levels}
MIXTURES = [name for name in FACTORS["family"] if name not in DENSE]
NEEDS = {
    **{name: [("FSDP 2",)] for name in FACTORS["reshard"]},
    "copies added up afterwards": [("DDP 2",)],
    "EP 2": [("FSDP 2",), tuple(MIXTURES)],
    "unbalanced": [tuple(FACTORS["context"])],
    "balanced by documents": [tuple(FACTORS["context"]), ("documents",)],
    "no loss parallelism": [tuple(FACTORS["tensor"])],
}
"""Settings without which another means nothing: one of each list."""


def merged(names):
    total = Case()
    for each in (SETTINGS[name] for name in names):
        degrees = {
            axis: max(getattr(total, axis), getattr(each, axis))
            for axis in ("pp", "replicate", "shard", "cp", "tp")
        }
        sections = {
            name: total.sections.get(name, {}) | each.sections.get(name, {})
            for name in total.sections | each.sections
        }
        added = {"convert": total.convert + each.convert}
        added |= {"auxiliary": total.auxiliary + each.auxiliary}
        total = dataclasses.replace(total, **degrees, sections=sections, **added)
    training, replicas = dict(total.sections.get("training", {})), total.replicate * total.shard
    is_accumulating = "local_batch_size" in training
    if total.pp > 1:  # a pipeline needs several microbatches at a time, and layers for its stages
        training["global_batch_size"] = 4 * replicas
        training["local_batch_size"] = 2 if is_accumulating else 4
        total = total.of(n_layers=4)
    else:  # One replica has 2 to add up, several have up to 2 each; accumulating, twice as many.
        training["local_batch_size"] = (4 if replicas == 1 else 2) // (1 + is_accumulating)
    if is_slow(total):
        total = total.of(n_layers=1)
    return dataclasses.replace(total, sections=total.sections | {"training": training})


def is_slow(layout):
    """Whether products are emulated in DTensors, which takes seconds per step."""
    return layout.converts_linears and layout.tp > 1


@cache
def is_valid(names):
    """Whether a recipe may have all of these settings, on few ranks."""
    layout = merged(sorted(names))
    if layout.ranks > (2 if is_slow(layout) else MOST_RANKS):
        return False
    return not tiny.problems(layouts.job(layout, "SGD"), ranks=layout.ranks)


def completed(names):
    """The ways to add what settings need, each with a family."""
    for needed in (choices for name in sorted(names) for choices in NEEDS.get(name, [])):
        if not names & {*needed}:
            factors = {FACTOR_OF[name] for name in names}
            for choice in (choice for choice in needed if FACTOR_OF[choice] not in factors):
                yield from completed(names | {choice})
            return
    yield names if names & {*FACTORS["family"]} else names | {"Qwen2"}


def possible(names):
    """The first way to have these settings that is no error."""
    return next((each for each in completed(names) if is_valid(each)), None)


def pairs_of(names):
    return {frozenset(pair) for pair in itertools.combinations(names, 2)}


def all_pairs():
    """Every two settings of different factors."""
    pairs = itertools.combinations(SETTINGS, 2)
    return [frozenset(pair) for pair in pairs if len({FACTOR_OF[name] for name in pair}) == 2]


def compute():
    """A cover of all pairs that may be, by greedy choice: each run adds as many pairs as it can."""
    wanted = {pair: whole for pair in all_pairs() if (whole := possible(pair))}
    left, runs = set(wanted), []
    for pair in sorted(wanted, key=lambda pair: (-merged(wanted[pair]).ranks, sorted(pair))):
        if pair not in left:
            continue
        chosen, run = pair, wanted[pair]
        while gains := [
            (len(left & pairs_of(whole)), sorted(larger), larger, whole)
            for larger in (chosen | {name} for name in SETTINGS)
            if len({FACTOR_OF[name] for name in larger}) > len(chosen)
            and (whole := possible(larger))
            and len(left & pairs_of(whole)) > len(left & pairs_of(run))
        ]:
            chosen, run = max(gains)[2:]
        left -= pairs_of(run)
        runs.append([name for name in SETTINGS if name in run])
    return sorted(runs)


def cover():
    return {"; ".join(names): merged(names) for names in json.loads(FILE.read_text())}


COVER = {} if __name__ == "__main__" else cover()  # which a new setting lacks


@pytest.mark.gate
@pytest.mark.costs("ranks")
@pytest.mark.parametrize("name", COVER)
def test_layout_trains_the_same_run_as_one_rank(name):
    test_parity.is_the_run_of_one_rank(COVER[name], "cpu")


def test_no_pair_of_settings_is_missing():
    """A pair that no run has is refused as a recipe, and no run of the cover is."""
    found = set[frozenset[str]]()
    for name in COVER:
        settings = frozenset(name.split("; "))
        assert is_valid(settings), f"{name} is refused; run python -m tests.parallel.test_cover"
        found |= pairs_of(settings)
    missing = [pair for pair in all_pairs() if pair not in found and possible(pair)]
    assert missing == [], "run python -m tests.parallel.test_cover"


def test_every_axis_and_mode_is_a_setting():
    for axis in ("pp", "replicate", "shard", "cp", "tp"):
        assert max(getattr(layout, axis) for layout in COVER.values()) > 1
    assert {name for runs in COVER for name in runs.split("; ")} == SETTINGS.keys()


if __name__ == "__main__":
    found = compute()
    rows = ",\n".join(f" {json.dumps(names)}" for names in found)
    FILE.write_text(f"[\n{rows}\n]\n")
    print(f"{len(found)} runs have every pair")

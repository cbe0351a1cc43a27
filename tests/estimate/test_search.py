"""A search finds all layouts of a small case, and its best is a recipe with the same plan."""

from pathlib import Path

import pytest

from torchtitan.checks import load_job, problems
from torchtitan.config import PlannedWorld, RecipeError
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.plan import Range, plan
from torchtitan.estimate.search import (
    CP,
    LOCAL,
    PP,
    SCHEDULE,
    SIZE,
    TP,
    LayoutBounds,
    PlannedLayout,
    layouts,
    planned_recipe,
    reason,
    search,
    with_changes,
)
from torchtitan.job import JobConfig
from torchtitan.tools.plan import plan_search

RECIPE = "train_configs/debug_model.toml"


def debug_job(ranks: int, *flags: str) -> JobConfig:
    return load_job(RECIPE, flags, ranks, "cpu", exempt=("model.tokenizer_path",)).config


def test_layouts_of_two_ranks_are_those_found_by_hand():
    job = debug_job(2, "--training.global_batch_size=4", "--training.local_batch_size=2")
    found = list(layouts(job, 2, 8))
    degrees = {(each[TP], each[PP], each[CP]) for each in found}
    sequence = (1, 1, 2) if job.training.seq_len >= 2048 else None
    assert degrees - {sequence} == {(1, 1, 1), (2, 1, 1), (1, 2, 1)}
    assert {each[LOCAL] for each in found if each[TP] == 2} == {1, 2, 4}
    assert {each[LOCAL] for each in found if each[TP] * each[PP] * each[CP] == 1} == {1, 2}
    in_pipeline = {(e[SCHEDULE], e[SIZE], e[LOCAL]) for e in found if e[PP] == 2}
    # A share of 4 sequences: 2 or 4 microbatches of 1, or 2 of 2.
    assert {each for each in in_pipeline if each[0] == "1F1B"} == {
        ("1F1B", 1, 2),
        ("1F1B", 1, 4),
        ("1F1B", 2, 4),
    }


def test_matrices_are_not_split_over_nodes():
    job = debug_job(8)
    assert {each[TP] for each in layouts(job, 8, 2)} <= {1, 2}


def test_batch_is_that_of_the_recipe():
    job = debug_job(4)
    batch = job.global_batch(job.degrees(4))
    for layout in layouts(job, 4, 8):
        changed = with_changes(job, layout)
        assert changed.global_batch(changed.degrees(4)) == batch


@pytest.mark.gate
def test_found_layouts_are_valid_and_the_best_is_a_recipe_with_the_same_plan(tmp_path: Path):
    job, hardware = debug_job(2), find_hardware("cpu")
    found = search(job, 2, hardware, device_type="cpu", seconds=1)
    assert found.layouts
    times = [each.seconds_per_step for each in found.layouts]
    assert times == sorted(times)
    for each in found.layouts:
        wrong = problems(with_changes(job, each.changes), PlannedWorld(2, "cpu"))
        assert all(each.severity == "note" for each in wrong)
    best, path = found.layouts[0], tmp_path / "best.toml"
    path.write_text(
        planned_recipe(with_changes(job, best.changes), job, str(Path(RECIPE).resolve()))
    )
    loaded = load_job(path, [], 2, "cpu", exempt=("model.tokenizer_path",)).config
    assert loaded.flat() == with_changes(job, best.changes).flat()
    planned = plan(loaded, 2, hardware)
    assert planned.time.seconds == pytest.approx(best.seconds_per_step)
    assert planned.reserved_gib == best.reserved_gib


def test_bounds_know_bubbles_and_recomputation():
    job = debug_job(4, "--training.global_batch_size=16")
    bounds = LayoutBounds(job, 4, find_hardware("h100"))
    whole = {
        (e[PP], e.get(SCHEDULE), e["activation_checkpoint.mode"]): e for e in layouts(job, 4, 8)
    }
    kept, again = whole[4, "1F1B", "none"], whole[4, "1F1B", "full"]
    assert bounds.seconds(again) > bounds.seconds(kept)
    assert bounds.gib(again) < bounds.gib(kept)
    assert bounds.gib(whole[4, "GPipe", "none"]) >= bounds.gib(kept)


def test_reason_names_what_differs_most():
    def made(seconds: float, **parts: float) -> PlannedLayout:
        return PlannedLayout({}, True, Range(1, 1, 1), 1 / seconds, seconds, None, parts)

    fast, slow = made(1.0, computation=0.9, bubble=0.1), made(1.2, computation=0.9, bubble=0.3)
    assert reason(fast, slow) == (
        "+20.0% over the next: a smaller pipeline bubble (10.0% of the step instead of 25.0%)"
    )
    assert reason(fast, made(1.001, computation=0.901, bubble=0.1)) == "as fast as the next"


@pytest.mark.gate
def test_search_by_command_writes_a_valid_recipe(tmp_path: Path):
    job, output = debug_job(2, "--compile.enable=false"), tmp_path / "deep" / "best.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_search, "SECONDS", 1.0)
        hardware = find_hardware("cpu")
        found = plan_search.search_layouts(Path(RECIPE), job, 2, hardware, "cpu", output)
    assert found["planned"] >= len(found["layouts"]) >= 1
    text = "\n".join(plan_search.search_text(found))
    assert found["summary"] in text
    assert str(output) in text
    loaded = load_job(output, [], 2, "cpu", exempt=("model.tokenizer_path",)).config
    best = with_changes(job, found["layouts"][0]["changes"])
    assert loaded.flat() == best.flat()


def test_layouts_that_cannot_fit_are_refused_with_the_fix(tmp_path: Path):
    small = find_hardware("cpu").model_copy(update={"memory_gib": 0.001})
    words = (Path(RECIPE), debug_job(2), 2, small, "cpu", tmp_path / "best.toml")
    with pytest.raises(RecipeError, match="use more ranks"):
        plan_search.search_layouts(*words)

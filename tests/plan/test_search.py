"""A search finds all layouts of a small case, and its best is a recipe with the same plan."""

import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tiers import tiers
from torchtitan.checks import load_job, problems
from torchtitan.config import PlannedWorld, RecipeError
from torchtitan.plan import search_report
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.layouts import (
    COPIES,
    CP,
    EP,
    LOCAL,
    PP,
    RESHARD,
    SCHEDULE,
    SIZE,
    TP,
    Cost,
    LayoutCosts,
    layouts,
    own_layout,
    with_changes,
)
from torchtitan.plan.plan import Range, plan
from torchtitan.plan.search import LEAST, LayoutQueue, PlannedLayout, planned_recipe, reason, search
from torchtitan.tools.cli import main

RECIPE = "train_configs/debug_model.toml"


def debug_job(ranks, *flags):
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


def test_experts_are_on_numbers_of_ranks_that_divide_them_and_the_shards():
    flags = ["--training.global_batch_size=12", "--training.local_batch_size=1"]
    recipe = "train_configs/qwen3_moe_debug.toml"
    job = load_job(recipe, flags, 12, "cpu", exempt=("model.tokenizer_path",)).config
    found = {(each[TP], each[COPIES], each[EP]) for each in layouts(job, 12, 12)}
    assert {ep for tp, copies, ep in found if tp == copies == 1} == {1, 2, 4}  # of 8 experts
    assert {ep for tp, copies, ep in found if copies == 12} == {1}
    assert EP not in next(layouts(debug_job(2), 2, 8))


def test_layouts_split_no_matrix_over_nodes_and_keep_the_batch():
    job = debug_job(8)
    found = [*layouts(job, 8, 2)]
    assert {each[TP] for each in found} <= {1, 2}
    batch = job.global_batch(job.degrees(8))
    for layout in found:
        changed = with_changes(job, layout)
        assert changed.global_batch(changed.degrees(8)) == batch


def on_cpu(job, ranks):
    return plan(job, ranks, find_hardware("cpu"))


def test_own_layout_is_that_of_the_recipe():
    job = debug_job(4, "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4")
    own = own_layout(job, 4)
    assert (own[TP], own[PP], own[CP], own[LOCAL]) == (1, 2, 1, 4)
    assert with_changes(job, own).degrees(4) == job.degrees(4)
    assert with_changes(job, own).global_batch(job.degrees(4)) == job.global_batch(job.degrees(4))


@pytest.mark.gate
def test_found_layouts_are_valid_and_the_best_is_a_recipe_with_the_same_plan(tmp_path):
    flags = ("--compile.enable=false", "--training.seq_len=64", "--model.n_layers=1")
    job, hardware = debug_job(2, *flags), find_hardware("cpu")
    own = on_cpu(job, 2)
    found = search(job, own, hardware, device_type="cpu", seconds=0)
    times = [each.seconds_per_step for each in found.layouts]
    assert found.planned == len(times) == LEAST
    assert times == sorted(times)
    assert times[0] <= own.time.seconds
    for each in found.layouts:
        wrong = problems(with_changes(job, each.changes), PlannedWorld(2, "cpu"))
        assert all(each.severity == "note" for each in wrong)
    best, path = found.layouts[0], tmp_path / "best.toml"
    path.write_text(
        planned_recipe(with_changes(job, best.changes), debug_job(2), str(Path(RECIPE).resolve()))
    )
    loaded = load_job(path, [], 2, "cpu", exempt=("model.tokenizer_path",)).config
    assert loaded.flat() == with_changes(job, best.changes).flat()
    planned = plan(loaded, 2, hardware)
    assert planned.time.seconds == pytest.approx(best.seconds_per_step)
    assert planned.reserved_gib == best.reserved_gib


def test_what_is_planned_without_time_depends_on_no_speed(monkeypatch):
    job, hardware = debug_job(2, "--compile.enable=false"), find_hardware("cpu")
    own = on_cpu(job, 2)

    def slow_first(*_):
        """A plan that takes a while in every second process."""
        time.sleep(0.1 * (os.getpid() % 2))
        return own

    monkeypatch.setattr("torchtitan.plan.search.plan", slow_first)
    runs = [search(job, own, hardware, device_type="cpu", seconds=0) for _ in range(2)]
    first, second = ([each.changes for each in found.layouts] for found in runs)
    assert first == second
    assert first[0] == own_layout(job, 2)
    assert len(first) == LEAST < runs[0].enumerated


def test_a_search_shows_what_it_found_before_it_writes(monkeypatch, capsys, tmp_path):
    own = on_cpu(debug_job(2, "--compile.enable=false"), 2)
    monkeypatch.setattr("torchtitan.plan.search.plan", lambda *_: own)
    monkeypatch.setattr("torchtitan.plan.command.write_best", Mock(side_effect=OSError("no space")))
    words = ("--world-size=2", "--compile.enable=false", "--search", "--seconds=0")
    with pytest.raises(OSError, match="no space"):
        main(["plan", RECIPE, *words, f"--output={tmp_path / 'best.toml'}"])
    printed = capsys.readouterr().out
    assert f"the best of {LEAST} planned of " in printed
    assert "\n1. " in printed
    assert "the fastest" not in printed


def test_costs_know_bubbles_and_recomputation():
    job = debug_job(4, "--training.global_batch_size=16")
    costs = LayoutCosts(job, 4, find_hardware("h100"))
    whole = {
        (e[PP], e.get(SCHEDULE), e["activation_checkpoint.mode"]): e for e in layouts(job, 4, 8)
    }
    kept, again = whole[4, "1F1B", "none"], whole[4, "1F1B", "full"]
    assert costs.seconds(again) > costs.seconds(kept)
    assert costs.gib(again) < costs.gib(kept)
    assert costs.gib(whole[4, "GPipe", "none"]) >= costs.gib(kept)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    tiers(
        [("llama3_8b", 8), ("llama3_70b", 256), ("llama3_405b", 512)], [], [("llama3_405b", 512)]
    ),
)
def test_costs_are_near_the_plan_of_the_recipe(recipe, ranks):
    """So the first plans of a search are of fast layouts that fit."""
    job = load_job(
        f"train_configs/{recipe}.toml", (), ranks, "cuda", exempt=("model.tokenizer_path",)
    ).config
    hardware, own = find_hardware("h100"), own_layout(job, ranks)
    planned, costs = plan(job, ranks, hardware), LayoutCosts(job, ranks, hardware)
    assert costs.seconds(own) == pytest.approx(planned.time.seconds, rel=0.25)
    assert costs.gib(own) == pytest.approx(planned.reserved_gib.value, rel=0.25)


def cost_of(seconds, room, **changes):
    job = debug_job(2)
    return Cost(seconds, room, {**own_layout(job, 2), **changes})


def test_queue_learns_from_plans_of_the_same_kernels():
    quick, slow = cost_of(1.0, 0.5), cost_of(1.2, 0.5, **{RESHARD: "never"})
    queue = LayoutQueue([quick, slow])
    # Plans with the kernels of `quick` take twice as long as expected, those of `slow` do not.
    queue.learn(quick, 2.0, 0.5)
    queue.learn(slow, 1.2, 0.5)
    assert queue.pop(1.3) == slow
    assert queue.pop(1.3) is None
    assert queue.pop(float("inf")) == quick


def test_queue_ends_with_what_is_expected_not_to_fit():
    fits, large = cost_of(2.0, 0.9), cost_of(1.0, 1.1)
    queue = LayoutQueue([fits, large])
    assert queue.pop(float("inf")) == fits
    assert queue.pop(10.0) is None
    assert queue.pop(float("inf")) == large


def test_reason_names_what_differs_most():
    def made(seconds, **parts):
        return PlannedLayout({}, True, Range(1, 1, 1), 1 / seconds, seconds, None, parts)

    fast, slow = made(1.0, computation=0.9, bubble=0.1), made(1.2, computation=0.9, bubble=0.3)
    assert reason(fast, slow) == (
        "+20.0% over the next: a smaller pipeline bubble (10.0% of the step instead of 25.0%)"
    )
    assert reason(fast, made(1.001, computation=0.901, bubble=0.1)) == "as fast as the next"


@pytest.mark.slow
def test_search_by_command_writes_a_valid_recipe_and_times_it(tmp_path, monkeypatch):
    monkeypatch.setattr(search_report, "ROUNDS", 1)
    monkeypatch.setattr(search_report, "STEPS", 2)
    flags = ("--compile.enable=false", "--training.seq_len=64")
    job, output = debug_job(2, *flags), tmp_path / "deep" / "best.toml"
    planned = on_cpu(job, 2)
    words = (Path(RECIPE), planned, "cpu")
    found = search_report.search_layouts(*words, output, seconds=8.0, timed=2)
    search_report.write_best(found, *words)
    assert found["planned"] >= len(found["layouts"]) >= 2
    text = "\n".join(search_report.search_text(found))
    assert found["summary"] in text
    assert str(output) in text
    runs = [each["measured"] for each in found["layouts"][:2]]
    assert [run["status"] for run in runs] == ["ran", "ran"]
    rates = [run["tokens_per_second_per_device"] for run in runs]
    assert rates[found["best"]] == max(rates)
    loaded = load_job(output, [], 2, "cpu", exempt=("model.tokenizer_path",)).config
    best = with_changes(job, found["layouts"][found["best"]]["changes"])
    assert loaded.flat() == best.flat()


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.rope_theta=none", "--optimizer.lr=1e-4"),
        ("--comm.debug_level=none", "--model.tokenizer_path=none"),
        ("--checkpoint.frequent.interval=5", "--optimizer.groups.0.roles=norm"),
        ("--training.seq_len=64", "--optimizer.qk_clip=0"),
    ],
)
def test_any_key_can_be_written(flags, tmp_path):
    given = tmp_path / "given.toml"
    given.write_text(
        f'extends = "{Path(RECIPE).resolve()}"\n[model]\nrope_theta = 1e4\n'
        '[comm]\ndebug_level = "info"\n[optimizer]\nname = "Muon"\nqk_clip = 9.0\n'
    )
    before, job = (load_job(given, each, 2, "cpu").config for each in ((), flags))
    written = tmp_path / "written.toml"
    written.write_text(planned_recipe(job, before, "given.toml", "The best of 3"))
    assert load_job(written, (), 2, "cpu").config.flat() == job.flat()
    assert written.read_text().startswith("# The best of 3")


def test_layouts_that_cannot_fit_are_refused_with_the_fix(tmp_path):
    small = find_hardware("cpu").model_copy(update={"memory_gib": 0.001})
    planned = plan(debug_job(2, "--compile.enable=false"), 2, small)
    with pytest.raises(RecipeError, match="use more ranks"):
        search_report.search_layouts(
            *(Path(RECIPE), planned, "cpu", tmp_path / "best.toml"), seconds=0.0
        )


def test_timing_needs_the_devices():
    with pytest.raises(RecipeError, match="64 ranks on h100 need as many devices"):
        search_report.require_devices(find_hardware("h100"), 64)
    with pytest.raises(RecipeError, match="wanted at most 256 processes"):
        search_report.require_devices(find_hardware("cpu"), 1024)
    search_report.require_devices(find_hardware("cpu"), 4)


def test_a_run_that_failed_is_said_and_not_the_best():
    ran = {"tokens_per_second_per_device": 5.0, "status": "ran"}
    ran |= {"seconds_per_step": {"value": 1.0, "low": 0.9, "high": 1.1}}
    failed = {"status": "failed", "reasons": ["it ended"]}
    assert search_report.fastest_run([failed, ran]) == 1
    assert search_report.fastest_run([failed, failed]) == 0
    assert search_report.run_text(failed) == "timed: failed: it ended"
    assert search_report.run_text(ran) == "timed: 5 tokens/s/device, 1 s per step (0.9 to 1.1)"

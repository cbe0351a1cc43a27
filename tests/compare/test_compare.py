"""What a comparison finds: its numbers, its verdicts, and the whole of it once, for real."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from tests import tiny
from torchtitan.config import RecipeError
from torchtitan.device import GIB
from torchtitan.plan import comparison
from torchtitan.provenance import to_toml
from torchtitan.tools.cli import main
from torchtitan.tools.compare import compare_folders
from torchtitan.tools.compare.gather import JUDGED, compare_curves, difference
from torchtitan.tools.compare.results import RunCurve, Spread
from torchtitan.tools.compare.runs import MeasuredRun, spread

CONVERTED = tiny.job().model_copy(update={"convert": ("float8",)})


def curve(values):
    steps = tuple(range(1, len(values) + 1))
    return RunCurve(steps, tuple(100 * step for step in steps), tuple(values))


def verdict(ours, theirs, job=None):
    norms, jobs = curve([1.0] * len(ours)), (job or tiny.job(), tiny.job())
    return compare_curves(curve(ours), curve(theirs), norms, norms, jobs).verdict


def leave(folder, rows, **changes):
    """What a run would have left."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"time": 100.0 + row["step"], **row}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "lo')
    (folder / "recipe.toml").write_text(to_toml(tiny.job(**changes)))
    about = {"ranks": 1, "device": "abacus", "torch": "2.13.0"}
    (folder / "environment.json").write_text(json.dumps(about))
    return folder


def row(step, tps, loss=2.0, **more):
    fixed = {"grad_norm": 1.0, "mfu": None, "step_time": 64 / tps, "memory_gib": 0.5, "eta_s": 9.0}
    return {"step": step, "loss": loss, "tokens": 64 * step, "tps": tps, **fixed, **more}


def test_a_spread_is_of_all_values():
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.least, found.median, found.most, found.count) == (1.0, 2.5, 4.0, 4)
    assert (found.quartile_1, found.quartile_3) == (1.75, 3.25)
    assert spread([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0, 1)
    assert spread([]) is None


def test_a_difference_is_where_it_exceeds_most():
    found = difference(curve([1.0, 2.0, 3.3]), curve([1.1, 2.0, 3.0]), 1e-3)
    assert found is not None
    # 0.0909 of 0.001 allowed in the first step is worse than 0.1 of 0.003 in the third.
    assert (found.step, found.tolerance) == (1, 1e-3)
    assert found.largest == pytest.approx(0.1 / 1.1)
    assert difference(curve([None]), curve([1.0]), 1e-3) is None


def test_rounding_is_the_same_run_and_more_is_not():
    base = [5.0 - 0.1 * step for step in range(20)]
    assert verdict(base, base) == "same"
    assert verdict([v * (1 + 2e-7) for v in base if v], base) == "same"
    assert verdict([v * (1 + 1e-4) for v in base if v], base) == "differs"
    assert verdict(base, base, CONVERTED) == "not judged", "Float8 has no tolerance"
    # Later, rounding has grown to anything.
    late = [*base[:JUDGED], *(v * 1.02 for v in base[JUDGED:] if v)]
    assert verdict(late, base) == "same"


def test_the_rule_names_the_steps_that_ran():
    short = curve([5.0, 4.0, 3.0, 2.0])
    jobs = [tiny.job()] * 2
    assert "steps 1 to 4" in compare_curves(short, short, short, short, jobs).why
    late = RunCurve((5, 6, 20), (0, 0, 0), (3.0, 2.0, 1.0))
    assert "steps 5 to 6" in compare_curves(late, late, late, late, jobs).why


def test_only_steps_after_the_warm_up_are_measured(tmp_path):
    rows = [row(1, 1.0), row(2, 10.0), row(3, 20.0), row(4, 30.0), row(5, 1.0)]
    run = MeasuredRun(leave(tmp_path / "run", rows), 1, 0, 1, 4)
    assert run.tps == [10.0, 20.0, 30.0]
    assert run.curve("loss").steps == (1, 2, 3, 4)


def test_phases_and_pauses_are_seconds_of_all_steps(tmp_path):
    phases = {"time/forward": 1.0, "time/backward": 2.0}
    rows = [row(1, 1.0, **phases), row(3, 1.0, **phases, checkpoint_s=4.0), row(4, 1.0, **phases)]
    run = MeasuredRun(leave(tmp_path / "run", rows), 1, 0, 1, None)
    # Three steps, of which two share a row.
    assert run.seconds_by_phase() == {"forward": 3.0, "backward": 6.0, "checkpoint": 4.0}


@pytest.mark.gate
@pytest.mark.costs("two plans")
def test_runs_that_exist_are_compared_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "plan_on", functools.cache(comparison.plan_on))
    slow = leave(tmp_path / "slow", [row(step, 10.0) for step in range(1, 9)])
    fast = leave(tmp_path / "fast", [row(at, 25.0) for at in range(1, 9)], optimizer={"lr": 0.25})
    report = compare_folders([slow, fast], None, tmp_path / "out", 5)
    assert report.baseline == "slow"
    first, second = report.variants
    assert {*first.planned} == {*second.planned} == {"memory_gib"}, "the hardware is unknown"
    assert (first.differs, second.differs) == ({"optimizer.lr": 0.0008}, {"optimizer.lr": 0.25})
    assert second.ratio is not None
    assert second.ratio.median == 2.5
    assert (first.parity.verdict, second.parity.verdict) == ("baseline", "same")
    assert json.loads((tmp_path / "out/report.json").read_text())["machine"]["device"] == "abacus"
    with pytest.raises(RecipeError, match="--baseline: got x; allowed: slow, fast"):
        compare_folders([slow, fast], "x", tmp_path / "out", 5)
    before = (tmp_path / "out/report.json").read_bytes()
    with pytest.raises(RecipeError, match="out: has the report of other runs; choose another"):
        compare_folders([fast, slow], None, tmp_path / "out", 5)
    assert (tmp_path / "out/report.json").read_bytes() == before
    compare_folders([slow, fast], None, tmp_path / "out", 5)


@pytest.mark.usefixtures("no_plan")
def test_other_data_are_no_parity(tmp_path):
    folders = [
        leave(tmp_path / name, [row(step, 10.0) for step in range(1, 9)], **changes)
        for name, changes in {
            "a": {},
            "b": {"debug": {"seed": 1}},
            "c": {"training": {"global_batch_size": 16}},
        }.items()
    ]
    report = compare_folders(folders, None, tmp_path / "out", 5)
    assert [variant.parity.verdict for variant in report.variants] == [
        *("baseline", "not judged", "not judged")
    ]
    assert "debug.seed" in report.variants[1].parity.why
    assert (
        "The variants train on different amounts per step: 256 tokens, 512 tokens." in report.notes
    )


@pytest.mark.gate
def test_a_comparison_from_the_command_to_the_report(tmp_path, capfd, monkeypatch):
    """Two layouts that train the same run, one that cannot, and one that fails on its way."""
    (tmp_path / "tiny.toml").write_text(to_toml(tiny.job()))
    shutil.copy(Path(__file__).with_name("tiny_study.toml"), tmp_path / "study.toml")
    monkeypatch.chdir(tmp_path)
    study = str(tmp_path / "study.toml")
    assert main(["compare", study, "--check"]) == 0
    assert "cannot: 3 ranks: cannot run" in capfd.readouterr().out
    assert not (tmp_path / "out").exists()

    assert main(["compare", study]) == 1  # one has failed
    told = capfd.readouterr()
    report = json.loads((tmp_path / "out/report.json").read_text())
    one, two, cannot, diverges = report["variants"]
    statuses = [variant["status"] for variant in report["variants"]]
    assert statuses == ["ran", "ran", "cannot run", "failed"], told.err
    assert two["parity"]["verdict"] == "same", two["parity"]
    assert cannot["reasons"]
    assert "status 3" in diverges["reasons"][0]
    assert (one["tps"]["count"], two["tps"]["count"]) == (4, 4)
    assert (one["layout"]["dp_shard"], two["layout"]["dp_shard"]) == (1, 2)
    assert sum(two["time_shares"].values()) == pytest.approx(1.0)
    assert two["time_shares"]["checkpoint"] > 0
    assert not any(one["sent_bytes"].values())
    assert two["sent_bytes"]["dp_shard"] > 0
    kinds = {(kind["axis"], kind["operation"]): kind for kind in two["collectives"]}
    for operation in ("all_gather", "reduce_scatter"):
        kind = kinds["dp_shard", operation]
        assert kind["count"] == kind["formula_count"] > 0
        assert kind["bytes"] == pytest.approx(kind["formula_bytes"])
    held, whole = (found["memory_formula"]["states"] for found in (two, one))
    assert held == pytest.approx(whole / 2, rel=1e-3)
    assert one["state_bytes"] == pytest.approx(whole * GIB, rel=1e-3)
    assert two["state_bytes"] == pytest.approx(held * GIB, rel=1e-3)
    assert {*one["planned"]} == {"memory_gib"}, "the recipe states no hardware"
    # One rank too has collectives, with itself.
    assert one["exposed_communication"] < two["exposed_communication"] < 1
    assert one["loss"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert set(two["differs"]) >= {"ranks", "training.local_batch_size", "checkpoint.enable"}
    assert "parallelism.context_parallel_degree" not in two["differs"]
    assert one["startup_s"] > 0
    assert one["compile_s"] is None
    for form in ("md", "html"):
        assert "diverges" in (tmp_path / f"out/report.{form}").read_text()

    # What is there is not run again; what failed is.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("metrics.jsonl")}
    assert main(["compare", study, "--no-trace", "--check"]) == 0
    assert "3 runs of 6 steps, 0 of them there already" in capfd.readouterr().out
    assert main(["compare", study, "--check"]) == 0
    assert "3 runs of 8 steps, 2 of them there already" in capfd.readouterr().out
    assert main(["compare", study]) == 1
    for name in ("one", "two"):
        path = tmp_path / f"out/runs/{name}/round-1/metrics.jsonl"
        assert path.stat().st_mtime_ns == before[path]

"""`RunHistory`: rows of a run, and rows as older versions wrote them."""

import json

import pytest

from torchtitan.config import ConfigError
from torchtitan.tools.history import RunHistory, seconds_of


def test_a_line_that_is_not_complete_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert RunHistory.open(tmp_path).rows == [{"step": 1}]


def test_rows_of_older_versions_have_the_names_of_today(tmp_path):
    """As they were written before the phase `agree` became `sync`."""
    rows = [
        {"step": 2, "time": 9.0, "loss": 1.0, "tps": 50.0, "time/forward": 0.3, "time/agree": 0.1}
        | {"slowest/agree": 3, "slowest/agree_pct": 4.0, "checkpoint_s": 1.5},
        {"step": 2, "time": 9.5, "event": "rollback", "from_step": 4, "stepped_over": 32},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spent = {"forward": 0.6, "agree": 0.2}
    event = {"step": 2, "event": "steps", "steps": 2, "wall": spent, "busy": spent}
    (tmp_path / "events").mkdir()
    (tmp_path / "events/rank0.jsonl").write_text(json.dumps(event) + "\n")
    history = RunHistory.open(tmp_path)
    [report] = history.reports
    assert (report["slowest/sync"], report["slowest/sync_pct"]) == (3, 4.0)
    assert "slowest/agree" not in report
    phases, pauses = seconds_of(history.report_steps())
    assert phases == pytest.approx({"forward": 0.6, "sync": 0.2})
    assert pauses == {"checkpoint": 1.5}
    [rollback] = [row for row in history.rows if row.get("event") == "rollback"]
    assert (rollback["skipped_samples"], rollback["from_step"]) == (32, 4)
    [steps] = history.rank_events[0]
    assert steps["wall"] == steps["busy"] == {"forward": 0.6, "sync": 0.2}


def test_reports_and_the_steps_they_are_of(tmp_path):
    rows = [
        {"step": 1, "tps": 1.0},
        {"step": 10, "tps": 1.0},
        {"step": 4, "event": "rollback"},
        {"step": 7, "tps": 1.0},
        {"step": 7, "validation_loss": 1.0},
        {"step": 12, "tps": 1.0},
    ]
    history = RunHistory(tmp_path, rows)
    assert [(row["step"], steps) for row, steps in history.report_steps()] == [
        *((1, 1), (10, 9)),
        *((7, 3), (12, 5)),
    ]


def test_a_run_that_left_nothing_else_is_unknown(tmp_path):
    history = RunHistory(tmp_path)
    assert (history.recipe, history.environment, history.ranks) == ({}, {}, None)
    assert (history.rank_events, history.sent, history.newest_trace()) == ({}, {}, {})
    assert not history.state().is_alive
    assert history.state().words.startswith("unknown")


def test_a_damaged_recipe_is_refused(tmp_path):
    (tmp_path / "recipe.toml").write_text("[training]\nsteps = \n")
    with pytest.raises(ConfigError, match=r"recipe\.toml:2: "):
        _ = RunHistory(tmp_path).recipe


def test_a_damaged_environment_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "environment.json").write_text('{"time": "20')
    with pytest.raises(ConfigError, match=r"environment\.json: damaged: "):
        print(RunHistory.open(tmp_path).device)

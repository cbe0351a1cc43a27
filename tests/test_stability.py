"""Earlier states are read: docs/stability.md says what stays, these tests hold it."""

import json
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.earlier import COMMITS, EARLIER, fields, listed_options, settings
from tests.ranks import run_ranks
from tests.runs import rows, train
from torchtitan.checks import load_job
from torchtitan.config import RecipeError, json_schema
from torchtitan.config.other_names import OLD_KEYS
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.tools.cli import ABSENT, main
from torchtitan.tools.compare.study import REMOVED, read_study

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/stability.md").read_text()
UNTIL_38F6C66 = {
    "metrics": {"time/agree"},
    "report": {
        "variants[].grad_norm.tokens[]",
        "variants[].loss.tokens[]",
        "variants[].tokens_per_step",
    },
}
"""Names of the first state that were changed before anything was promised; the page lists them."""

every_commit = pytest.mark.parametrize("commit", COMMITS)


@pytest.fixture
def in_earlier(monkeypatch):
    """The recipe of the checkpoints names its text and its model as they are there."""
    monkeypatch.chdir(EARLIER)
    monkeypatch.syspath_prepend(str(EARLIER))


def kept(commit, name):
    return json.loads((EARLIER / commit / name).read_text())


def written(path):
    return {
        key: value
        for line in path.read_text().splitlines()
        for key, value in json.loads(line).items()
    }


def test_the_page_names_every_state():
    assert {"6ebf193", "38f6c66", "ff7c037", "c54eb56"} <= set(COMMITS)
    assert set(re.findall(r"`([0-9a-f]{7})`", PAGE)) == set(COMMITS)
    for names in UNTIL_38F6C66.values():
        assert all(f"`{name.removesuffix('[]')}`" in PAGE for name in names)


@pytest.fixture
def in_clone(commit, tmp_path, monkeypatch):
    """A folder with the recipes of a commit, and the data they name; returns their paths."""
    (tmp_path / "train_configs").symlink_to(EARLIER / commit / "train_configs")
    (tmp_path / "assets/images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    paths = (EARLIER / commit).glob("train_configs/**/*.toml")
    return sorted(str(path.relative_to(EARLIER / commit)) for path in paths)


@every_commit
def test_recipes_load(in_clone):
    elsewhere = ["model.tokenizer_path", *(f"data.sources.{n}.path" for n in range(7))]
    for name in in_clone:
        if "studies" not in name:
            job = load_job(name, [], None, "cuda", exempt=elsewhere).config
            assert MODELS[job.model.name]


@every_commit
def test_studies_load(in_clone):
    for name in (name for name in in_clone if "studies" in name):
        removed = [key for key in tomllib.loads(Path(name).read_text()) if key in REMOVED]
        if not removed:
            assert len(read_study(Path(name)).plans) > 1
            continue
        with pytest.raises(RecipeError) as refusal:
            read_study(Path(name))
        told = [line.partition(": this key was removed; ") for line in refusal.value.lines]
        keys = [(where.rpartition(" ")[2], advice) for where, _, advice in told]
        assert keys == [(key, REMOVED[key]) for key in removed]


@every_commit
def test_the_resolved_recipe_of_a_run_has_the_same_values(commit, in_earlier):
    path = f"{commit}/run/recipe.toml"
    resolved = load_job(path, [], 2, "cpu").config.flat()
    text = (EARLIER / path).read_text()
    sections = {name: values for name, values in tomllib.loads(text).items() if values}
    expected = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
        if not isinstance(value, dict | list)
    }
    found = {key: resolved[key] for key in expected if key in resolved}
    assert found == {key: expected[key] for key in found}
    assert {key for key in expected if key not in found} <= set(OLD_KEYS)
    assert len(found) > 100


def test_every_key_is_known():
    schema = json_schema(JobConfig)
    known = {*settings(schema, schema["$defs"]), *OLD_KEYS}
    for commit in COMMITS:
        assert set(kept(commit, "settings.json")) <= known, commit


def test_every_option_is_known(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    expected = {commit: kept(commit, "command_line.json") for commit in COMMITS}
    for verb in {verb for options in expected.values() for verb in options} - {*ABSENT}:
        if verb == "launch":
            monkeypatch.setattr("sys.argv", ["launch.py", "--help"])
            with pytest.raises(SystemExit, match="0"):
                runpy.run_path(str(ROOT / "torchtitan/launch.py"), run_name="__main__")
        else:
            assert main([*verb.split(), "--help"]) == 0
        found = {*listed_options(capsys.readouterr().out), "--help"}
        for commit, options in expected.items():
            kept_options = {
                option for option in options.get(verb, ()) if f"{verb} {option}" not in ABSENT
            }
            assert kept_options <= found, f"{verb} of {commit}"


@pytest.mark.parametrize("absent", ABSENT)
def test_what_does_not_exist_is_refused_with_advice(absent, says):
    option = absent.split()[-1].startswith("--")
    words = f"{absent.replace(' --', ' outputs/run --')}=2" if option else f"{absent} outputs/run"
    error = says(*words.split(), status=2)
    assert error.startswith(f"error: there is no `torchtitan {absent}`")
    assert ABSENT[absent].split("; ")[0] in error


def test_metrics_keep_their_names(in_earlier, tmp_path):
    job = load_job("recipe.toml", [f"--job.dump_folder={tmp_path}"], 2, "cpu").config
    run_ranks(train, 2, job)
    found = {key for row in rows(tmp_path) for key in row}
    for commit in COMMITS:
        missing = written(EARLIER / commit / "run/metrics.jsonl").keys() - found
        assert missing <= (UNTIL_38F6C66["metrics"] if commit == "6ebf193" else set()), commit


@every_commit
@pytest.mark.usefixtures("no_plan")
def test_runs_are_read(commit, in_earlier, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(EARLIER / commit / "run", run)
    shutil.copytree(EARLIER / commit / "checkpoint", run / "checkpoint")
    for verb in ("plot", "checkpoint ls"):
        assert main([*verb.split(), str(run)]) == 0, verb


@pytest.mark.usefixtures("no_plan")
def test_runs_of_all_states_are_compared(in_earlier, tmp_path):
    runs = []
    for commit in COMMITS:
        shutil.copytree(EARLIER / commit / "run", tmp_path / commit)
        runs.append(str(tmp_path / commit))
    words = ["--output", str(tmp_path / "study"), "--warmup-steps", "1"]
    assert main(["compare", *runs, *words]) == 0
    report = json.loads((tmp_path / "study/report.json").read_text())
    assert [len(variant["loss"]["values"]) for variant in report["variants"]] == [6] * len(COMMITS)


@pytest.mark.gate
def test_reports_keep_their_fields(in_earlier, tmp_path):
    variants = ["--vary", "optimizer.lr=1e-2,3e-2", "--rounds=1", "--warmup-steps=1"]
    alone = ["--ranks=1", "--steps=2", f"--output={tmp_path}"]
    assert main(["compare", "recipe.toml", *variants, *alone]) == 0
    found = set(fields(json.loads((tmp_path / "report.json").read_text())))
    for commit in COMMITS:
        gone = UNTIL_38F6C66["report"] if commit == "6ebf193" else set()
        gone = gone | {f"conditions.{key}{'[]' * ('seed' in key)}" for key in REMOVED}
        missing = set(kept(commit, "report.json")) - found - gone - {"variants[].planned"}
        # Shares have the names of the phases in metrics.jsonl; a phase without time is left out.
        assert not {name for name in missing if "time_shares" not in name}
    # It was null, since nothing planned.
    assert "variants[].planned.memory_gib" in found

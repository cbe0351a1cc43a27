"""The tiers of the tests: each layout is in one, and CI runs what the README says."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.layouts import DAILY, LAYOUTS
from tests.research import layouts as research
from tests.tiers import tiers
from torchtitan.parallel.sharding import SHARDING

ROOT = Path(__file__).parent.parent


def test_a_tier_names_only_what_there_is():
    with pytest.raises(AssertionError, match="a case that there is not"):
        tiers(["one", "two"], ["three"])
    with pytest.raises(AssertionError, match="in one tier"):
        tiers(["one", "two"], ["one"], ["one"])
    marks = [param.marks for param in tiers(["one", "two", "three"], ["one"], gate=["two", "four"])]
    assert [[mark.name for mark in each] for each in marks] == [[], ["gate"], ["slow"]]


def test_every_axis_converter_and_way_to_shard_is_compared_daily():
    daily = [LAYOUTS[name] for name in DAILY]
    for axis in ("pp", "replicate", "shard", "cp", "tp"):
        assert max(getattr(layout, axis) for layout in daily) > 1, axis
    assert converters(daily) == converters(LAYOUTS.values())
    daily += [research.LAYOUTS[name] for name in research.DAILY]
    assert converters(daily) >= converters(research.LAYOUTS.values())
    ways = {layout.sections.get("sharding", {}).get("name", "fsdp2") for layout in daily}
    assert ways == SHARDING.keys()


def converters(layouts):
    return {type(converter).__name__ for layout in layouts for converter in layout.convert}


def test_ci_runs_the_commands_of_the_readme_and_then_the_rest():
    """Each without arguments that change what is tested."""
    readme = [
        line
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
        for line in block.splitlines()
    ]
    ci = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("./")]
    assert ci == [
        './run_train.sh --job.dump_folder "$(mktemp -d)"',
        "./scripts/test",
        "./scripts/test -n auto -m gate",
    ]
    assert {"./run_train.sh", "./scripts/test"} <= set(readme)


def test_what_is_left_out_is_the_gate_and_the_trials():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert settings["ini_options"]["addopts"].endswith("-m 'not gate and not slow'")
    script = (ROOT / "scripts/test").read_text()
    assert '--all) set -- -m "not slow"' in script
    assert " --report=benchmarks/results/release_tests.md" in script.partition('set -- -m "" ')[2]

"""The verb `plan`: its text, its JSON, its page, and its answers to bad input."""

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.compare.browser import CHROMIUM, TEXT_CONTRAST, opened_browser
from tests.tables import table
from torchtitan.logging import logger
from torchtitan.plan.command import token_count
from torchtitan.plan.hardware import hardware_names
from torchtitan.plan.plan_report import count, duration, plan_text
from torchtitan.tools.cli import main

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "train_configs/debug_model.toml")
PIPELINE = [
    *("--world-size", "4", "--parallelism.pipeline_parallel_degree", "2"),
    *("--training.local_batch_size", "4", "--training.seq_len", "64"),
]
TRIPLES = {
    "memory": ("peak_allocated_gib", "peak_reserved_gib", "fits"),
    "speed": ("seconds_per_step", "tokens_per_second_per_device", "mfu"),
}


def plan_of(capsys, *words):
    """The JSON object of a plan, which must be valid without infinities."""
    capsys.readouterr()
    assert main(["plan", RECIPE, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def refusal(capsys, *words):
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return printed.err


class Planned(NamedTuple):
    """What a plan prints and writes."""

    found: dict[str, Any]
    page: str
    said: str


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of a run with a pipeline, saves and a budget."""
    page = tmp_path_factory.mktemp("plan") / "plan.html"
    words = [*PIPELINE, "--hardware", "h100", "--json", "--html", str(page), "--tokens", "2M"]
    words += ["--checkpoint.enable", "true", "--checkpoint.interval", "7"]
    with (
        mock.patch.multiple(logger, handlers=[], propagate=logger.propagate),
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()) as said,
    ):
        assert main(["plan", RECIPE, *words]) == 0
    return Planned(json.loads(printed.getvalue()), page.read_text(), said.getvalue())


def test_the_json_has_values_with_limits(planned):
    found = planned.found
    for section, names in TRIPLES.items():
        for name in names:
            each = found[section][name]
            assert list(each) == ["value", "low", "high"]
            if name == "fits":
                assert each == {"value": True, "low": True, "high": True}
            else:
                assert 0 < each["low"] < each["value"] < each["high"]
    seconds = found["speed"]["seconds_per_step"]["value"]
    rate = found["batch"]["tokens"] / seconds / found["world_size"]
    assert found["speed"]["tokens_per_second_per_device"]["value"] == pytest.approx(rate)
    assert found["speed"]["tokens_per_day"]["value"] == pytest.approx(rate * 4 * 86400)
    parts = found["speed"]["seconds"]
    total = sum(parts["exposed"].values()) + sum(v for k, v in parts.items() if k != "exposed")
    assert total == pytest.approx(seconds)


def test_each_kind_of_rank_adds_up(planned):
    memory = planned.found["memory"]
    assert [stage for rank in memory["ranks"] for stage in rank["pipeline_ranks"]] == [0, 1]
    assert sum(rank["count"] for rank in memory["ranks"]) == 4
    for rank in memory["ranks"]:
        assert sum(rank["by_kind_gib"].values()) == pytest.approx(rank["peak_allocated_gib"])
        reserved = rank["peak_allocated_gib"] + rank["allocator_gib"]
        assert reserved == pytest.approx(rank["peak_reserved_gib"])
    fullest = max(memory["ranks"], key=lambda rank: rank["peak_reserved_gib"])
    assert memory["rank"] == fullest["first_rank"]
    assert memory["moment"] == fullest["moment"]
    assert memory["peak_reserved_gib"]["value"] == fullest["peak_reserved_gib"]
    room = memory["capacity_gib"] - memory["outside_allocator_gib"] - fullest["peak_reserved_gib"]
    assert memory["room_gib"] == pytest.approx(room)
    pipeline = planned.found["pipeline"]
    assert (pipeline["stages"], pipeline["microbatches"]) == (2, 4)
    assert 0 < pipeline["bubble"] < 1


def test_the_page_has_the_plan_and_its_charts(planned):
    found, page, _ = planned
    inside = page.split('<script type="application/json" id="plan">')[1].split("</script>")[0]
    assert json.loads(inside) == found
    first, *rest = page.split("<h2>")
    rate = found["speed"]["tokens_per_second_per_device"]["value"]
    assert f"GiB of a device; it trains {rate:,.0f} tokens/s per device, and the run" in first
    # The fullest rank comes first, with every kind of memory and the limit.
    assert first.count("<figure>") == 1
    fullest = max(found["memory"]["ranks"], key=lambda rank: rank["peak_reserved_gib"])
    assert f"Memory over a step, pipeline rank {fullest['pipeline_ranks'][0]}<" in first
    # The limit would dwarf a model as small as this one.
    assert ("limit of a device" in first, "above this scale" in first) == (True, True)
    assert 'class="limit"' not in first
    for kind, size in fullest["by_kind_gib"].items():
        # Those that are too small to be seen are left out.
        assert (f"<title>{kind}: at most " in first) == (size > 0.005), kind
    assert [part.split("</h2>")[0] for part in rest] == [
        *("Memory of other ranks", "Time of a step", "Not modeled", "The plan")
    ]
    charts = [part.split("</strong>")[0] for part in rest[1].split("<figcaption><strong>")[1:]]
    assert charts == ["Parts of a step", "Pipeline schedule", "Work of a rank"]
    assert "<span>rank 1</span>" in rest[1]
    assert "default-src 'none'" in page
    assert "src=" not in page


@pytest.mark.gate
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_is_drawn(planned, tmp_path):
    file = tmp_path / "plan.html"
    file.write_text(planned.page)
    with opened_browser() as browser:
        live = browser.new_page(viewport={"width": 1280, "height": 900})
        asked, said = [], []
        live.on("request", lambda request: asked.append(request.url))
        live.on("console", lambda message: said.append(message.text))
        live.goto(file.as_uri())
        for scheme in ("light", "dark"):
            live.emulate_media(color_scheme=scheme)
            contrast, words, _ = live.evaluate(TEXT_CONTRAST)
            assert contrast >= 4.5, words
        live.set_viewport_size({"width": 360, "height": 800})
        assert live.evaluate("document.documentElement.scrollWidth") <= 360
        assert (asked, said) == ([file.as_uri()], [])


def test_the_text_says_what_the_json_says(planned):
    found = planned.found
    text = "\n".join(plan_text(found))
    assert text.startswith("llama3 debugmodel on 4 ranks: pp 2, dp_shard 2; hardware: h100\n")
    assert f"fits: yes, {found['memory']['room_gib']:.1f} of " in text
    rate = found["speed"]["tokens_per_second_per_device"]["value"]
    # The answer comes first.
    fits, speed, days = text.splitlines()[1:4]
    assert fits.startswith("fits: yes, ")
    assert f"{rate:,.0f} (" in speed
    assert f"{4 * rate:,.0f} in total" in speed
    assert f"steps of {found['speed']['seconds_per_step']['value']:.4g} (" in days
    assert days.endswith(f" s: {86400 * found['budget']['days']:.3g} s")
    assert duration({"days": 1.26, "device_hours": 1234.5}) == "1.3 days, 1,234 device-hours"
    assert "pipeline 1F1B: 2 stages, 4 microbatches; bubble 20.0%" in text
    for each in found["traffic"]:
        assert f"{each['axis']} " in text


def test_unknown_hardware_has_memory_and_no_speed(capsys):
    found = plan_of(capsys, "--training.seq_len", "64", "--job.hardware=")
    unknown = dict.fromkeys(("value", "low", "high"))
    assert found["hardware"] is None
    assert found["memory"]["peak_reserved_gib"]["value"] > 0
    assert found["memory"]["fits"] == unknown
    assert all(found["speed"][name] == unknown for name in TRIPLES["speed"])
    assert found["budget"]["days"] is None
    text = "\n".join(plan_text(found))
    assert "fits: unknown" in text
    assert "unknown, as the hardware is" in text


@pytest.mark.gate
def test_a_recipe_that_does_not_fit_is_an_answer(capsys):
    words = ("--training.seq_len", "2048", "--training.local_batch_size", "8", "--job.hardware=")
    whole = plan_of(capsys, *words)["memory"]["peak_reserved_gib"]["value"]
    found = plan_of(capsys, *words, "--device-memory", f"{0.9 * whole}")
    assert found["memory"]["fits"]["value"] is False
    assert found["memory"]["room_gib"] == pytest.approx(-0.1 * whole)
    assert 1 <= len(found["changes"]) <= 3
    for change in found["changes"]:
        assert change["peak_reserved_gib"]["value"] <= 0.9 * whole
    text = "\n".join(plan_text(found))
    assert "fits: no, " in text.splitlines()[1]
    assert text.splitlines()[2] == f"it fits with {' '.join(found['changes'][0]['flags'])}:"
    assert all(" ".join(change["flags"]) in text for change in found["changes"])
    again = plan_of(capsys, *words, *found["changes"][0]["flags"], "--device-memory", f"{whole}")
    assert again["memory"]["fits"]["value"] is True


def test_nothing_fits_in_a_tiny_device(capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.plan.fitting.MOST_TRIED", 0)
    words = ("--training.seq_len", "64", "--job.hardware=", "--world-size", "2")
    words += ("--parallelism.data_parallel_replicate_degree", "2")
    found = plan_of(capsys, *words, "--device-memory", "0.01")
    [rank] = found["memory"]["ranks"]
    held = rank["by_kind_gib"]["parameters"] + rank["by_kind_gib"]["optimizer states"]
    assert found["changes"] == []
    assert found["memory"]["least_devices"] == math.ceil(held / 0.01)
    text = "\n".join(plan_text(found))
    assert f"use at least {found['memory']['least_devices']} devices" in text


def test_a_budget_of_tokens(planned):
    budget = planned.found["budget"]
    assert budget["tokens"] == 2e6
    assert budget["device_hours"] == pytest.approx(4 * 24 * budget["days"])


def test_groups_of_replicas_share_the_batch(capsys):
    words = ("--fault_tolerance.enable", "--fault_tolerance.group_size=2", "--world-size", "2")
    found = plan_of(capsys, *words, "--hardware", "h100")
    flops, budget = found["flops"], found["budget"]
    assert flops["per_step"] == 4 * flops["per_step_per_device"]
    assert budget["device_hours"] == pytest.approx(4 * 24 * budget["days"])


def test_tokens_are_read_and_written_alike():
    words = ("15T", "1.5e12", "300b", "7")
    assert [token_count(word) for word in words] == [15e12, 1.5e12, 3e11, 7]
    assert [count(value) for value in (15e12, 3e11, 7)] == ["15T", "300B", "7"]


def test_bad_input_is_refused_with_the_nearest_possibility(capsys):
    for words, expected in table(__file__, "bad_plans.txt"):
        assert expected in refusal(capsys, RECIPE, *words.split()), words


def test_hardware_is_told_with_all_other_mistakes(capsys, says, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[training]\nstepz = 3\n")
    for search in (["--search"], ["--search", "--seconds", "1"]):
        said = refusal(capsys, str(recipe), *search)
        assert "mine.toml:2: training.stepz" in said
        assert "--search: it needs the hardware" in said
    recipe.write_text('[job]\nhardware = "h10"\n[training]\nsteps = 0\nlocal_batch_size = -1\n')
    own = tmp_path / "own.toml"
    own.write_text("memory_gib = 1e9")
    for verb in ("check", "train", "plan"):
        said = says(verb, recipe, status=2)
        assert f'{recipe}:2: job.hardware: got "h10"' in said
        assert "did you mean h100?" in said
        assert "training.steps" in said
        assert "training.local_batch_size" in said
        said = says(verb, RECIPE, "--job.hardware", own, status=2)
        assert "memory_gib: got 1000000000.0" in said
        assert f"{own}: peaks is missing" in said


def test_a_file_of_hardware_that_is_wrong_is_refused(capsys, tmp_path):
    lines = (ROOT / "torchtitan/plan/hardware/h100.toml").read_text().splitlines()
    for key, wrong, expected in table(__file__, "bad_hardware.txt"):
        at = next(i for i, line in enumerate(lines) if line == key or line.startswith(f"{key} ="))
        own = tmp_path / "own.toml"
        own.write_text("\n".join([*lines[:at], wrong, *lines[at + 1 :]]))
        refused = refusal(capsys, RECIPE, "--hardware", str(own))
        assert expected in refused, key
        assert str(own) in refused


def test_a_flavor_too_large_for_any_layout_is_an_answer(capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.plan.fitting.MOST_TRIED", 0)
    words = ("--model.flavor", "8B", "--training.seq_len", "64", "--hardware", "a100-40")
    found = plan_of(capsys, *words)
    assert found["memory"]["fits"]["value"] is False
    assert found["changes"] == []
    # Parameters, gradients and states of 8 billion parameters in float32.
    assert 3 <= found["memory"]["least_devices"] <= 4
    lines = [*plan_text(found)]
    assert "fits: no, " in lines[1]
    assert "no change was found" in lines[2]
    assert f"use at least {found['memory']['least_devices']} devices" in lines[2]
    assert not any("tokens/s" in line or "days" in line for line in lines)


def test_what_is_left_out_is_said_everywhere(planned):
    note = "a save every 7 steps is not in the time of a step"
    assert any(note in each for each in planned.found["notes"])
    assert f"warning: checkpoint.interval: {note}" in planned.said
    assert f"{note}</li>" in planned.page


def test_parts_of_an_amount_add_up(planned):
    found = planned.found
    for rank in found["memory"]["ranks"]:
        activations = rank["by_kind_gib"]["activations"]
        assert sum(rank["activations_gib"].values()) == pytest.approx(activations)
        assert {"attention", "products"} <= rank["activations_gib"].keys()
        assert sum(rank["outside_gib"].values()) == pytest.approx(rank["outside_allocator_gib"])
        assert rank["outside_gib"]["communicators"] > 0
        assert rank["by_kind_gib"]["workspaces"] == 0.0625
    text = "\n".join(plan_text(found))
    for name in ("products", "communicators", "context and kernels", "workspaces"):
        assert f"  {name} " in text


def test_a_recipe_is_wanted(capsys):
    assert "torchtitan plan debug_model" in refusal(capsys)


def test_the_help_names_the_hardware(says):
    text = " ".join(says("plan", "--help").split())
    assert all(name in text for name in hardware_names())


@pytest.mark.parametrize("verb", ["plan", "check"])
def test_files_that_are_elsewhere_do_not_stop_it(verb, capsys, tmp_path):
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "elsewhere/{name}"\nweight = 1\n'
        for name in "ab"
    )
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'[model]\ntokenizer_path = "elsewhere"\n{sources}')
    small = ("--training.seq_len", "64", "--model.n_layers", "1", "--compile.enable=false")
    # A check says what is missing, too.
    assert main([verb, str(recipe), *small]) == (2 if verb == "check" else 0)
    printed = capsys.readouterr()
    assert "llama3 debugmodel" in printed.out
    assert printed.err.count("there is no such file") == (3 if verb == "check" else 0)

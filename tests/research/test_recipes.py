"""The recipe and the page of each system that is there are right, and its mistakes are refused."""

import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.recipes.test_bad_recipes import HELP, cases, is_refused
from tests.recipes.test_recipes import is_read_again, repeated
from tests.training.test_global_batch import assert_fits
from tests.training.test_optimizers import a_rate_trains_the_debug_model
from torchtitan import research
from torchtitan.checks import load_job
from torchtitan.config import listed
from torchtitan.device import Device
from torchtitan.optim import OPTIMIZERS
from torchtitan.tools.verify.measure import training

FOLDER = Path(__file__).parents[2] / "train_configs/research"
RANKS = dict.fromkeys(("demo", "diloco", "loco", "qsdp", "rtp", "simple_fsdp"), 2)
RANKS |= dict.fromkeys(("auxiliary_tasks", "galore", "hadamard_attention", "low_bit"), 1)
RANKS |= dict.fromkeys(("qk_clip", "ranger21"), 1)
"""The ranks that each is run on here."""
FULL_SIZE = {"galore_7b"}
"""Recipes that are too large to be run here; tests/research/test_galore.py plans it."""
SYSTEMS = [name for name in RANKS if find_spec(f"{research.__name__}.{name}")]
SMALL = [
    *("--training.steps=3", "--training.seq_len=32", "--training.local_batch_size=2"),
    "--training.global_batch_size=-1",
    *("--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq=1"),
    *("--data.report_unigram_loss=false", "--job.dump_folder=unused"),
    "--metrics.save_events=false",
    *("--model.n_layers=2", "--model.dim=64", "--model.n_heads=4", "--model.n_kv_heads=2"),
    *("--model.ffn_dim=192", "--lr_scheduler.warmup_steps=2"),
]


def test_every_system_has_a_recipe():
    # What is about images is in test_vit_mae_recipes.py.
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*RANKS, *FULL_SIZE, "vit_mae"}


ELSEWHERE = {
    "auxiliary_losses_debug": "auxiliary_tasks",
    "low_precision_attention_debug": "hadamard_attention",
}
"""Recipes of systems that have stood with those of the main road, and the system of each."""
BEFORE = [FOLDER.parent / f"{n}.toml" for n, system in ELSEWHERE.items() if system in SYSTEMS]


def test_nothing_is_said_twice():
    paths = [*BEFORE, *(FOLDER / f"{name}.toml" for name in (*SYSTEMS, *FULL_SIZE))]
    assert [said for path in paths for said in repeated(path)] == []


RECORDED = [
    ("galore", "research/galore", "--optimizer.svd=exact"),
    ("ranger21", "research/ranger21", "--lr_scheduler.decay_ratio=none"),
    ("ranger21", "research/ranger21", "--lr_scheduler.decay_from=60"),
    ("vit_mae", "vit_mae_debug", "--data.images.crop=window"),
]
"""Systems and recipes, with a flag beside which other keys have no effect, or that TOML cannot
hold."""


@pytest.mark.parametrize(("system", "name", "flag"), RECORDED)
def test_what_a_run_records_is_read_again(system, name, flag, tmp_path):
    if system in SYSTEMS:
        assert is_read_again(FOLDER.parent / f"{name}.toml", [flag], tmp_path)


def test_recipes_of_before_are_valid(says):
    for path in BEFORE:
        assert says("check", path, "--world-size", "1").startswith("valid on 1 rank"), path


def test_recipes_fit_up_to_eight_ranks():
    for name in SYSTEMS:
        ranks = [ranks for ranks in (1, 2, 4, 8) if ranks >= RANKS[name]]
        assert_fits(FOLDER / f"{name}.toml", ranks)


ALONE = {"galore": "GaLore", "ranger21": "Ranger21"}


@pytest.mark.gate
@pytest.mark.parametrize("system", [system for system in ALONE if system in SYSTEMS])
def test_a_rate_and_nothing_else_trains_the_debug_model(system):
    a_rate_trains_the_debug_model(ALONE[system])


def losses(job):
    return [row["loss"] for _, row in training(job, Device("cpu"), uneven=False)]


@pytest.mark.parametrize(
    "name",
    [
        # Inductor compiles the whole model, or the updates.
        pytest.param(name, marks=pytest.mark.slow) if name in ("simple_fsdp", "low_bit") else name
        for name in SYSTEMS
    ],
)
def test_it_trains(name, tmp_path, monkeypatch):
    """From about the loss of guessing evenly among all 2,048 tokens."""
    monkeypatch.chdir(tmp_path)
    recipe = load_job(FOLDER / f"{name}.toml", SMALL, RANKS[name], "cpu")
    for found in run_ranks(losses, RANKS[name], recipe.config):
        assert len(found) == 3
        assert found[0] == pytest.approx(math.log(2048), rel=0.05)
        assert found[-1] < found[0]


TABLE = Path(__file__).with_name("bad_recipes.txt")
RANGER21 = "{RANGER21}"
COMPLETE = [*RANKS] == SYSTEMS and find_spec(f"{research.__name__}.vit_mae")
MISTAKES = cases(TABLE) if COMPLETE else []
"""Their messages name what all systems have, so that one alone gives others."""


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_mistake(case, tmp_path, monkeypatch):
    lines = case.lines
    if any(RANGER21 in line for line in lines):
        settings = listed(OPTIMIZERS["Ranger21"].model_fields, f"{HELP} optimizer")
        lines = [line.replace(RANGER21, settings) for line in lines]
    is_refused(case._replace(lines=lines), tmp_path, monkeypatch)


def test_table_is_read_whole():
    found = cases(TABLE)
    assert len(found) >= 20
    assert len({case.name for case in found}) == len(found)
    assert all(case.lines for case in found)


PAGES = sorted(Path(research.__file__).parent.glob("*.md"))


def code(name, page):
    """A file that a page names: of its system, of a folder in it, or of one above."""
    places = [folder / name for folder in (page.with_suffix(""), *page.parents[:2])]
    found = [place for place in places if place.is_file()]
    assert found, f"{page.stem}: {name}"
    return found[0].read_text()


def test_every_system_has_a_page():
    systems = {path.stem for path in Path(research.__file__).parent.iterdir()}
    assert {page.stem for page in PAGES} == systems - {"common", "__init__", "__pycache__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    assert "https://arxiv.org/abs/" in text
    recipe = f"train_configs/research/{page.stem}.toml"
    assert recipe in text
    assert (FOLDER.parents[1] / recipe).is_file()
    assert "](../../docs/" in text, "what it is a part of"
    unproved = r"[Nn]ot reproduced|not been measured|does not show|Not shown|results: none"
    assert re.search(unproved, text), "what of the paper is not shown here"
    for name in re.findall(r"`(tests/\S+\.py|train_configs/\S+\.toml|benchmarks/\S+)`", text):
        assert (FOLDER.parents[1] / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_equations_stand_next_to_lines_that_exist(page):
    """In the last cells of a table whose head says where: files, and names in them, or links."""
    named, source, is_there = 0, "", False
    for line in page.read_text().splitlines():
        cell = re.split(r"(?<!\\)\|", line)[-2].strip() if line.startswith("| ") else ""
        is_there = cell in ("where", "code") or (is_there and line.startswith("|"))
        if not is_there:
            continue
        for word, link in re.findall(r"`([\w/]+(?:\.\w+)*)`(?:\]\((\S+)\))?", cell):
            if link or word.endswith(".py"):
                source = code(link or word, page)
            if word.endswith(".py"):
                continue
            for part in word.split("."):
                assert re.search(rf"\b{part}\b", source), f"{page.stem}: {word}"
            named += 1
    assert named >= 4

"""The documentation does what it says.

A page's blocks are played in order, in a folder of the page's own that has `train_configs/`. A
block may have a marker above it, an HTML comment that readers do not see:

    file: NAME       the block is written there before anything is played
    not run: WHY     the block is left out
    refused          the recipe has mistakes
    answer of: NAME  the block is what `torchtitan check NAME` says
    killed           the run is killed after its first save
    ends with: 1     the exit status of the commands

How each kind of block is played:

- ```toml``` is loaded and checked as a recipe; one without a file name extends the debug recipe.
- ```python``` without a file name is executed.
- ```bash``` is run command by command, through the same `main` as from a shell, in a forked
  process, with few steps and short sequences. `run_train.sh` is really started, with two processes,
  where it is given NGPU; else its recipe is trained here (.ci/run starts it as it is). The words of
  torchrun are parsed by torch, and its recipe is checked for that many ranks; with `--processes`,
  for every number of ranks that may be. Of `scripts/test` the tests are
  collected. Nothing is planned but on the pages about plans.

Other blocks are for reading only.
"""

import ast
import contextlib
import functools
import importlib
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests import forked
from tests.reliability.trials import at_call
from tests.sources import MODULES, PAGES, ROOT, text, tree
from tests.tiers import tiers
from torchtitan import __version__
from torchtitan.checks import load_job
from torchtitan.cluster import launcher
from torchtitan.config import ConfigError, print_error, split_recipe
from torchtitan.config.flags import all_sections
from torchtitan.config.other_names import OLD_KEYS
from torchtitan.job import JobConfig
from torchtitan.tools import cli
from torchtitan.tools.cli import act
from torchtitan.torchtitan_keys import TABLE

PAGES_AND_RESULTS = [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))]
FOLDERS = ("torchtitan", "tests", "benchmarks", "scripts", "train_configs", "docs")
ABOUT_PLANS = (ROOT / "README.md", ROOT / "docs/plan.md")
LONG = (
    *("checkpoint.md", "compare.md", "data.md", "evaluation.md", "precision.md", "profiling.md"),
    *("quickstart.md", "tutorial.md", "verify.md", "vision.md", "weights.md"),
)
IN_GATE = [*ABOUT_PLANS, *(ROOT / "docs" / name for name in LONG)]
DEBUG_RECIPE = "train_configs/debug_model.toml"

# What a command is made small by; more than this many steps become this many.
MOST_STEPS = 4
SMALL = {"--training.steps": "2", "--training.seq_len": "32", "--validation.steps": "1"}
SHORT = {"--training.seq_len": "32"}
SAVED = SMALL | {"--training.steps": "4", "--checkpoint.interval": "2"}
"""Of runs that are killed, and go on."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_played(self):
        return "not run" not in self.marks

    @property
    def commands(self):
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page):
    lines, marks = iter(enumerate(page.read_text().splitlines(), 1)), {}
    for number, line in lines:
        if mark := re.fullmatch(r"<!-- ([a-z ]+?)(?:: (.+))? -->", line):
            marks[mark[1]] = mark[2] or ""
        elif line.startswith("```"):
            inside = []
            for _, text in lines:
                if text == "```":
                    break
                inside.append(text + "\n")
            yield Block(page, number, line[3:], "".join(inside), marks)
            marks = {}
        else:
            assert not marks, f"{page}:{number}: a marker stands right above its block"


def prose(page):
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


PLAYED = [
    page
    for page in PAGES
    if any(each.is_played and each.language in ("bash", "python", "toml") for each in blocks(page))
]
LONGEST = [page for page in PLAYED if page.name in ("compare.md", "verify.md", "vit_mae.md")]
"""Whole comparisons, whose parts are tested elsewhere."""
DAILY = [page for page in PLAYED if page not in IN_GATE + LONGEST]


@pytest.mark.costs("commands of a page")
@pytest.mark.parametrize("page", tiers(PLAYED, DAILY, LONGEST), ids=lambda page: page.name)
def test_blocks_of_a_page_do_what_it_says(page, tmp_path, request):
    if page not in ABOUT_PLANS:
        request.getfixturevalue("no_plan")
    play(page, tmp_path)


@pytest.mark.slow
def test_scripts_of_pages_run_under_torchrun(tmp_path):
    """Of plain scripts: torch may crash as they exit, by chance, and a run of ours may not.

    A thread of gloo then frees a tensor after the interpreter ended: pytorch/pytorch, issue 190489.
    tests/checkpoint/test_torch_reader.py runs the script in every tier.
    """
    play(ROOT / "docs/weights.md", tmp_path, starts_torchrun=True)


def play(page, folder, *, starts_torchrun=False):
    (folder / "train_configs").symlink_to(ROOT / "train_configs")
    found = list(blocks(page))
    for block in found:
        if name := block.marks.get("file"):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    for block in found:
        if block.is_played:
            for played in plays(block, folder, starts_torchrun):
                done = forked.run(played.action, folder)
                expected = int(block.marks.get("ends with", -9 if "killed" in block.marks else 0))
                output = done.stdout + done.stderr
                assert done.status == expected, f"{block}: {played.what}\n{output}"


class Play(NamedTuple):
    """Something to do in the page's folder; its status is 0 if the page is right."""

    what: str
    action: Callable[[], int]


def plays(block, folder, starts_torchrun):
    if block.language == "bash":
        for command in block.commands:
            yield Play(command, functools.partial(run, command, block, starts_torchrun))
    elif block.language == "python":
        yield Play("compile", lambda: ast.parse(block.text) is None)
        if "file" not in block.marks:
            yield Play("execute", lambda: exec(block.text, {}) is not None)
    elif "answer of" in block.marks:
        yield Play("refuse", lambda: compare(refusal(block.marks["answer of"]), block.text))
    elif "refused" in block.marks:
        yield Play("refuse", lambda: refusal(block.marks["file"]) == "")
    elif block.language == "toml":
        yield Play("load", lambda: load(block, folder))


def load(block, folder):
    name = block.marks.get("file", f"line-{block.line}.toml")
    if "file" not in block.marks:
        parent = re.match(r'extends = "(.+)".*\n', block.text)
        assert not parent or (ROOT / "train_configs" / parent[1]).is_file()
        text = block.text[parent.end() :] if parent else block.text
        (folder / name).write_text(f'extends = "{DEBUG_RECIPE}"\n{text}')
    load_job(name, [], None, "cpu")
    return 0


def refusal(recipe):
    """What is said about a recipe with mistakes."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            load_job(recipe, [], None, "cpu")
        except ConfigError as error:
            print_error(error)
    return printed.getvalue()


def compare(found, expected):
    print(found)
    return found != expected


def run(command, block, starts_torchrun):
    """Run a command of the documentation as the module's docstring says."""
    words = shlex.split(command)
    environment = {}
    while "=" in words[0] and not words[0].startswith("-"):
        name, _, environment[name] = words.pop(0).partition("=")
    match words:
        case ["./run_train.sh", *flags] if "NGPU" in environment:
            # This Python is to be used as it is; if it does not do, nothing is downloaded.
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = os.environ | environment
            environment |= {"NGPU": "2", "PATH": path, "PIP_NO_INDEX": "1"}
            # The script works in its own folder.
            folder = {"--job.dump_folder": str(Path("outputs/script").resolve())}
            script = [ROOT / "run_train.sh", *small(flags, SMALL | folder)]
            return subprocess.call(script, env=environment)
        case ["./run_train.sh", *flags]:
            recipe = environment.get("CONFIG_FILE", DEBUG_RECIPE)
            return cli.main(["train", "--job.config_file", recipe, *small(flags)])
        case ["source", ".venv/bin/activate"]:
            # What makes that environment, where none does.
            return ".venv/bin/python" not in (ROOT / "scripts/environment.sh").read_text()
        case ["./scripts/test"] | ["./scripts/test", "--all"]:
            return subprocess.call(["bash", "-n", ROOT / "scripts/test"])
        case ["./scripts/test", *arguments]:
            return collect(*arguments)
        case ["torchtitan", "train", *flags] | ["python", "-m", "torchtitan.train", *flags]:
            if "killed" in block.marks:
                at_call("torchtitan.trainer:Trainer.step", 3)()
            if block.page.name == "tutorial.md":
                return cli.main(["train", *small(flags, SAVED)])
            launcher.start = only_check
            return cli.main(["train", *(flags if "--processes" in flags else small(flags))])
        case ["torchtitan", "compare" | "verify-parallelism" | "verify-resume", *arguments]:
            is_run = "--check" not in arguments and not Path(arguments[0]).is_dir()
            return cli.main([words[1], *(small(arguments, SHORT) if is_run else arguments)])
        case ["torchtitan", *arguments]:
            return cli.main(arguments)
        case ["torchrun", *arguments] if starts_torchrun and Path(arguments[-1]).is_file():
            return subprocess.call([sys.executable, "-m", "torch.distributed.run", *arguments])
        case ["torchrun", *arguments]:
            return parse_torchrun(arguments)
        case ["python", script, *arguments]:
            sys.argv = [script, *arguments]
            runpy.run_path(str(ROOT / script), run_name="__main__")
            return 0
    raise AssertionError(f"this test does not know how to run {words[0]}")


def only_check(options, words):
    """Check the recipe for all ranks, in place of starting them."""
    launcher.check(options, words)
    return 0


def collect(*arguments):
    """The status of pytest, which need not import torch again in this process."""
    os.chdir(ROOT)
    return int(pytest.main(["--collect-only", "-q", *arguments]))


def small(flags, limits=SMALL):
    """The flags with few steps and short sequences."""
    if "--help" in flags:
        return flags
    kept, limits = list(flags), dict(limits)
    for name in limits:
        if name in kept:
            place = kept.index(name)
            value = kept[place + 1]
            if name == "--training.steps" and int(value) <= MOST_STEPS:
                limits[name] = value
            del kept[place : place + 2]
    return kept + [word for pair in limits.items() for word in pair]


def parse_torchrun(arguments):
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    if not parsed.module:
        return not Path(parsed.training_script).is_file()
    assert parsed.training_script == "torchtitan.train"
    path, flags = split_recipe(parsed.training_script_args)
    load_job(path, flags, int(parsed.nproc_per_node), "cpu")
    return 0


def test_scripts_that_cannot_be_run_here_are_valid_shell():
    for script in (ROOT / "multinode_trainer.slurm", ROOT / "run_train.sh"):
        subprocess.run(["bash", "-n", script], check=True)


def test_links_resolve():
    found = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if target.startswith("https://"):
                continue
            if not file.is_file() or (anchor and anchor not in anchors(file)):
                found.append(f"{page.name}: {target}")
    assert found == []


@functools.cache
def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_settings_that_are_named_exist():
    known = known_keys() | TABLE.keys() | OLD_KEYS.keys()
    some = "`job.dump_folder`, `--validation.no-enable` and `training.steps = 3`; a `job`"
    assert keys_named(some) == {"job.dump_folder", "validation.enable", "training.steps"}
    unknown = {page.name: keys_named(prose(page)) - known for page in PAGES}
    assert {name: keys for name, keys in unknown.items() if keys} == {}


def test_files_that_are_named_exist():
    path = rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w"
    named = {(page.stem, n) for page in PAGES_AND_RESULTS for n in re.findall(path, text(page))}
    missing = [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()]
    assert [(page, name) for page, name in missing if name != "tests/assets"] == []  # TorchTitan's


def keys_named(text):
    """What looks like a setting in `code`: a section's name, a dot and a word."""
    section = "|".join(JobConfig.model_fields)
    words = " ".join(re.findall(r"`([^`\n]+)`", text)).split()
    found = (re.match(rf"(?:--)?(({section})\.(?:no-)?[a-z_0-9]+)(?=[=,;.]?$|=)", w) for w in words)
    keys = {match[1].replace(".no-", ".") for match in found if match}
    files = {key for key in keys if key.endswith((".py", ".jsonl"))}
    return keys - files - {"metrics.enable_x"}  # a pattern


@functools.cache
def known_keys():
    """Keys, and sections within sections."""
    found = all_sections(JobConfig)
    keys = {entry.path for section in found for entry in section.entries}
    return keys | {section.path for section in found}


def test_changelog_has_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in headings


@pytest.mark.costs("parses every module")
def test_every_module_has_a_purpose():
    for path in MODULES:
        assert ast.get_docstring(tree(path)) or not tree(path).body, f"{path} has no docstring"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the repository, which finds those beside it."""

    def imported(path):
        monkeypatch.syspath_prepend((ROOT / path).parent)
        return importlib.import_module(Path(path).stem)

    return imported


def test_picture_of_the_architecture_shows_the_imports(script):
    drawing = script("scripts/draw_architecture.py")
    kept = (ROOT / "docs/images/architecture.svg").read_text()
    drawn = str(drawing.draw(drawing.find_imports()))
    assert drawn == kept, "run python scripts/draw_architecture.py"


def test_pictures_are_as_their_scripts_draw_them(script, tmp_path):
    for name in ("draw_parallelism", "draw_pages"):
        script(f"scripts/{name}.py").main(tmp_path)
    drawn = {path.name: path for path in tmp_path.iterdir()}
    others = ("architecture", "debug_loss", "favicon")
    kept = {path.name: path for path in (ROOT / "docs/images").iterdir() if path.stem not in others}
    shown = "".join(map(text, PAGES))
    assert drawn.keys() == kept.keys() <= {*re.findall(r"\((?:docs/)?images/(\w+\.svg)\)", shown)}
    for name, path in drawn.items():
        assert path.read_text() == kept[name].read_text(), "run python scripts/draw_*.py"
        top = ElementTree.parse(path).getroot()
        assert [child.tag.rpartition("}")[2] for child in top[:2]] == ["title", "desc"]
        assert all(child.text for child in top[:2])


def test_every_dependency_is_justified():
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    optional = project["optional-dependencies"].values()
    required = [*project["dependencies"], *itertools.chain(*optional)]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in required}
    rows = re.findall(r"^- ([\w-]+)(?: \(.*\))?: ", text(ROOT / "docs/dependencies.md"), re.M)
    assert names == set(rows) - {"huggingface_hub"}


@pytest.mark.gate
def test_the_quickstart_has_the_lines_of_a_run_in_their_order(tmp_path):
    shown = text(ROOT / "docs/quickstart.md").partition("```text\n")[2].partition("```")[0]
    words = ["train", DEBUG_RECIPE, "--training.steps", "1", "--no-validation.enable"]
    words += ["--job.dump_folder", str(tmp_path)]
    done = forked.run(lambda: act(words), ROOT)
    assert done.status == 0, done.stderr
    beginnings = [line.split()[1] for line in done.stderr.splitlines() if line[2:3] == ":"]
    places = [beginnings.index(line.split()[0]) for line in shown.splitlines()]
    assert places == sorted(places)

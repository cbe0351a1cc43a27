"""Each number of some pages is what the code, a result or a command says."""

import json
import re
import runpy
import tomllib

import pytest

from tests import real_run_page
from tests.layouts import LAYOUTS
from tests.research import layouts as research
from tests.sources import ROOT
from tests.test_docs import prose
from torchtitan.checks import load_job
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.plan import device_streams, search, search_report
from torchtitan.plan import memory as plan_memory
from torchtitan.plan import plan as plans
from torchtitan.plan.hardware import find_hardware

PAGES = {name: ROOT / name for name in ("README.md", "docs/plan.md", "docs/real_run.md")}
NUMBER = r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?!\w)"
"""A number, but none that is a part of a name, such as H100 or 8B."""
WORDS = {
    "README.md": ("status 0", "v0.1 and v0.2", "BSD 3-Clause", "Llama 3", "OLMo 2", "Gemma 3"),
    "docs/plan.md": ("status is 0", "exit status 2", "taken to be 1,", "in 16 bits"),
    "docs/real_run.md": ("SHA-256", "(FSDP 2)"),
}
"""What is a number, and no measurement: names, statuses."""


def stated(page):
    """Yield what a page says with numbers, made of what the code and the results say."""
    if page == "README.md":
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
        python = settings["project"]["requires-python"].removeprefix(">=")
        yield f"Python {python} or newer"
        yield f"default, {JobConfig().training.global_batch_size}, makes"
        # Those of TorchTitan's families and of the systems from papers.
        yield f"compare {len(LAYOUTS) + len(research.LAYOUTS)} layouts with a single rank"
        curves = json.loads((ROOT / "benchmarks/results/one_curve.json").read_text())["runs"]
        *ranks, last = (each["layout"].partition(" ")[0] for each in curves)
        yield f"on {', '.join(ranks)} and {last} ranks, which"
        for major, minor in re.findall(r"whl/cu(\d\d)(\d)", PAGES[page].read_text()):
            yield f"CUDA {major}.{minor}"
        steps = load_job(
            ROOT / "train_configs/debug_model.toml", (), 1, "cpu"
        ).config.training.steps
        yield f"over {steps} steps"
        yield f"of these {steps} steps"
        return
    if page == "docs/real_run.md":
        yield from real_run_page.stated()
        return
    device = find_hardware("h100")
    yield f"({device.communicator_gib:g} GiB, and {plan_memory.PAIR_GIB:.2f} GiB for each rank"
    yield "an MFU above 1"
    yield f"take {device_streams.CONTENTION:g} times as long"
    yield f"at least {search.LEAST} layouts"
    yield f"the best {search.TOP}, or after"
    yield f"({search_report.SECONDS:g} by default)"
    results = (ROOT / "benchmarks/results/plan_accuracy.md").read_text()
    yield re.findall(r"^median absolute error: .*$", results, re.MULTILINE)[0]
    memory, time = (
        f"{low:g} and {high:g} times the" for low, high in (plans.MEMORY_LIMITS, plans.TIME_LIMITS)
    )
    yield f"{memory} memory, and {time} time of a step"


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_page_has_a_source(page):
    text = re.sub(r"\]\([^)]*\)|`[^`\n]*`|^\d\. ", "", prose(PAGES[page]), flags=re.MULTILINE)
    text = " ".join(text.split())
    for each in stated(page):
        assert each in text, page
        text = text.replace(each, "")
    for each in WORDS[page]:
        text = text.replace(each, "")
    found = re.search(f".{{0,40}}{NUMBER}.{{0,40}}", text)
    assert found is None, f"{page}: {found and found[0]}: where does this number come from?"


def test_the_families_are_those_that_there_are():
    families = [name for name in MODELS if not name.startswith("tiny")]  # those of the tests
    for page in (PAGES["README.md"], ROOT / "docs/index.md"):
        first = page.read_text().split("Pretrain ")[1].split(" models")[0].lower()
        named = re.sub(r"[^\w.,]", "", first)
        for name in families:
            if MODELS[name].task == "next_token":
                assert name.removesuffix("_moe").replace("_", "") in named, page


def test_samples_of_the_real_run_are_those_that_were_generated():
    page = PAGES["docs/real_run.md"].read_text()
    for each in real_run_page.samples():
        assert each in page


@pytest.mark.gate
@pytest.mark.parametrize("page", ["README.md", "docs/plan.md"])
def test_answers_of_commands_are_what_they_print(page, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts/write_answers.py"))
    monkeypatch.chdir(ROOT)
    text = PAGES[page].read_text()
    assert "\n$ torchtitan plan" in text
    assert text == script["written"](text), "run python scripts/write_answers.py"

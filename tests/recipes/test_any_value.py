"""Any value of any type in any key: it is accepted, or refused in a short line that names a key."""

import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.recipes.values import KEYS, any_value, fitting, recipe
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.inputs import problems_of_task
from torchtitan.tools.check import summary

pytestmark = pytest.mark.usefixtures("in_empty_folder")
LONGEST_LINE = 2000
HANGS_AFTER = 10
"""Seconds of the processor: others may want it too."""


@contextmanager
def not_hanging():
    """A limit for what counts up to a number that someone wrote."""

    def hangs(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check(path, flags, ranks, *, is_here):
    """What `check` does with a recipe; the refusal, if it refuses."""
    try:
        with not_hanging():
            found = load_job(path, flags, ranks, "cpu", is_here=is_here)
            found.refuse(problems_of_task(found.config))
            list(summary(found.config, ranks, "not planned"))
    except ConfigError as error:
        return str(error)
    return None


def refused_in_words(message, key):
    """Whether what was said is short, and names the key, or another one that it does not fit."""
    if message is None:
        return True
    section, _, last = key.rpartition(".")
    is_named = section.split(".")[0] in message or last in message
    return is_named and all(len(line) <= LONGEST_LINE for line in message.splitlines())


@st.composite
def one_key(draw):
    """A key, the names that choose its section, and a value, more often one of its own type."""
    key, chosen, types = draw(st.sampled_from(KEYS))
    return key, chosen, draw(st.one_of(fitting(types), fitting(types), any_value()))


def examples(count):
    """So many, the same in each run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def in_a_recipe(data):
    key, chosen, value = data.draw(one_key())
    Path("any.toml").write_text(recipe({**chosen, key: value}), encoding="utf-8")
    ranks, is_here = data.draw(st.sampled_from([None, 1, 2, 8])), data.draw(st.booleans())
    assert refused_in_words(check("any.toml", [], ranks, is_here=is_here), key)


def in_a_flag(data):
    key, chosen, _ = data.draw(one_key())
    words = data.draw(
        st.lists(st.text(max_size=12) | any_value().map(str), max_size=2).map(
            lambda words: [word for word in words if not word.startswith("--")]
        )
    )
    flags = [f"--{name}={value}" for name, value in chosen.items()] + [f"--{key}", *words]
    assert refused_in_words(check(None, flags, 1, is_here=False), key)


def several_keys(data):
    drawn = data.draw(st.lists(one_key(), min_size=2, max_size=6))
    written = {}
    for key, chosen, value in drawn:
        written |= {**chosen, key: value}
    sections = {key.rpartition(".")[0] for key in written}
    written = {key: value for key, value in written.items() if key not in sections}
    Path("any.toml").write_text(recipe(written), encoding="utf-8")
    message = check("any.toml", [], data.draw(st.sampled_from([None, 1, 8])), is_here=False)
    assert refused_in_words(message, "")


def over_each_other(data):
    """In flags, a recipe and what it extends: one may give a value where another has a section."""
    sources = []
    for _ in range(3):
        written = {}
        for key, chosen, value in data.draw(st.lists(one_key(), max_size=3)):
            owner = key.rpartition(".")[0]
            draw_section = owner and data.draw(st.integers(0, 3)) == 0
            written |= {owner: value} if draw_section else {**chosen, key: value}
        inner = [key for key in written if any(key.startswith(f"{above}.") for above in written)]
        sources.append({key: value for key, value in written.items() if key not in inner})
    base, own, flags = sources
    Path("base.toml").write_text(recipe(base), encoding="utf-8")
    Path("any.toml").write_text('extends = "base.toml"\n' + recipe(own), encoding="utf-8")
    words = [f"--{key}={value}" for key, value in flags.items()]
    assert refused_in_words(check("any.toml", words, None, is_here=False), "")


TRIALS = [in_a_recipe, in_a_flag, several_keys, over_each_other]


@pytest.mark.gate
@pytest.mark.parametrize("trial", TRIALS)
def test_any_value(trial):
    examples(60)(given(st.data())(trial))()


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS)
def test_many_values(trial):
    examples(10_000)(given(st.data())(trial))()


def test_files_that_no_one_wrote_by_hand():
    for content in [
        f"[training]\nsteps = {'9' * 5000}\n",
        f"[training]\nsteps = {'[' * 500}{']' * 500}\n",
        f"[training]\nsteps = {'[' * 40}{']' * 40}\n",
        f"[{'a.' * 3000}b]\nc = 1\n",
        f"{'a.' * 3000}b = 1\n",
        "[training]\nsteps = " + "{a = " * 100 + "1" + "}" * 100,
        'extends = "\\u0000"\n',
        f'extends = "{"x" * 5000}"\n',
        f'extends = "{"x/" * 3000}"\n',
    ]:
        Path("any.toml").write_text(content, encoding="utf-8")
        message = check("any.toml", [], None, is_here=False)
        assert message is not None, content
        assert message.startswith("any.toml:")
        assert len(message) <= LONGEST_LINE


def test_what_is_long_is_shortened():
    for recipe_text, flags in [
        (f'[data]\ndataset = "{"x" * 5000}"\n', []),
        (f"[job]\n{'x' * 5000} = 1\n", []),
        ("", ["--data.dataset", "x" * 5000]),
        ("", [f"--{'x' * 5000}", "1"]),
        ("", ["--training.steps", *["1"] * 5000]),
        ("", ["--parallelism.module_fqns_per_model_part", "[" * 5000]),
        (f"[data]\ndataset = {'x' * 5000}\n", []),
    ]:
        Path("any.toml").write_text(recipe_text, encoding="utf-8")
        message = check("any.toml", flags, None, is_here=False)
        assert message is not None, flags
        assert len(message) <= LONGEST_LINE


def test_a_value_in_the_place_of_a_section_that_a_recipe_has(tmp_path):
    """And the same in a recipe, of a section that it extends."""
    base = tmp_path / "base.toml"
    base.write_text("[training]\nsteps = 3\n")
    for words in (["--training"], ["--training=5"], ["--training", "a", "b"]):
        assert "training: got " in str(check(str(base), words, None, is_here=False))
    (tmp_path / "any.toml").write_text('extends = "base.toml"\ntraining = 5\n')
    message = check(str(tmp_path / "any.toml"), [], None, is_here=False)
    assert message == f"{tmp_path}/any.toml:2: training: got 5; wanted a section"


def test_a_section_of_what_is_a_list_of_numbers_elsewhere(tmp_path):
    (tmp_path / "any.toml").write_text("optimizer.groups = [[-64]]\n")
    words = ["--optimizer.groups.0.eps=1.0"]
    message = check(str(tmp_path / "any.toml"), words, None, is_here=False)
    wanted = "optimizer.groups: got [[-64]]; wanted sections, each under [[optimizer.groups]]"
    assert message == f"{tmp_path}/any.toml:1: {wanted}"


def test_a_name_that_nothing_can_have_and_keys_that_another_choice_has(tmp_path):
    text = '[optimizer]\nname = "\\u0000"\n[[optimizer.groups]]\nmomentum = 0.5\n'
    (tmp_path / "any.toml").write_text(text)
    message = check(str(tmp_path / "any.toml"), [], None, is_here=False)
    assert message is not None
    assert message.count("\n") == 0
    assert "any.toml:2: optimizer.name: got" in message


def test_of_a_repeated_flag_the_last_one_holds():
    words = [
        "--training.steps",
        "x",
        "--training.steps=6",
        "--compile.enable",
        "--no-compile.enable",
    ]
    job = load_job(None, [*words, "--training.steps", "7"], None, "cpu").config
    assert job.training.steps == 7
    assert not job.compile.enable

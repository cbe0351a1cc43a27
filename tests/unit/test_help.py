"""`torchtitan help` shows every page, and what else is a topic."""

import subprocess
import sys

import pytest

from tests.sources import PACKAGE, ROOT
from torchtitan.tools import help as pages
from torchtitan.tools.cli import main


def test_every_page_is_listed_and_shown_without_torch():
    shown = "import sys; from torchtitan.tools.cli import main; main(['help']); main(sys.argv[1:])"
    command = [sys.executable, "-c", f"{shown}; assert 'torch' not in sys.modules"]
    done = subprocess.run([*command, "help", "Exit", "codes"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [*(ROOT / "docs").glob("*.md"), *PACKAGE.glob("research/*.md")]
    assert [path.stem for path in files if f"`{path.stem}`" not in done.stdout] == []
    assert "| 75 | SIGTERM" in done.stdout


def test_a_page_has_names_of_files_and_topics_but_no_comments_and_links(capsys, says):
    for name in (found := pages.pages()):
        text = says("help", name.replace("_", "-"))
        assert not pages.LINK.search(text), name
        assert "<!-- " not in text, name
        assert found[name].partition("\n")[0] in text
    main(["help", "quickstart"])
    text = capsys.readouterr().out
    assert "`mine.toml`:\n" in text
    assert "See also: torchtitan help " in text


@pytest.mark.parametrize(
    ("topic", "line"),
    [
        ("lr-scheduler", "--lr_scheduler.warmup_steps"),
        ("verify-resume", "torchtitan verify-resume"),
    ],
)
def test_sections_and_verbs_are_topics(topic, line, says):
    assert line in says("help", topic)


@pytest.mark.parametrize(
    ("word", "first"), [("checkpont", "checkpoint"), ("bf16", "precision"), ("oom", "layouts")]
)
def test_a_word_that_is_no_topic_names_the_nearest_three(word, first, says):
    error = says("help", word, status=2)
    assert error.startswith(f"error: help: got {word}; the nearest topics are {first}, ")
    assert error.count(", ") == 2

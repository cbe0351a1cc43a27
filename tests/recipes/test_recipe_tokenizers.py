"""Where a recipe's tokenizer comes from, and what follows from it."""

import base64
from pathlib import Path

import pytest

from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.inputs import problems_of_task
from torchtitan.tools.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def read(text, *flags):
    Path("r.toml").write_text(text, encoding="utf-8")
    recipe = load_job("r.toml", flags, None, "cuda")
    return recipe.config, recipe.notices


GATED = '[model]\ntokenizer_path = "./assets/hf/Llama-3.1-8B"\nflavor = "{flavor}"\n'
LOAD = '[checkpoint]\ninitial_load_path = "./assets/hf/Llama-3.1-8B"\n'


def test_only_the_gated_tokenizer_is_missing(capsys):
    """It is said once, also where the weights are to come from there; the rest is checked."""
    Path("r.toml").write_text(GATED.format(flavor="8B") + LOAD)
    assert main(["check", "r.toml", "--device", "cuda", "--world-size", "8"]) == 2
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert told[:2] == [
        'error: r.toml:2: model.tokenizer_path: got "./assets/hf/Llama-3.1-8B"; there is no such '
        "file or folder",
        "  put the model's tokenizer.json or tokenizer.model there (hf download "
        "meta-llama/Llama-3.1-8B tokenizer.json --local-dir ./assets/hf/Llama-3.1-8B)",
    ]
    assert not [line for line in told[2:] if not line.startswith("note: ")]
    assert printed.out.startswith("on 8 ranks: "), "it is not valid as it is"
    assert main(["check", "r.toml", "--device", "cuda", "--world-size", "8", "--resolved"]) == 2
    printed = capsys.readouterr()
    assert 'initial_load_path = "./assets/hf/Llama-3.1-8B"' in printed.out


def test_what_else_is_wrong_is_said_beside_the_tokenizer(capsys):
    Path("r.toml").write_text(GATED.format(flavor="9B") + LOAD)
    assert main(["check", "r.toml"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[2] for line in lines] == ["model.tokenizer_path", "model.flavor"]


def test_the_tokenizer_of_a_model_that_is_not_published_comes_from_nowhere():
    with pytest.raises(RecipeError) as error:
        read("", "--model.name=tiny", "--model.flavor=tiny", "--model.tokenizer_path=a/b")
    [line] = error.value.lines
    assert "hf download" not in line


def tiktoken(path, tokens):
    """A tokenizer.model, whose 256 special tokens follow those in the file."""
    pairs = [bytes([n]) for n in range(256)] + [
        bytes([n // 256 + 97, n % 256]) for n in range(tokens - 256)
    ]
    lines = [f"{base64.b64encode(pair).decode()} {rank}" for rank, pair in enumerate(pairs)]
    path.write_text("\n".join(lines))
    return path


def test_vocabulary_follows_the_tokenizer_where_the_flavor_leaves_it_open():
    large = tiktoken(Path("large.model"), 2000)
    small = tiktoken(Path("small.model"), 1000)
    job, notices = read(f'[model]\ntokenizer_path = "{large}"\n')
    assert (job.model_args().vocab_size, job.flat()["model.vocab_size"]) == (2256, 2256)
    said = "r.toml:2: model.vocab_size: is 2256, as the tokenizer has more than the 2048 of "
    assert [line for line in notices if line.startswith(said)]
    assert not list(problems_of_task(job))
    job, _ = read(f'[model]\ntokenizer_path = "{small}"\n')
    assert (job.model_args().vocab_size, job.flat()["model.vocab_size"]) == (2048, None)
    for chosen in ("--model.vocab_size=2100", "--model.flavor=8B"):
        job, _ = read(f'[model]\ntokenizer_path = "{large}"\n', chosen)
        assert job.model_args().vocab_size == (128_256 if "8B" in chosen else 2100)
    job, _ = read("", f"--model.tokenizer_path={large}", "--model.vocab_size=9")
    [problem] = problems_of_task(job)
    assert "2256 tokens, but the model's vocabulary only 9" in problem.message

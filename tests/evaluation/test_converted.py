"""A trained model is evaluated with the converters of its recipe, or of flags, or is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_weights
from tests.small_weights import SEQ_LEN, SPEC
from torchtitan.convert import CONVERTERS
from torchtitan.convert.settings import ConversionTarget
from torchtitan.models import MODELS
from torchtitan.tools import cli
from torchtitan.tools.evaluate.continuation import Row, generate
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.sampling import Sampling, generator_of
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject

ROUNDED = {"name": "low_precision_attention", "rotation": "qkv"}
FLAGS = [f"--convert.0.{key}={value}" for key, value in ROUNDED.items()]
PROMPT = [256, *b"a prompt of some tokens"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", SPEC)


def checkpoint(folder: Path, *converters: dict[str, Any]) -> Path:
    recipe: dict[str, Any] = {"model.tokenizer_path": None}
    for number, converter in enumerate(converters):
        recipe |= {f"convert.{number}.{key}": value for key, value in converter.items()}
    return small_weights.saved(folder / "ours", recipe=recipe)


def expected(rounded: bool) -> torch.Tensor:
    """Logits of the network that a run would train."""
    network = small_weights.network()
    if rounded:
        config = CONVERTERS[ROUNDED["name"]].model_validate(ROUNDED)
        assert config.convert(network, ConversionTarget(False, False)).changed
    with torch.no_grad():
        return network(torch.tensor([PROMPT]))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recorded", "chosen"), [([ROUNDED], None), ([], [ROUNDED]), ([ROUNDED], []), ([], None)]
)
def test_model_is_converted(recorded: Any, chosen: Any, tmp_path: Path) -> None:
    path, rounded = checkpoint(tmp_path, *recorded), bool(recorded if chosen is None else chosen)
    convert = chosen and tuple(CONVERTERS[each["name"]].model_validate(each) for each in chosen)
    place = ModelLocation(path, convert=() if chosen == [] else convert)
    with open_model(open_subject(place), SEQ_LEN, torch.float32) as model:
        logits = model.logits(torch.tensor([PROMPT]))
        row = Row(PROMPT, generator_of(0, 0))
        generate(model, [row], 8, Sampling(temperature=0))
        tokens = list(PROMPT)
        for _ in range(8):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1, :258].argmax()))
    torch.testing.assert_close(logits, expected(rounded), atol=1e-4, rtol=0)
    assert (logits - expected(not rounded)).abs().max() > 1e-2
    assert row.tokens == tokens[len(PROMPT) :], "keys are rounded once, as without the cache"


def test_converters_for_training_are_left_out_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path, {"name": "float8", "recipe": "rowwise"}, ROUNDED)
    with caplog.at_level(logging.WARNING):
        subject = open_subject(ModelLocation(path))
    assert [each.name for each in subject.convert] == ["low_precision_attention"]
    assert "float8, of the recipe, is not applied: it serves training" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--convert.0.name=float8"], "--convert.0.name: got float8; it serves training"),
        ([*FLAGS, "--convert.0.scale=head"], "of a token depends on the texts"),
        ([*FLAGS, "--convert.0.filter_fqns", "layers"], "leaves all attention of small as it is"),
        ([*FLAGS, "--convert.0.rotate=qk"], "--convert.0.rotate: unknown key of low_precision"),
        ([*FLAGS, "--no-convert"], "--no-convert: --convert.0.name=low_precision_attention asks"),
    ],
)
def test_other_converters_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(checkpoint(tmp_path)), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_flags_replace_those_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = checkpoint(tmp_path, ROUNDED), []
    monkeypatch.setattr(
        "torchtitan.tools.generate.sample", lambda _, subject: found.append(subject.convert)
    )
    for flags in ([], [FLAGS[0], "--convert.0.dtype", "int8"], ["--no-convert"]):
        assert cli.main(["generate", str(path), *flags]) == 0
    (recorded,), (chosen,), none = found
    assert (recorded.rotation, chosen.rotation, chosen.dtype) == ("qkv", "none", "int8")
    assert none == ()

"""Sections within sections, and lists of them, at any depth: from TOML, flags, and in `extends`."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import tomlkit
from pydantic import Field, field_validator

from tests.recipes.test_bad_recipes import cases
from tests.tables import table
from tests.tiny import help_text
from tests.unit.config.sources import read_as
from torchtitan.config import Config, ListOf, OneOf, RecipeError, flat, json_schema

pytestmark = pytest.mark.usefixtures("in_empty_folder")


class Plain(Config):
    """Sent as it is."""

    name: Literal["plain"] = Field("plain", description="Which.")


class Quantized(Config):
    """Sent in few bits."""

    name: Literal["quantized"] = Field("quantized", description="Which.")
    bits: int = Field(8, ge=2, description="Bits of a number.")


WAYS = {"plain": Plain, "quantized": Quantized}


class Communication(Config):
    """What is sent."""

    weights: Annotated[Plain | Quantized, OneOf(WAYS, "plain")] = Plain()
    steps: Annotated[tuple[Plain | Quantized, ...], ListOf(WAYS)] = ()


class Group(Config):
    """Some parameters."""

    match: str = Field(description="Which of them.")
    lr_factor: float = Field(1.0, gt=0, description="Times the rate.")
    betas: tuple[float, ...] = Field((), description="Both.")


class Rest(Config):
    """What the other does not do."""

    lr: float = Field(1e-3, gt=0, description="Rate.")


class SGD(Config):
    """One rate."""

    name: Literal["SGD"] = Field("SGD", description="Which.")
    groups: tuple[Group, ...] = ()


class Muon(Config):
    """Matrices."""

    name: Literal["Muon"] = Field("Muon", description="Which.")
    groups: tuple[Group, ...] = ()
    adamw: Rest = Rest()
    even: int = Field(2, description="Even.")

    @field_validator("even")
    @classmethod
    def _is_even(cls, value):
        if value % 2:
            raise ValueError("it is odd")
        return value


class Root(Config):
    """A recipe."""

    optimizer: Annotated[SGD | Muon, OneOf({"SGD": SGD, "Muon": Muon}, "SGD")] = SGD()
    communication: Communication = Communication()


MUON = Path(__file__).with_name("nested.toml").read_text(encoding="utf-8")
MADE = Root(
    optimizer=Muon(
        adamw=Rest(lr=0.5),
        groups=(Group(match="norm", lr_factor=2), Group(match="head", betas=(0.9, 0.95))),
    ),
    communication=Communication(weights=Quantized(bits=4), steps=(Plain(),)),
)


def read(text="", flags=""):
    return read_as(Root, text, flags)


def test_toml():
    recipe = read(MUON)
    assert recipe.config == MADE
    assert recipe.origins["optimizer", "adamw", "lr"] == "r.toml:4"
    assert recipe.origins["optimizer", "groups", "1", "betas"] == "r.toml:10"
    assert recipe.origins["communication", "weights", "bits"] == "r.toml:13"
    assert read(tomlkit.dumps(MADE.model_dump(mode="json"))).config == MADE


def test_flags():
    made = read(MUON, "--optimizer.groups.1.lr_factor 3 --optimizer.adamw.lr=1e-1").config
    assert isinstance(made.optimizer, Muon)
    assert made.optimizer.groups[1] == Group(match="head", lr_factor=3.0, betas=(0.9, 0.95))
    assert made.optimizer.adamw == Rest(lr=0.1)
    flags = "--communication.weights.name quantized --communication.weights.bits 2"
    flags += " --optimizer.groups.0.match norm --optimizer.groups.0.betas 0.1 0.2"
    made = read(flags=flags).config
    assert made.communication.weights == Quantized(bits=2)
    assert made.optimizer == SGD(groups=(Group(match="norm", betas=(0.1, 0.2)),))


def test_extends():
    Path("base.toml").write_text(MUON, encoding="utf-8")
    mine = 'extends = "base.toml"\n[optimizer.adamw]\nlr = 0.25\n[[optimizer.groups]]\nmatch = "x"'
    made = read(mine).config
    assert made.optimizer == Muon(adamw=Rest(lr=0.25), groups=(Group(match="x"),))
    assert made.communication == MADE.communication
    assert read('extends = "base.toml"\n[optimizer]\ngroups = []').config.optimizer == Muon(
        adamw=Rest(lr=0.5)
    )
    other = read(
        'extends = "base.toml"\n[optimizer]\nname = "SGD"\n[communication.weights]\nname = "plain"'
    )
    assert other.config.optimizer == SGD(groups=MADE.optimizer.groups)
    assert other.config.communication.weights == Plain()
    assert other.notices == [
        "r.toml:3: optimizer.name: SGD has no adamw; a section of base.toml:4 is left out",
        "r.toml:5: communication.weights.name: plain has no bits; 4 of base.toml:13 is left out",
    ]


def test_every_mistake_is_found_at_its_place():
    for case in cases(Path(__file__).with_name("bad_nested.txt")):
        with pytest.raises(RecipeError) as error:
            read(case.recipe, " ".join(case.flags))
        assert error.value.lines == case.lines, case.name


def test_values_by_their_path():
    values = flat(MADE)
    assert values["optimizer", "groups", "1", "betas"] == [0.9, 0.95]
    assert values["optimizer", "adamw", "lr"] == 0.5
    assert values["communication", "weights", "bits"] == 4
    assert values["communication", "steps", "0", "name"] == "plain"
    assert not {("optimizer", "groups"), ("communication", "weights")} & values.keys()


def test_help_has_each_section_once():
    text = help_text(Root)
    headers = [line for line in text.splitlines() if line.startswith("[")]
    assert [(line,) for line in headers] == table(__file__, "nested_help.txt")
    assert "  --optimizer.groups.0.match  (a string; default: required)" in text
    assert "  --optimizer.adamw.lr  (a number > 0; default: 0.001)" in text


def test_schema_refers_to_nothing_that_is_missing():
    schema = json_schema(Root)
    muon = schema["properties"]["optimizer"]["oneOf"][1]
    assert muon["properties"]["adamw"]["$ref"] == "#/$defs/Rest"
    assert schema["$defs"]["Rest"]["properties"].keys() == {"lr"}

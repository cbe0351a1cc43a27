"""A section whose keys pick its settings class: in TOML, flags, errors, help and schema."""

from collections.abc import Mapping
from typing import Annotated

import pytest
from pydantic import Field

from tests.tables import table
from tests.tiny import help_text
from tests.unit.config.sources import read_as
from torchtitan.config import Config, Discriminated, RecipeError, flat, json_schema

pytestmark = pytest.mark.usefixtures("in_empty_folder")


class Data(Config):
    """What is read."""

    dataset: str = Field("text", description="Which.")


class Sounds(Config):
    """How sounds are read."""

    rates: tuple[int, ...] = Field((), description="Samples a second.")
    stereo: bool = Field(True, description="Two channels.")


class SoundData(Data):
    """Which sounds are read."""

    sounds: Sounds = Sounds()


class Lazy(Mapping[str, type[Config]]):
    """A registry that knows which of its classes were asked for."""

    def __init__(self):
        self.imported = []

    def __getitem__(self, name):
        self.imported.append(name)
        return {"sounds": SoundData}[name]

    def __iter__(self):
        return iter(["sounds"])

    def __len__(self):
        return 1


REGISTRY = Lazy()


def choose(said):
    named = said.get("dataset") == "birds" or "sounds" in said
    return REGISTRY["sounds"] if named else Data


class Root(Config):
    """A recipe."""

    data: Annotated[Data, Discriminated(Data, REGISTRY, choose)] = Data()


def read(text="", flags=""):
    return read_as(Root, text, flags)


def test_a_class_that_nothing_picks_is_not_imported():
    REGISTRY.imported.clear()
    assert type(read('[data]\ndataset = "prose"').config.data) is Data
    assert REGISTRY.imported == []


def test_keys_and_sections_pick_a_class():
    for text, flags, expected in (
        ('[data]\ndataset = "birds"', "", SoundData(dataset="birds")),
        ("", "--data.dataset birds", SoundData(dataset="birds")),
        ("[data.sounds]\nrates = [8]", "", SoundData(sounds=Sounds(rates=(8,)))),
        ("", "--data.sounds.rates 8", SoundData(sounds=Sounds(rates=(8,)))),
        ("", "--no-data.sounds.stereo", SoundData(sounds=Sounds(stereo=False))),
        ("", "--data.sounds.no-stereo", SoundData(sounds=Sounds(stereo=False))),
        (
            '[data]\ndataset = "birds"',
            "--data.sounds.rates=8,16",
            SoundData(dataset="birds", sounds=Sounds(rates=(8, 16))),
        ),
    ):
        config = read(text, flags).config
        assert config.data == expected
        assert Root.model_validate(config.model_dump(mode="json")) == config


def test_values_are_flat_as_their_class_has_them():
    assert flat(read("", "--data.dataset birds").config) == {
        ("data", "dataset"): "birds",
        ("data", "sounds", "rates"): [],
        ("data", "sounds", "stereo"): True,
    }


def test_mistakes_are_told_as_of_any_section():
    for text, line in table(__file__, "discriminated.txt"):
        with pytest.raises(RecipeError) as error:
            read(text)
        assert error.value.lines == [line]


def test_help_and_schema_have_the_keys_of_all():
    assert "--data.sounds.rates  (a list of integers; default: [])" in help_text(Root)
    assert help_text(Root).count("--data.dataset") == 1
    data = json_schema(Root)["properties"]["data"]
    assert list(data["properties"]) == ["dataset", "sounds"]

"""A key that extends one choice of a section by a class of its own, used when a recipe has it."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from tests.tiny import help_text
from torchtitan import config


class Drink(config.Config):
    """A drink."""

    name: str = Field(description="Which.")


class Tea(Drink):
    """Tea."""

    name: Literal["tea"] = Field("tea", description="Which.")
    minutes: int = Field(3, description="How long it draws.")


class MilkTea(Tea):
    """Tea."""

    milk: float = Field(0.0, ge=0, description="How much milk.")


class SweetTea(Tea):
    """Tea."""

    sugar: int = Field(0, description="How much sugar.")


class Water(Drink):
    """Water."""

    name: Literal["water"] = Field("water", description="Which.")


DRINKS = {"tea": Tea, "water": Water}
KEYS = {"tea.milk": MilkTea, "tea.sugar": SweetTea}


class Table(config.Config):
    """A table."""

    drink: Annotated[Drink, config.OneOf(DRINKS, "tea", KEYS)] = Tea()


def settings(**values):
    return {("drink", key): config.Setting(value, "recipe") for key, value in values.items()}


def read(**values):
    table, faults, _ = config.validate_all(Table, settings(**values))
    if faults:
        raise config.RecipeError(faults.values())
    return table.drink


def test_the_class_follows_from_the_keys():
    assert type(read(minutes=4)) is Tea
    assert type(read(milk=0.5)) is MilkTea
    both = read(milk=0.5, sugar=2)
    assert isinstance(both, MilkTea)
    assert isinstance(both, SweetTea)
    found = config.flat(both)
    assert found == {("name",): "tea", ("minutes",): 3, ("milk",): 0.5, ("sugar",): 2}


def test_flags_have_the_type_of_the_key():
    found, wrong = config.read_flags(["--drink.milk", "0.25"], Table, {})
    assert found["drink", "milk"].value == 0.25
    assert wrong == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"milk": -1}, "got -1; wanted a number >= 0"),
        (
            {"mlik": 1},
            "unknown key of tea; allowed: name, minutes, sugar, milk; did you mean drink.milk?",
        ),
        ({"name": "water", "milk": 1}, "unknown key of water; allowed: name; tea has milk"),
    ],
)
def test_mistakes(values, message):
    with pytest.raises(config.RecipeError) as error:
        read(**values)
    assert error.value.lines == [message]


def test_another_choice_drops_the_key_with_a_notice():
    notices = []
    merged = config.merge(Table, [settings(milk=0.5), settings(name="water")], notices)
    assert ("drink", "milk") not in merged
    assert notices == ["recipe: drink.name: water has no milk; 0.5 of recipe is left out"]


def test_help_and_schema_name_the_keys_of_all():
    assert all(f"--drink.{key} " in help_text(Table) for key in ("minutes", "milk", "sugar"))
    (tea, _) = config.json_schema(Table)["properties"]["drink"]["oneOf"]
    assert tea["properties"].keys() == {"name", "minutes", "milk", "sugar"}

"""A string that is a key of a registry: in errors, help and schema, with entries added later."""

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from tests.tiny import help_text
from torchtitan.config import Config, KeyOf, Setting, flat, json_schema, validate_all

FRUIT = {"apple": None, "pear": None}


class Basket(Config):
    """A basket."""

    fruit: Annotated[str, KeyOf(FRUIT)] = Field("apple", description="What is in it.")


class Shop(Config):
    """A shop."""

    basket: Basket = Basket()


def faults(value):
    return [*validate_all(Shop, {("basket", "fruit"): Setting(value, "recipe")})[1].values()]


def test_a_key_is_accepted_and_other_values_are_refused_with_the_nearest():
    assert faults("pear") == []
    assert faults("peer") == ['got "peer"; allowed: apple, pear; did you mean pear?']
    assert faults(3) == ["got 3; allowed: apple, pear"]
    assert flat(Shop(basket=Basket(fruit="pear"))) == {("basket", "fruit"): "pear"}
    with pytest.raises(ValidationError):
        Basket(fruit="peer")


def test_help_and_schema_name_the_keys():
    assert '--basket.fruit  (apple, pear; default: "apple")' in help_text(Shop)
    found = json_schema(Shop)["$defs"]["Basket"]["properties"]["fruit"]
    assert (found["type"], found["enum"]) == ("string", ["apple", "pear"])


def test_a_key_that_was_added_later_is_known(monkeypatch):
    monkeypatch.setitem(FRUIT, "plum", None)
    assert faults("plum") == []
    assert Basket(fruit="plum").fruit == "plum"

"""The converters that a trained model is evaluated with: those of its recipe, or of flags.

Some serve training alone, such as linears in Float8, which make it faster. A recipe's are left out,
with a warning; as flags they are errors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan.checkpoint.weights.network import Network
from torchtitan.config import ConfigError, KeyPath, Setting, read_flags
from torchtitan.config.load import Gathered, load
from torchtitan.convert import ConverterConfig
from torchtitan.job import JobConfig
from torchtitan.logging import logger


def converters_of_recipe(recipe: Mapping[str, Any], place: str) -> tuple[ConverterConfig, ...]:
    """Return the converters of the recipe, by dotted key, that `place` records."""
    paths = {tuple(key.split(".")): value for key, value in recipe.items()}
    return _load({p: Setting(value, place) for p, value in paths.items() if p[0] == "convert"}, [])


def converters_of_flags(flags: Sequence[str], none: bool) -> tuple[ConverterConfig, ...] | None:
    """Return the converters of flags such as `--convert.0.name`; None if there are no flags.

    Args:
        none: whether --no-convert is given.

    Raises:
        RecipeError: with all mistakes in them.
    """
    if none and flags:
        raise ConfigError(f"--no-convert: {flags[0]} asks for a converter; leave one of them out")
    return () if none else _load(*read_flags(flags, JobConfig, {})) if flags else None


def _load(settings: dict[KeyPath, Setting], problems: list[str]) -> tuple[ConverterConfig, ...]:
    gathered = Gathered(settings, "", [], problems)
    return load(JobConfig, gathered, lambda _: ()).config.convert


def converters_in_use(
    chosen: Sequence[ConverterConfig] | None, recorded: Iterable[ConverterConfig], network: Network
) -> tuple[ConverterConfig, ...]:
    """Return the converters that `network` is evaluated with: `chosen`, or those of its recipe.

    Raises:
        ConfigError: if a chosen one cannot be used.
    """
    used = []
    for number, converter in enumerate(recorded if chosen is None else chosen):
        unfit = converter.unfit_after_training(network.spec, network.args)
        if unfit is None:
            used.append(converter)
        elif chosen is None:
            logger.warning("%s, of the recipe, is not applied: %s", converter.name, unfit)
        else:
            raise ConfigError(f"--convert.{number}.name: got {converter.name}; {unfit}")
    return tuple(used)

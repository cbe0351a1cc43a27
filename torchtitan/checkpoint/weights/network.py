"""Identifies the network of some weights, by its name in a recipe or by a config file."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.ranges import Sizes
from torchtitan.config import ConfigError, RecipeError, allowed_names, near_names, show
from torchtitan.models import MODELS, spec_in_recipe
from torchtitan.models.spec import ModelSpec, WeightFormat, build_empty
from torchtitan.remote import StoreError, dangling, refuse_pointer


class Network(NamedTuple):
    """Network: a family of models, and the arguments of one of them."""

    spec: ModelSpec[Any]
    args: Any
    flavor: str | None = None
    """Name of these arguments in a recipe; None if no flavor has them."""

    def __str__(self) -> str:
        name = self.spec.name
        return f"{name} {self.flavor}" if self.flavor else f"a{'n' * (name[0] in 'aeio')} {name}"

    def recipe(self) -> dict[str, Any]:
        """Return the network's recipe by dotted keys: all sizes, over the most similar flavor.

        Raises ConfigError if sizes alone do not turn that flavor into this network.
        """
        spec, flavors = self.spec, self.spec.flavors
        differences = {name: unlike(self.args, args) for name, args in flavors.items()}
        flavor = self.flavor or min(flavors, key=lambda name: len(differences[name]))
        named = {"name": spec.name, "flavor": flavor} | spec.settings.sizes_of(self.args)
        if unlike(self.args, spec.args(spec.settings.model_validate(named))):
            raise ConfigError(
                f"no flavor of {spec.name} matches these weights, so no recipe can select them. "
                f"The closest is {flavor}, but {'; '.join(differences[flavor])}. Add a flavor to "
                f"MODELS[{spec.name!r}].flavors in a module of yours, and pass it with --imports"
            )
        return {f"model.{key}": value for key, value in named.items()}

    def section(self) -> dict[str, Any]:
        """Return the keys of `[model]` that select the network: a flavor, and what differs."""
        recipe = {key.removeprefix("model."): value for key, value in self.recipe().items()}
        usual = self.spec.settings.sizes_of(self.spec.flavors[recipe["flavor"]])
        if recipe["flavor"] in self.spec.open_vocabulary:
            usual.pop("vocab_size", None)  # it would follow the tokenizer
        return {key: value for key, value in recipe.items() if usual.get(key) != value}

    def parameters(self) -> dict[str, Sizes]:
        """Return the shape of every parameter by our name, in the order of the network."""
        network = build_empty(self.spec.build, self.args, seq_len=1)
        return {name: tuple(weight.shape) for name, weight in network.state_dict().items()}

    def format(self, kind: str) -> WeightFormat[Any]:
        """Return the network's `WeightFormat` for a key of `ModelSpec.formats`."""
        if kind not in self.spec.formats:
            able = ", ".join(("ours", "dcp", *self.spec.formats))
            raise ConfigError(f"{self.spec.name} has no weight format {kind}; its formats: {able}")
        return self.spec.formats[kind]

    def as_written(self, kind: str) -> Any:
        """Return arguments as read back from a config file, which may hold fewer facts."""
        written = self.format(kind)
        return written.args(written.config(self.args, None))

    def tensors(self, kind: str) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
        """Return shapes by a format's names: of required tensors, and of optional copies."""
        written, parameters = self.format(kind), self.parameters()
        repeated = written.repeated(self.args)
        named = (
            (written.name(ours), share.whole(shape) if (share := written.share(ours)) else shape)
            for ours, shape in parameters.items()
        )
        return (
            {name: size for theirs, shape in named for name, size in in_slices(theirs, shape)},
            {theirs: parameters[ours] for theirs, ours in repeated.items()},
        )


def in_slices(theirs: str, shape: Sizes) -> list[tuple[str, Sizes]]:
    """Return the foreign tensors of a parameter: one, or one for each index of its first dim."""
    if "*" not in theirs:
        return [(theirs, shape)]
    return [(theirs.replace("*", str(index)), shape[1:]) for index in range(shape[0])]


def named(where: object, models: Mapping[str, ModelSpec[Any]], name: str, flavor: str) -> Network:
    """Return the network with these names in a recipe; `where` is the place, for messages."""
    if name not in models:
        raise ConfigError(f"{where}: model: got {show(name)}; {allowed_names(name, models)}")
    flavors = models[name].flavors
    if flavor not in flavors:
        raise ConfigError(f"{where}: flavor: got {show(flavor)}; {allowed_names(flavor, flavors)}")
    return Network(models[name], flavors[flavor], flavor)


def in_recipe(recipe: Mapping[str, Any]) -> Network:
    """Return the network of a valid recipe, by dotted keys."""
    flavor = recipe["model.flavor"]
    spec = spec_in_recipe(recipe)
    return Network(spec, spec.flavors[flavor], flavor)


def of_recipe(
    where: object, recipe: Mapping[str, Any], model: str | None = None, flavor: str | None = None
) -> Network:
    """Return the network of a recorded recipe, by dotted keys, or another requested by name."""
    recorded = recipe["model.name"], recipe["model.flavor"]
    network = named(where, MODELS, model or recorded[0], flavor or recorded[1])
    if (network.spec.name, network.flavor) != recorded:
        return network
    return network._replace(args=spec_in_recipe(recipe).flavors[recipe["model.flavor"]])


def of_shapes(
    where: object,
    found: Mapping[str, Sizes],
    specs: Collection[ModelSpec[Any]],
    flavor: str | None = None,
) -> Network:
    """Return the network whose parameters have these shapes, or else the most similar one.

    It is of one of `specs`, and of this `flavor` if one is given. Raises ConfigError if several
    match.
    """
    known = {spec.name: spec for spec in specs if flavor in (None, *spec.flavors)}
    if not known:
        spec = next(iter(specs))
        return named(where, {spec.name: spec}, spec.name, str(flavor))
    flavors = [
        Network(spec, args, name)
        for spec in known.values()
        for name, args in spec.flavors.items()
        if flavor in (None, name)
    ]
    counts = [len(found.items() ^ network.parameters().items()) for network in flavors]
    same = [network for network, count in zip(flavors, counts, strict=True) if not count]
    _refuse_several(where, same)
    return flavors[counts.index(min(counts))]


def identify(
    path: Path, kind: str, specs: Collection[ModelSpec[Any]], flavor: str | None = None
) -> tuple[Network, dict[str, Any]]:
    """Return the network that a config file describes, and the content of the file.

    It is of one of `specs`, and of this `flavor` if one is given, whose own config file would be
    the same. Raises ConfigError if none matches, or several do.
    """
    config = read_config(path)
    described = _described(path, kind, _families(path, kind, specs, config), config)
    same = [
        Network(network.spec, own, name)
        for network in described
        for name, own in network.spec.flavors.items()
        if flavor in (None, name) and _is_written_as(network, kind, own)
    ]
    _refuse_several(path, same)
    if same:
        return same[0], config
    network = described[0]
    if flavor is not None:
        network = next((one for one in described if flavor in one.spec.flavors), network)
        expected = named(path, {network.spec.name: network.spec}, network.spec.name, flavor)
        differences = unlike(network.args, expected.as_written(kind))
        raise RecipeError([f"{path}: not {expected}:", *(f"  {line}" for line in differences)])
    return network, config


def _refuse_several(where: object, networks: Sequence[Network]) -> None:
    if len(networks) > 1:
        names = " or ".join(map(str, networks))
        raise ConfigError(f"{where}: it could be {names}; choose one with --model and --flavor")


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file."""
    try:
        data = path.read_bytes()
        refuse_pointer(path, data)
        content = json.loads(data.decode(), object_pairs_hook=partial(_unambiguous, path))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(dangling(path) or f"{path}: there is no such file") from None
    except (StoreError, ConfigError):
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def _unambiguous(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a config file, none of whose keys has two values."""
    found = dict(pairs)
    for key, value in pairs:
        if value is not found[key] and value != found[key]:  # a NaN differs from itself
            got = f"{key} {show(value)} and {key} {show(found[key])}"
            raise ConfigError(f"{path}: {got} are one fact with two values; remove one")
    return found


def not_expressed(network: Network, kind: str) -> list[str]:
    """Return the facts that a format's config file omits or changes, if it can be written."""
    args = network.args
    if getattr(args, "base_width", None):
        args = replace(args, base_width=None)  # its factors are in the weights
    return unlike(args, network.as_written(kind))


def unlike(found: object, wanted: object) -> list[str]:
    """Return the arguments in which two networks differ, one line each."""
    return [
        f"{key} is {value} instead of {vars(wanted)[key]}"
        for key, value in vars(found).items()
        if value != vars(wanted)[key]
    ]


def _families(
    path: Path, kind: str, specs: Collection[ModelSpec[Any]], config: Mapping[str, Any]
) -> list[ModelSpec[Any]]:
    """Return the families that support a format, of the architecture in the config, if any."""
    able = [spec for spec in specs if kind in spec.formats]
    if not able:
        names = ", ".join(spec.name for spec in specs)
        raise ConfigError(f"{path}: the spec of {names} lacks the weight format {kind!r}")
    known = list(dict.fromkeys(name for spec in able for name in spec.formats[kind].architectures))
    if not all(spec.formats[kind].architectures for spec in able):
        return able
    listed = config.get("architectures")
    said = listed[0] if isinstance(listed, list) and listed else listed
    if not isinstance(said, str) or said not in known:
        if isinstance(said, str) and (known_as := _of_other_family(said, kind)):
            raise ConfigError(f"{path}: architectures: got {show(said)}, {known_as}")
        stems = {name.partition("For")[0]: name for name in known}
        stem = said.partition("For")[0] if isinstance(said, str) else None
        near = "".join(f"; the nearest is {stems[each]}" for each in near_names(stem, stems))
        raise ConfigError(
            f"{path}: architectures: got {show(said)}{near}; allowed: {', '.join(known)}; "
            "add a model for the weights of another network and import it, see docs/extending.md"
        )
    reading = [spec for spec in able if said in spec.formats[kind].architectures]
    return [spec for spec in reading if spec.formats[kind].architectures[0] == said] or reading


def _of_other_family(architecture: str, kind: str) -> str | None:
    """Say which family an architecture belongs to, or how it differs from the nearest."""
    formats = {name: spec.formats[kind] for name, spec in MODELS.items() if kind in spec.formats}
    if places := {
        name: written.architectures.index(architecture)
        for name, written in formats.items()
        if architecture in written.architectures
    }:
        return f'which model.name = "{min(places, key=places.__getitem__)}" has'
    for name, written in formats.items():
        if architecture in written.near:
            return f"which differs from {name}, the nearest: {written.near[architecture]}"
    return None


def _described(
    path: Path, kind: str, families: Collection[ModelSpec[Any]], config: Mapping[str, Any]
) -> list[Network]:
    """Return the network that a config file describes in each family that can interpret it."""
    found: list[Network] = []
    problems: list[str] = []
    for spec in families:
        try:
            found.append(Network(spec, spec.formats[kind].args(config)))
        except RecipeError as error:
            problems += error.lines
    if not found:
        raise RecipeError(f"{path}: {line}" for line in problems)
    return found


def _is_written_as(network: Network, kind: str, args: Any) -> bool:
    """Whether arguments have the config file of a network."""
    try:
        return bool(network.args == network._replace(args=args).as_written(kind))
    except RecipeError:  # the format cannot express these
        return False

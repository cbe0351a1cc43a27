"""Opens a model to evaluate: its weights, its network, and its tokenizer.

A checkpoint of ours contains all of it, since it holds the recipe of its run. Weights from other
projects have a config file and the tokenizer's files next to them. Flags supply the rest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.checkpoint.folder import look_at, read_state
from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.weights.extras import BYTES
from torchtitan.checkpoint.weights.foreign import weights_of
from torchtitan.checkpoint.weights.network import Network, of_recipe
from torchtitan.checkpoint.weights.opening import OPEN, Verified, find, find_format
from torchtitan.config import ConfigError
from torchtitan.convert import ConverterConfig
from torchtitan.data import Tokenizer, check_vocabulary, load_tokenizer, starts_with
from torchtitan.tasks import TASKS
from torchtitan.tools.evaluate.chosen_converters import converters_in_use, converters_of_recipe
from torchtitan.tools.options import import_modules

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelLocation:
    """The location of a model, and the options that describe it."""

    path: Path
    """Folder of a run, of a checkpoint, or of weights of Hugging Face or Meta."""
    model: str | None = None
    flavor: str | None = None
    tokenizer: str | None = None
    """File, folder or BYTES; None: the one of the model."""
    format: str | None = None
    """Key of OPEN; None: detected from the files."""
    imports: tuple[str, ...] = ()
    """Modules that add to MODELS."""
    convert: tuple[ConverterConfig, ...] | None = None
    """Converters; None: those of its recipe."""


class Subject(NamedTuple):
    """A model to evaluate, whose weights are still on disk."""

    source: TensorSource
    network: Network
    tokenizer: Tokenizer
    begin: tuple[int, ...]
    """Tokens before every text: BOS, if training used it."""
    ends: frozenset[int]
    """Tokens that end a text."""
    seq_len: int | None
    """Sequence length in training, if known."""
    dtype: torch.dtype
    """Dtype of computation in training, or else of the weights."""
    convert: tuple[ConverterConfig, ...] = ()
    """Converters to apply."""


def open_subject(place: ModelLocation) -> Subject:
    """Open the model at a place.

    Raises:
        ConfigError: if there is no such model, or an option that it needs is missing.
    """
    import_modules(place.imports, "--imports")
    kind = place.format or find_format(place.path)
    subject = _open_ours(place) if kind == "ours" else _open_foreign(place, kind)
    convert = converters_in_use(place.convert, subject.convert, subject.network)
    weights_of(subject.source, subject.network)
    check_vocabulary(subject.tokenizer, subject.network.args.vocab_size)
    return subject._replace(convert=convert)


def _open_ours(place: ModelLocation) -> Subject:
    path = find(place.path)[-1]
    recipe = read_state(path, look_at(path))["recipe"]
    import_modules(recipe.get("job.imports") or (), f"{path}: job.imports")
    network = of_text(path, of_recipe(path, recipe, place.model, place.flavor))
    source, key = Verified(path), "model.tokenizer_path"
    if place.tokenizer is None and key not in recipe:
        raise ConfigError(f"{path}: it does not record its tokenizer; set it with --tokenizer")
    try:
        tokenizer = _tokenizer(place) if place.tokenizer else load_tokenizer(recipe[key])
    except ConfigError as error:
        raise ConfigError(f"{error}; or set another with --tokenizer") from None
    computed = recipe.get("training.mixed_precision_param")
    return Subject(
        source,
        network,
        tokenizer,
        tuple(starts_with(tokenizer, recipe.get("data.add_bos"), recipe.get("data.add_eos"))),
        frozenset({tokenizer.eos}),
        recipe.get("training.seq_len"),
        getattr(torch, computed) if computed in DTYPES else _stored(source),
        converters_of_recipe(recipe, str(path)) if place.convert is None else (),
    )


def _open_foreign(place: ModelLocation, kind: str) -> Subject:
    opened = OPEN[kind](place.path, place.model, place.flavor)
    extras, network = opened.extras, of_text(place.path, opened.network)
    if place.tokenizer is None and extras.tokenizer is None and not extras.is_bytes:
        raise ConfigError(
            f"{place.path}: contains no tokenizer; name one with --tokenizer (a file, a folder, or "
            f"{BYTES} for a model of bytes)"
        )
    own = None if extras.is_bytes else str(extras.tokenizer)
    tokenizer = _tokenizer(place) if place.tokenizer else load_tokenizer(own)
    said = [extras.eos, (extras.generation or {}).get("eos_token_id")]
    ends = {tokenizer.eos, *(number for one in said for number in _numbers(one))}
    return Subject(
        opened.source,
        network,
        tokenizer,
        tuple(starts_with(tokenizer, None, None)),
        frozenset(ends),
        extras.seq_len,
        _stored(opened.source),
    )


def of_text(path: Path, network: Network) -> Network:
    """Return the network of a model of text.

    Raises:
        ConfigError: if it is trained on anything else.
    """
    content = TASKS[network.spec.task].content
    if content != "text":
        raise ConfigError(
            f"{path}: {network.spec.name} is trained on {content}, and this needs a model of text"
        )
    return network


def _tokenizer(place: ModelLocation) -> Tokenizer:
    return load_tokenizer(None if place.tokenizer == BYTES else place.tokenizer)


def _numbers(said: Any) -> list[int]:
    return said if isinstance(said, list) else [] if said is None else [said]


def _stored(source: TensorSource) -> torch.dtype:
    return next(kind[0] for name, kind in source.shapes().items() if name.startswith("model."))


def check_weights(subject: Subject) -> None:
    """Read every weight of a checkpoint of ours once, by the digest that it was saved with.

    Raises:
        Damaged: where one is not what was saved.
    """
    if isinstance(subject.source, Verified):
        for name in subject.network.parameters():
            subject.source.read(f"model.{name}")

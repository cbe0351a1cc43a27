"""A trained model on one rank: found on disk by the options of a verb, then loaded.

A checkpoint of ours contains all of it, since it holds the recipe of its run. Weights from other
projects have a config file and the tokenizer's files next to them. Options supply the rest.

A model has the converters of its recipe, or those of flags. Some serve training alone, such as
linears in Float8, which make it faster. A recipe's are left out, with a warning; as flags they are
errors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from torchtitan.checkpoint.folder import read_state, read_verified_manifest
from torchtitan.checkpoint.placement import differences
from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.weights.extras import BYTES, longest_in_recipe
from torchtitan.checkpoint.weights.foreign import weights_of
from torchtitan.checkpoint.weights.network import Network, of_recipe
from torchtitan.checkpoint.weights.opening import OPEN, Verified, find, find_format
from torchtitan.config import ConfigError, KeyPath, Setting, import_modules, read_flags
from torchtitan.config.load import Gathered, load
from torchtitan.convert import ConverterConfig, apply
from torchtitan.data import Tokenizer, check_vocabulary, leading_tokens, load_tokenizer
from torchtitan.device import pick
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.models.spec import build_empty
from torchtitan.parallel import Launch
from torchtitan.tasks import TASKS
from torchtitan.tools.options import Choice, Count, Text, Verb, readable
from torchtitan.torch_private.dtensor import allocate

DTYPES = ("float32", "bfloat16", "float16")


class ConvertVerb(Verb):
    """A verb that takes the settings of `[[convert]]`, too, as flags: they are `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, flags = list[str](), list[str]()
        words = own
        for word in args:
            if word.startswith("--"):
                words = flags if word.startswith("--convert.") else own
            words.append(word)
        super().parse_args(ctx, own)
        ctx.args = flags
        return flags


WHERE = "Folder of a run, a checkpoint, or a folder of weights of Hugging Face or Meta."
Source = Annotated[Path, typer.Argument(parser=readable, metavar="<Path>", help=WHERE)]
Format = Annotated[
    str | None, Choice(OPEN, "Format of the source (default: detected from the files).", "--from")
]
ModelTokenizer = Annotated[
    str | None,
    Text("PATH", f"File, folder, or {BYTES} (default: that of the source).", "--tokenizer"),
]
Dtype = Annotated[
    str | None,
    Choice(DTYPES, "Dtype of computation (default: that of training, or of the weights)."),
]
BatchSize = Annotated[int, Count("Number of texts in a batch (default: 8).")]
NoConvert = Annotated[
    bool,
    typer.Option(
        "--no-convert",
        help="Apply no converter of the recipe; --convert.0.name NAME applies others instead.",
    ),
]


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
    convert: tuple[ConverterConfig, ...] | None = None
    """Converters; None: those of its recipe."""


class StoredModel(NamedTuple):
    """A model whose weights are still on disk."""

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


def find_model(place: ModelLocation) -> StoredModel:
    """Find the model of text at a place.

    Raises:
        ConfigError: if there is none, or an option that it needs is missing.
    """
    kind = place.format or find_format(place.path)
    stored = _find_ours(place) if kind == "ours" else _find_foreign(place, kind)
    convert = converters_in_use(place.convert, stored.convert, stored.network)
    weights_of(stored.source, stored.network)
    check_vocabulary(stored.tokenizer, stored.network.args.vocab_size)
    return stored._replace(convert=convert)


def _find_ours(place: ModelLocation) -> StoredModel:
    path = find(place.path)[-1]
    recipe = read_state(path, read_verified_manifest(path))["recipe"]
    import_modules(recipe.get("job.imports") or (), f"{path}: job.imports")
    network = require_text(path, of_recipe(path, recipe, place.model, place.flavor))
    source, key = Verified(path), "model.tokenizer_path"
    if place.tokenizer is None and key not in recipe:
        raise ConfigError(f"{path}: it does not record its tokenizer; set it with --tokenizer")
    try:
        tokenizer = _tokenizer(place) if place.tokenizer else load_tokenizer(recipe[key])
    except ConfigError as error:
        raise ConfigError(f"{error}; or set another with --tokenizer") from None
    computed = recipe.get("training.mixed_precision_param")
    return StoredModel(
        source,
        network,
        tokenizer,
        tuple(leading_tokens(tokenizer, recipe.get("data.add_bos"), recipe.get("data.add_eos"))),
        frozenset({tokenizer.eos}),
        longest_in_recipe(recipe),
        getattr(torch, computed) if computed in DTYPES else _dtype_of(source),
        converters_of_recipe(recipe, str(path)) if place.convert is None else (),
    )


def _find_foreign(place: ModelLocation, kind: str) -> StoredModel:
    opened = OPEN[kind](place.path, place.model, place.flavor)
    extras, network = opened.extras, require_text(place.path, opened.network)
    if place.tokenizer is None and extras.tokenizer is None and not extras.is_bytes:
        raise ConfigError(
            f"{place.path}: contains no tokenizer; name one with --tokenizer (a file, a folder, or "
            f"{BYTES} for a model of bytes)"
        )
    own = None if extras.is_bytes else str(extras.tokenizer)
    tokenizer = _tokenizer(place) if place.tokenizer else load_tokenizer(own)
    ends = {tokenizer.eos}
    for found in (extras.eos, (extras.generation or {}).get("eos_token_id")):
        ends.update(found if isinstance(found, list) else [] if found is None else [found])
    return StoredModel(
        opened.source,
        network,
        tokenizer,
        tuple(leading_tokens(tokenizer, None, None)),
        frozenset(ends),
        extras.seq_len,
        _dtype_of(opened.source),
    )


def require_text(path: Path, network: Network) -> Network:
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


def _dtype_of(source: TensorSource) -> torch.dtype:
    return next(kind[0] for name, kind in source.shapes().items() if name.startswith("model."))


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
    """Return the converters of a trained `network`: `chosen`, or those of its recipe.

    Raises:
        ConfigError: if a chosen one cannot be used.
    """
    used = []
    for number, converter in enumerate(recorded if chosen is None else chosen):
        unfit = converter.unfit_after_training(network.spec, network.args)
        if unfit is None:
            used.append(converter)
        elif chosen is None:
            logger.warning("the recipe's converter %s is not applied: %s", converter.name, unfit)
        else:
            raise ConfigError(f"--convert.{number}.name: got {converter.name}; {unfit}")
    return tuple(used)


class InferenceModel:
    """A model with its weights in memory."""

    def __init__(self, stored: StoredModel, length: int, dtype: torch.dtype) -> None:
        """
        Args:
            length: maximum sequence length.

        Raises:
            ConfigError: if the command was started by a launcher, on several ranks.
            Damaged: if a weight is not what was saved.
        """
        if Launch.read().by_launcher:
            raise ConfigError("this command runs on one rank; run it without a launcher")
        if stored.seq_len is not None and length > stored.seq_len:
            logger.warning(
                "the model was trained on sequences of %d tokens, but these have up to %d: it was "
                "not trained on later positions",
                stored.seq_len,
                length,
            )
        self.stored, self.length = stored, length
        self.vocabulary = stored.tokenizer.vocab_size
        device = pick()
        device.make_current()
        self.device = device.torch_device
        spec, args = stored.network.spec, stored.network.args
        self.network = build_empty(spec.build, args, length, dtype).requires_grad_(False)
        apply(self.network, stored.convert, device.capability, has_fsdp=False)
        allocate(self.network, self.device)
        self.network.init_buffers()  # type: ignore[operator]
        weights = {f"model.{name}": w for name, w in self.network.state_dict().items()}
        if mistakes := differences(weights, stored.source):
            raise ConfigError(f"the weights do not fit: {'; '.join(mistakes[:3])}")
        for name, weight in weights.items():
            weight.copy_(stored.source.read(name))

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute the logits after every token: (B, S) int64 to (B, S, V)."""
        found: Tensor = self.network(tokens, positions)
        return found


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad rows of tokens at their ends to the longest: (B, S) int64."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)

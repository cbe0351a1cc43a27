"""Measure the loss of a model on held-out text, or run another evaluation."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from torchtitan.checkpoint.folder import read_state, read_verified_manifest
from torchtitan.checkpoint.weights.opening import find, find_format
from torchtitan.config import ConfigError, Registry, Setting, import_modules
from torchtitan.config.load import Gathered, load
from torchtitan.data import DataConfig, separators
from torchtitan.data.order import Source as DataSource
from torchtitan.data.sources import open_source
from torchtitan.job import JobConfig
from torchtitan.logging import status
from torchtitan.tools.inference import (
    BatchSize,
    ConvertVerb,
    Dtype,
    Format,
    InferenceModel,
    ModelLocation,
    ModelTokenizer,
    NoConvert,
    Source,
    converters_of_flags,
    find_model,
    padded,
)
from torchtitan.tools.options import Count, Flag, Flavor, Imports, Model, Text, verb

AT_A_TIME = 256
"""Documents that are held in memory."""
app = verb()


class EvaluationRequest(NamedTuple):
    """Options of the command."""

    place: ModelLocation
    dataset: str | None
    """Name of a data set; None: that of the run."""
    dataset_path: str | None
    limit: int | None
    """Documents at most; None: all."""
    batch_size: int
    dtype: torch.dtype | None
    """Dtype of computation; None: that of training, or of the weights."""
    length: int | None = None
    """Context length in tokens; None: as in training."""


class Result(NamedTuple):
    """Result of an evaluation, for programs and for people."""

    values: dict[str, Any]
    lines: Sequence[str]


EVALUATIONS = Registry[Callable[[EvaluationRequest], Result]](
    "evaluation", {"loss": "torchtitan.tools.evaluate:held_out_loss"}
)
"""Each raises `ConfigError` where the model or the data set does not suit it."""


@app.command(cls=ConvertVerb, help=__doc__)
def evaluate(
    context: typer.Context,
    source: Source,
    tasks: Annotated[
        str, Text("NAME", f"Evaluation: {' or '.join(EVALUATIONS)} (default: loss).")
    ] = "loss",
    limit: Annotated[int | None, Count("Maximum number of documents (default: all).")] = None,
    length: Annotated[
        int | None, Count("Context length in tokens (default: as in training).")
    ] = None,
    as_json: Annotated[bool, Flag("--json", "Print the results as a JSON object.")] = False,
    format: Format = None,
    model: Model = None,
    flavor: Flavor = None,
    tokenizer: ModelTokenizer = None,
    imports: Imports = None,
    no_convert: NoConvert = False,
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
    dataset: Annotated[
        str | None, Text("NAME", "Data set, or its path (default: that of the run's validation).")
    ] = None,
    dataset_path: Annotated[str | None, Text("PATH", "File or folder of the data set.")] = None,
) -> None:
    import_modules(imports or (), "--imports")
    convert = converters_of_flags(context.args, no_convert)
    if tasks not in EVALUATIONS:
        raise ConfigError(
            f"--tasks: got {tasks}; wanted {' or '.join(EVALUATIONS)}; for benchmarks, export the "
            f"weights (torchtitan checkpoint convert {source} FOLDER --to hf) and run "
            f"lm_eval --model hf --model_args pretrained=FOLDER --tasks {tasks}"
        )
    request = EvaluationRequest(
        ModelLocation(source, model, flavor, tokenizer, format, convert),
        dataset,
        dataset_path,
        limit,
        batch_size,
        getattr(torch, dtype) if dtype else None,
        length,
    )
    values, lines = EVALUATIONS[tasks](request)
    print(json.dumps({tasks: values}) if as_json else "\n".join(lines))


def held_out_loss(request: EvaluationRequest) -> Result:
    """Run the evaluation `torchtitan evaluate --tasks loss`.

    Every document is scored by itself, between the BOS and EOS that training uses, in windows of
    the sequence length. So the loss is that of `validation` where documents do not see each other.

    Raises:
        ConfigError: if the model reads no text, or there is no such text.
    """
    stored = find_model(request.place)
    length = request.length or stored.seq_len
    if length is None:
        message = "its sequence length is unknown; set it with --length"
        raise ConfigError(f"{request.place.path}: {message}")
    data = held_out_data(request)
    tokenizer = stored.tokenizer
    ends = separators(tokenizer, data.add_bos, data.add_eos)[1]
    end = (tokenizer.eos,) if ends else ()
    begin = stored.begin or end  # in training, a document without BOS follows another's EOS
    texts = itertools.islice(documents(data), request.limit)
    nats, count, size, number = 0.0, 0, 0, 0
    dtype = request.dtype or stored.dtype
    model = InferenceModel(stored, length, dtype)
    with status("scoring") as add:
        while some := list(itertools.islice(texts, AT_A_TIME)):
            rows = [[*begin, *tokenizer.encode(text), *end] for text in some]
            nats -= sum(score_texts(model, rows, request.batch_size))
            count += sum(len(tokens) - 1 for tokens in rows if tokens)
            size += sum(len(text.encode()) for text in some)
            number += len(some)
            add(f": {number:,} documents")
    if not count:
        raise ConfigError(f"--dataset: {data.dataset} has no text to score")
    values = {
        "loss": nats / count,
        "bits_per_byte": nats / size / math.log(2),
        "tokens": count,
        "documents": number,
    }
    line = (
        f"loss {values['loss']:.4f} nats per token, {values['bits_per_byte']:.4f} bits per byte: "
        f"{count:,} tokens of {number:,} documents of {data.dataset}"
    )
    return Result(values, [line])


def held_out_data(request: EvaluationRequest) -> DataConfig:
    """Return the data set of the options, or else the first that the run is validated on."""
    settings = {}
    if find_format(request.place.path) == "ours" and request.place.format in (None, "ours"):
        path = find(request.place.path)[-1]
        for key, value in read_state(path, read_verified_manifest(path))["recipe"].items():
            if key.startswith(("data.", "validation.")):
                settings[tuple(key.split("."))] = Setting(value, str(path))
    if request.dataset or request.dataset_path:
        settings.pop(("data", "validation_fraction"), None)
        settings.pop(("validation", "dataset_path"), None)
        for key in ("dataset", "dataset_path"):
            if (given := getattr(request, key)) is not None:
                settings["validation", key] = Setting(given, f"--{key}".replace("_", "-"))
    job = load(JobConfig, Gathered(settings, "", [], []), lambda _: ()).config
    return next(iter(job.validation.data(job.data).values()))


def documents(data: DataConfig) -> Iterator[str]:
    """Open a data set of text, and return each of its documents once, without empty ones."""
    try:
        source = open_source(data.model_copy(update={"shuffle": False}), None, seed=0)
    except ConfigError as error:
        raise ConfigError(f"--dataset: got {data.dataset}; {error}") from None
    return _texts(source, data.dataset)


def _texts(source: DataSource, name: str) -> Iterator[str]:
    for position, content in source.read({0: None}, 1)[0]:
        if source.epoch(position):
            return
        if not isinstance(content, str):
            raise ConfigError(f"--dataset: {name} has no text; name a data set of text")
        if content:
            yield content


class Window(NamedTuple):
    """Tokens to read, and targets to score: the tokens after the last of them."""

    tokens: list[int]
    targets: list[int]


def windows(text: Sequence[int], length: int) -> Iterator[Window]:
    """Split a text into windows whose targets are all of its tokens but the first, once each.

    Args:
        length: maximum number of tokens that the model reads: as many as come before the targets.
    """
    first = 1
    while first < len(text):
        end = min(first + length, len(text))
        start = max(end - 1 - length, 0)
        yield Window([*text[start : end - 1]], [*text[first:end]])
        first = end


def score_texts(model: InferenceModel, texts: Sequence[Sequence[int]], rows: int) -> list[float]:
    """Return the log-probability in nats of each text after its first token.

    Args:
        rows: number of windows that are read together.
    """
    cut = [
        (number, window)
        for number, text in enumerate(texts)
        for window in windows(text, model.length)
    ]
    # Long ones first: what is too large shows at once, and little is spent on filling up.
    cut.sort(key=lambda one: -len(one[1].tokens))
    found = [0.0] * len(texts)
    for start in range(0, len(cut), rows):
        batch = cut[start : start + rows]
        logits = model.logits(padded([window.tokens for _, window in batch], model.device))
        for row, (number, window) in zip(logits, batch, strict=True):
            found[number] += _score(row, window)
    return found


def _score(logits: Tensor, window: Window) -> float:
    """Score one window from its logits (S, V), which may be padded at the end."""
    end = len(window.tokens)
    mine = logits[end - len(window.targets) : end].float()
    targets = torch.tensor(window.targets, device=logits.device)
    return float(mine.log_softmax(-1).gather(-1, targets[:, None]).double().sum())

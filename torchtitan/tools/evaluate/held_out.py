"""Loss of a trained model on held-out text: the evaluation `loss`.

Every document is scored by itself, between the BOS and EOS that training uses, in windows of the
sequence length. So the loss is that of `validation` where documents do not see each other.
"""

import itertools
import math
from collections.abc import Iterator

from torchtitan.checkpoint.folder import look_at, read_state
from torchtitan.checkpoint.weights.opening import find, find_format
from torchtitan.config import ConfigError, Setting
from torchtitan.config.load import Gathered, load
from torchtitan.data import DataConfig, separators
from torchtitan.data.order import Source
from torchtitan.data.sources import open_source
from torchtitan.job import JobConfig
from torchtitan.logging import status
from torchtitan.tools.evaluate.evaluation import EvaluationRequest, Result
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.scoring import score_texts
from torchtitan.tools.evaluate.subject import open_subject

SECTIONS = ("data", "validation")
AT_A_TIME = 256
"""Documents that are held in memory."""


def held_out_loss(request: EvaluationRequest) -> Result:
    """Run the evaluation `torchtitan evaluate --tasks loss`.

    Raises:
        ConfigError: if the model reads no text, or there is no such text.
    """
    subject = open_subject(request.place)
    length = request.length or subject.seq_len
    if length is None:
        message = "its sequence length is unknown; set it with --length"
        raise ConfigError(f"{request.place.path}: {message}")
    data = held_out_data(request)
    tokenizer = subject.tokenizer
    ends = separators(tokenizer, data.add_bos, data.add_eos)[1]
    end = (tokenizer.eos,) if ends else ()
    texts = itertools.islice(documents(data), request.limit)
    nats, count, size, number = 0.0, 0, 0, 0
    dtype = request.dtype or subject.dtype
    with open_model(subject, length, dtype) as model, status("scoring") as add:
        while some := list(itertools.islice(texts, AT_A_TIME)):
            rows = ([*subject.begin, *tokenizer.encode(text), *end] for text in some)
            # Without BOS, nothing comes before the first token.
            asked = [(tokens[:1], tokens[1:]) for tokens in rows]
            nats -= sum(score_texts(model, asked, request.batch_size))
            count += sum(len(targets) for _, targets in asked)
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
        for key, value in read_state(path, look_at(path))["recipe"].items():
            if key.startswith(tuple(f"{section}." for section in SECTIONS)):
                settings[tuple(key.split("."))] = Setting(value, str(path))
    if request.dataset or request.dataset_path:
        settings.pop(("data", "validation_fraction"), None)
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


def _texts(source: Source, name: str) -> Iterator[str]:
    for position, content in source.read({0: None}, 1)[0]:
        if source.epoch(position):
            return
        if not isinstance(content, str):
            raise ConfigError(f"--dataset: {name} has no text; name a data set of text")
        if content:
            yield content

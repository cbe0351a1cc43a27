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
from torchtitan.data.sources import open_source
from torchtitan.job import JobConfig
from torchtitan.tools.evaluate.evaluation import EvaluationRequest, Result
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.scoring import score_texts
from torchtitan.tools.evaluate.subject import open_subject

SECTIONS = ("data", "validation")


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
    texts = list(itertools.islice(documents(data), request.limit))
    asked = []
    for text in texts:
        tokens = [*subject.begin, *tokenizer.encode(text), *end]
        # Without BOS, nothing comes before the first token.
        asked.append((tokens[:1], tokens[1:]))
    with open_model(subject, length, request.dtype or subject.dtype) as model:
        nats = -sum(score_texts(model, asked, request.batch_size))
    count, size = sum(len(targets) for _, targets in asked), sum(len(t.encode()) for t in texts)
    if not count:
        raise ConfigError(f"--dataset: {data.dataset} has no text to score")
    values = {
        "loss": nats / count,
        "bits_per_byte": nats / size / math.log(2),
        "tokens": count,
        "documents": len(texts),
    }
    line = (
        f"loss {values['loss']:.4f} nats per token, {values['bits_per_byte']:.4f} bits per byte: "
        f"{count:,} tokens of {len(texts):,} documents of {data.dataset}"
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
    """Yield each document of a data set of text once."""
    try:
        source = open_source(data.model_copy(update={"shuffle": False}), None, seed=0)
    except ConfigError as error:
        raise ConfigError(f"--dataset: got {data.dataset}; {error}") from None
    for position, content in source.read({0: None}, 1)[0]:
        if source.epoch(position):
            return
        if not isinstance(content, str):
            raise ConfigError(f"--dataset: {data.dataset} has no text; name a data set of text")
        yield content

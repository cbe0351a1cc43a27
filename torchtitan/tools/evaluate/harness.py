"""Tasks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

It brings thousands of tasks, and asks a model for three things: the likelihood of a text after
another, the likelihood of a whole text, and the continuation of a text. It runs on rank 0 alone,
which sends the calls to the other ranks. It is an optional dependency, so it is imported in the
functions that use it.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from torchtitan.config import ConfigError
from torchtitan.config.words import nearest
from torchtitan.packages import install
from torchtitan.tools.evaluate.continuation import Row, generate
from torchtitan.tools.evaluate.inference import InferenceModel, open_model
from torchtitan.tools.evaluate.sampling import Sampling, generator_of
from torchtitan.tools.evaluate.scoring import Score, score_texts
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

T = TypeVar("T")

MOST_NEW = 256
"""New tokens if a task does not set a number; the default of the harness for other models."""
CHOICES = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""Keys with which a task may control the continuation of a text."""


class HarnessRequest(NamedTuple):
    """A text to continue, and the rules for it."""

    prompt: list[int]
    until: tuple[str, ...]
    """Texts before the first of which the continuation ends."""
    most: int
    how: Sampling


def find_tasks(names: Sequence[str], folder: Path | None) -> "TaskManager":
    """The tasks of the harness and of a folder.

    Raises:
        ConfigError: if a name is not among them, or the harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"lm-evaluation-harness is not installed: {install('lm_eval')}")
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--include-path: got {folder}; there is no such folder")
    tasks = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in tasks.all_tasks:
            hint = nearest(name, tasks.all_tasks)
            raise ConfigError(f"--tasks: got {name}; the harness has no such task{hint}")
    return tasks


def run_tasks(
    place: ModelLocation, dtype: torch.dtype, length: int, rows: int, settings: dict[str, Any]
) -> dict[str, Any] | ConfigError | None:
    """Run tasks; the results, or the error of a task, on rank 0, and None on the other ranks.

    Args:
        length: maximum sequence length.
        rows: number of texts that are computed together.
        settings: arguments of `lm_eval.simple_evaluate`, such as the tasks.
    """
    with open_model(open_subject(place), length, dtype) as model:
        together = CollectiveModel(model, rows)
        if model.world.rank:
            together.follow()
            return None
        from lm_eval import simple_evaluate

        with together.leading():
            try:
                found: dict[str, Any] = simple_evaluate(adapter(together), **settings)
            except ConfigError as error:
                return error
        return found


def as_table(found: dict[str, Any]) -> str:
    """Format results as a table: task, metric, value and standard error, a line each."""
    rows = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, way = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = values.get(f"{metric}_stderr,{way}")
            spread = f"± {error:.4f}" if isinstance(error, float) else ""
            named = metric if way == "none" else f"{metric} ({way})"
            rows.append((task, named, f"{value:.4f}", spread))
    tasks, metrics, numbers = (max((len(row[n]) for row in rows), default=0) for n in range(3))
    return "\n".join(
        f"{task:<{tasks}}  {metric:<{metrics}}  {number:>{numbers}}  {spread}".rstrip()
        for task, metric, number, spread in rows
    )


class CollectiveModel:
    """A model whose calls on rank 0 are computed by all ranks."""

    def __init__(self, model: InferenceModel, rows: int) -> None:
        self.model, self.rows = model, rows

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Tell the other ranks at the end of the block that there are no more calls."""
        yield
        self.model.world.broadcast_object(None)

    def follow(self) -> None:
        """Compute the calls of rank 0 until there are no more."""
        while (call := self.model.world.broadcast_object(None)) is not None:
            function, *arguments = call
            function(self.model, *arguments)

    def score(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        """Score each text after its context."""
        return self._call(_score, texts, self.rows)

    def generate(self, requests: Sequence[HarnessRequest], first: int) -> list[str]:
        """Continue texts with the same settings, numbered from `first`."""
        return self._call(_generate, requests, first)

    def _call(self, function: Callable[..., list[T]], *arguments: Any) -> list[T]:
        self.model.world.broadcast_object((function, *arguments))
        return function(self.model, *arguments)


def _score(
    model: InferenceModel, texts: Sequence[tuple[list[int], list[int]]], rows: int
) -> list[Score]:
    with progress("texts", is_shown=not model.world.rank) as more:
        return score_texts(model, texts, rows, more)


def _generate(model: InferenceModel, requests: Sequence[HarnessRequest], first: int) -> list[str]:
    decode = model.subject.tokenizer.decode
    rows = [Row(one.prompt, generator_of(0, first + n)) for n, one in enumerate(requests)]
    until = {id(row): one.until for row, one in zip(rows, requests, strict=True)}

    def is_enough(row: Row) -> bool:
        text = decode(row.tokens)
        return any(stop in text for stop in until[id(row)])

    generate(model, rows, requests[0].most, requests[0].how, is_enough=is_enough)
    return [before(decode(row.tokens), until[id(row)]) for row in rows]


@contextmanager
def progress(what: str, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; the block calls the function with finished and total steps."""
    from tqdm import tqdm

    with tqdm(desc=what, disable=not is_shown) as bar:

        def more(some: int, of: int) -> None:
            bar.total = of
            bar.update(some)

        yield more


def before(text: str, stops: Sequence[str]) -> str:
    """The part of a text before the first of `stops`."""
    found = (text.find(stop) for stop in stops)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def read_request(model: InferenceModel, context: list[int], said: dict[str, Any]) -> HarnessRequest:
    """Read the request of a task, and cut its context to the length that is left.

    Raises:
        ConfigError: if it has an unknown key, or wants too many tokens.
    """
    if unknown := said.keys() - CHOICES:
        raise ConfigError(f"a task sets {', '.join(sorted(unknown))}, which is not supported")
    until, most = said.get("until") or (), said.get("max_gen_toks", MOST_NEW)
    if most >= model.length:
        raise ConfigError(
            f"--length: got {model.length}, but a task generates {most} tokens after a text; use "
            f"{2 * most} or more"
        )
    temperature = said.get("temperature", 1.0) if said.get("do_sample") else 0.0
    return HarnessRequest(
        prompt=context[-(model.length - most) :],
        until=(until,) if isinstance(until, str) else tuple(until),
        most=most,
        how=Sampling(temperature, said.get("top_k") or 0, said.get("top_p") or 1.0),
    )


def adapter(together: CollectiveModel) -> "LM":
    """Adapt a model to the interface of the harness."""
    from lm_eval.api.model import TemplateLM

    model = together.model
    subject, tokenizer = model.subject, model.subject.tokenizer

    class Adapter(TemplateLM):  # type: ignore[misc]
        """Language model of the harness; `TemplateLM` splits texts into context and target."""

        eot_token_id = tokenizer.eos
        prefix_token_id = subject.begin[-1] if subject.begin else tokenizer.eos
        max_length = model.length
        tokenizer_name = tokenizer.fingerprint

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            begin = [] if add_special_tokens is False else subject.begin
            return [*begin, *tokenizer.encode(string)]

        def _loglikelihood_tokens(
            self,
            requests: list[tuple[tuple[str, str], list[int], list[int]]],
            disable_tqdm: bool = False,
        ) -> list[tuple[float, bool]]:
            found = together.score([(context, text) for _, context, text in requests])
            return [tuple(score) for score in found]  # type: ignore[misc]

        def loglikelihood_rolling(
            self, requests: "list[Instance]", disable_tqdm: bool = False
        ) -> list[float]:
            texts = [tokenizer.encode(request.args[0]) for request in requests]
            found = together.score([([self.prefix_token_id], text) for text in texts])
            return [score.log_probability for score in found]

        def generate_until(
            self, requests: "list[Instance]", disable_tqdm: bool = False
        ) -> list[str]:
            asked = [
                read_request(model, self.tok_encode(context), said)
                for context, said in (request.args for request in requests)
            ]
            found: list[str] = []
            with progress("continuations", is_shown=True) as more:
                for _, alike in itertools.groupby(asked, lambda one: (one.most, one.how)):
                    group = list(alike)
                    for start in range(0, len(group), together.rows):
                        batch = group[start : start + together.rows]
                        found += together.generate(batch, len(found))
                        more(len(batch), len(asked))
            return found

    return Adapter()

"""Tasks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

It brings thousands of tasks, and asks a model three things: how likely a text is after another, how
likely a whole text is, and how the model goes on. It is asked on rank 0 alone; the other ranks
are told what to compute along. The harness is imported by what needs it, since nobody else has to
have it.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchtitan.config import ConfigError
from torchtitan.config.words import nearest
from torchtitan.tools.evaluate.generate import Row, go_on
from torchtitan.tools.evaluate.layout import Model, open_model
from torchtitan.tools.evaluate.opening import Place, open_subject
from torchtitan.tools.evaluate.sampling import Sampling, generator_of
from torchtitan.tools.evaluate.scoring import Score, score_texts

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

MOST_NEW = 256
"""New tokens where a task does not say how many; as the harness has it for other models."""
CHOICES = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""What a task may say of how the model is to go on."""


@dataclass(frozen=True)
class Tasks:
    """What is asked for."""

    place: Place
    names: tuple[str, ...]
    dtype: torch.dtype
    length: int
    """Of the longest sequence the model is given."""
    limit: int | None = None
    """Documents of a task; None: all."""
    few_shot: int | None = None
    """Examples before each question; None: as the task has it."""
    rows: int = 8
    """Texts that are computed together."""


class Wish(NamedTuple):
    """A text, and how to go on with it."""

    prompt: list[int]
    until: tuple[str, ...]
    """It ends before the first of these."""
    most: int
    how: Sampling


def find_tasks(names: Sequence[str], folder: Path | None) -> "TaskManager":
    """The tasks of the harness and of a folder, those named among them.

    Raises:
        ConfigError: where one is not, or there is no harness.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed: pip install lm_eval")
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--include-path: got {folder}; there is no such folder")
    tasks = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in tasks.all_tasks:
            hint = nearest(name, tasks.all_tasks)
            raise ConfigError(f"--tasks: got {name}; the harness has no such task{hint}")
    return tasks


def run_tasks(wanted: Tasks, tasks: "TaskManager") -> dict[str, Any] | ConfigError | None:
    """What the harness finds, on rank 0, or what of a task cannot be; on the others None."""
    with open_model(open_subject(wanted.place), wanted.length, wanted.dtype) as model:
        together = CollectiveModel(model, wanted.rows)
        if model.world.rank:
            together.follow()
            return None
        from lm_eval import simple_evaluate

        with together.leading():
            try:
                found: dict[str, Any] = simple_evaluate(
                    adapter(together),
                    tasks=list(wanted.names),
                    task_manager=tasks,
                    limit=wanted.limit,
                    num_fewshot=wanted.few_shot,
                    log_samples=False,
                )
            except ConfigError as error:
                return error
        return found


def as_table(found: dict[str, Any]) -> str:
    """Results for people: task, metric, value and standard error, a line each."""
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
    """Has all ranks compute what rank 0 is asked."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rows = model, rows

    @contextmanager
    def leading(self) -> Iterator[None]:
        """At the end of the block the other ranks are told that there is no more."""
        yield
        self.model.world.share(None)

    def follow(self) -> None:
        """Compute along with rank 0, until there is no more."""
        while (order := self.model.world.share(None)) is not None:
            name, *arguments = order
            getattr(self, f"_{name}")(*arguments)

    def score(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        """How likely each text is after its context."""
        self.model.world.share(("score", texts))
        return self._score(texts)

    def go_on(self, wishes: Sequence[Wish], first: int) -> list[str]:
        """What each text is gone on with; they are alike in how, and `first` has that number."""
        self.model.world.share(("go_on", wishes, first))
        return self._go_on(wishes, first)

    def _score(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        with progress("texts", is_shown=not self.model.world.rank) as more:
            return score_texts(self.model, texts, self.rows, more)

    def _go_on(self, wishes: Sequence[Wish], first: int) -> list[str]:
        decode = self.model.subject.tokenizer.decode
        rows = [Row(wish.prompt, generator_of(0, first + n)) for n, wish in enumerate(wishes)]
        until = {id(row): wish.until for row, wish in zip(rows, wishes, strict=True)}

        def is_enough(row: Row) -> bool:
            text = decode(row.tokens)
            return any(stop in text for stop in until[id(row)])

        go_on(self.model, rows, wishes[0].most, wishes[0].how, is_enough=is_enough)
        texts = [decode(row.tokens) for row in rows]
        return [before(text, wish.until) for text, wish in zip(texts, wishes, strict=True)]


@contextmanager
def progress(what: str, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar: the function in the block is told of each step, and how many there are."""
    from tqdm import tqdm

    with tqdm(desc=what, disable=not is_shown) as bar:

        def more(some: int, of: int) -> None:
            bar.total = of
            bar.update(some)

        yield more


def before(text: str, stops: Sequence[str]) -> str:
    """What stands before the first of `stops`."""
    found = (text.find(stop) for stop in stops)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def read_wish(model: Model, context: list[int], said: dict[str, Any]) -> Wish:
    """What a task wants, of a context that is cut to what fits before it.

    Raises:
        ConfigError: where that is not known here, or too much.
    """
    if unknown := said.keys() - CHOICES:
        raise ConfigError(f"a task wants {', '.join(sorted(unknown))}, which is not known here")
    until, most = said.get("until") or (), said.get("max_gen_toks", MOST_NEW)
    if most >= model.length:
        raise ConfigError(
            f"--length: got {model.length}, but a task wants {most} tokens after a text; use "
            f"{2 * most} or more"
        )
    temperature = said.get("temperature", 1.0) if said.get("do_sample") else 0.0
    return Wish(
        prompt=context[-(model.length - most) :],
        until=(until,) if isinstance(until, str) else tuple(until),
        most=most,
        how=Sampling(temperature, said.get("top_k") or 0, said.get("top_p") or 1.0),
    )


def adapter(together: CollectiveModel) -> "LM":
    """A model as the harness asks it."""
    from lm_eval.api.model import TemplateLM

    model = together.model
    subject, tokenizer = model.subject, model.subject.tokenizer

    class Adapter(TemplateLM):  # type: ignore[misc]
        """`TemplateLM` cuts texts into contexts and what is scored."""

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
                read_wish(model, self.tok_encode(context), said)
                for context, said in (request.args for request in requests)
            ]
            found: list[str] = []
            with progress("continuations", is_shown=True) as more:
                for _, alike in itertools.groupby(asked, lambda wish: (wish.most, wish.how)):
                    wishes = list(alike)
                    for start in range(0, len(wishes), together.rows):
                        batch = wishes[start : start + together.rows]
                        found += together.go_on(batch, len(found))
                        more(len(batch), len(asked))
            return found

    return Adapter()

"""The words of `torchtitan generate` and `torchtitan evaluate`, and the ranks they work on."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtitan.checkpoint.weights.opening import OPEN
from torchtitan.config import ConfigError
from torchtitan.device import pick
from torchtitan.local_ranks import run_ranks
from torchtitan.logging import logger
from torchtitan.parallel import Launch
from torchtitan.tools.evaluate.harness import Tasks, as_table, evaluate, find_tasks
from torchtitan.tools.evaluate.layout import check_ranks
from torchtitan.tools.evaluate.opening import (
    BYTES,
    DTYPES,
    Place,
    Subject,
    check_weights,
    open_subject,
)
from torchtitan.tools.evaluate.samples import Samples, generate
from torchtitan.tools.evaluate.sampling import Sampling

PATIENCE = timedelta(minutes=30)
"""Of ranks for each other: one may load or print for long."""


class Adds(Protocol):
    """Adds a verb to the command line."""

    def __call__(self, name: str, about: str | None) -> argparse.ArgumentParser: ...


def generate_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Go on with prompts: samples from the weights of a run, a checkpoint, Hugging Face or Meta."""
    place = _place(arguments)
    subject = open_subject(place)
    wanted = Samples(
        place=place,
        prompts=tuple(_prompts(arguments)),
        dtype=_dtype(arguments, subject),
        samples=arguments.samples,
        tokens=arguments.tokens,
        how=Sampling(arguments.temperature, arguments.top_k, arguments.top_p),
        seed=arguments.seed,
        rows=arguments.batch_size,
        as_json=arguments.json,
    )
    _warn_if_longer(subject, wanted.longest(subject))
    _on_ranks(generate, arguments, subject, wanted)


def evaluate_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Score a model on tasks of the lm-evaluation-harness, which has to be installed."""
    names = tuple(name for name in arguments.tasks.split(",") if name)
    tasks = find_tasks(names, arguments.include_path)
    place = _place(arguments)
    subject = open_subject(place)
    length = arguments.length or subject.seq_len
    if length is None:
        raise ConfigError(f"{place.path}: it does not say how long sequences are; --length does")
    wanted = Tasks(
        place=place,
        names=names,
        dtype=_dtype(arguments, subject),
        length=length,
        limit=arguments.limit,
        few_shot=arguments.num_fewshot,
        rows=arguments.batch_size,
    )
    _warn_if_longer(subject, length)
    found = _on_ranks(evaluate, arguments, subject, wanted, tasks)[0]
    if isinstance(found, ConfigError):
        raise found
    print(json.dumps(found["results"], default=str) if arguments.json else as_table(found))


def _on_ranks(
    function: Callable[..., Any], arguments: argparse.Namespace, subject: Subject, *args: Any
) -> list[Any]:
    """`function(*args)` on as many ranks as are wanted, once all is known to be well."""
    ranks = arguments.tensor_parallel
    if Launch.read().by_launcher:
        raise ConfigError("it starts its ranks itself, --tensor-parallel of them; use no launcher")
    check_ranks(subject, ranks)
    try:
        device = pick(ranks - 1)
    except RuntimeError as error:
        raise ConfigError(f"--tensor-parallel: got {ranks}; {error}") from None
    check_weights(subject)
    if ranks == 1:
        return [function(*args)]
    return run_ranks(function, ranks, *args, device=device.type, timeout=PATIENCE)


def _warn_if_longer(subject: Subject, length: int) -> None:
    if subject.seq_len is not None and length > subject.seq_len:
        logger.warning(
            "the model was trained on sequences of %d tokens, and these get up to %d: positions "
            "beyond are new to it",
            *(subject.seq_len, length),
        )


def _place(arguments: argparse.Namespace) -> Place:
    return Place(
        arguments.source,
        arguments.model,
        arguments.flavor,
        arguments.tokenizer,
        arguments.format,
        tuple(arguments.imports),
    )


def _dtype(arguments: argparse.Namespace, subject: Subject) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, arguments.dtype) if arguments.dtype else subject.dtype
    return chosen


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """Those of the command line, then those of the file; without any, the empty one."""
    yield from arguments.prompt
    if arguments.prompts_file is None:
        if not arguments.prompt:
            yield ""
        return
    path: Path = arguments.prompts_file
    if not path.is_file():
        raise ConfigError(f"--prompts-file: got {path}; there is no such file")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts-file: got {path}; it has no prompt, which is a line")
    yield from lines


def add_verbs(add: Adds) -> None:
    """The verbs of this package."""
    verb = add("generate", generate_verb.__doc__)
    _add_model(verb)
    verb.add_argument(
        "--prompt", action="append", default=[], help="a text to go on with; may be given again"
    )
    verb.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    verb.add_argument("--tokens", type=_count, default=64, help="new ones, at most; absent: 64")
    verb.add_argument("--samples", type=_count, default=1, help="of each prompt; absent: 1")
    verb.add_argument(
        "--temperature", type=_number(0, None), default=1.0, help="0: the likeliest; absent: 1"
    )
    verb.add_argument(
        "--top-k", type=_count, default=0, help="of so many of the likeliest tokens; absent: all"
    )
    verb.add_argument(
        "--top-p", type=_number(0, 1), default=1.0, help="of the likeliest with this probability"
    )
    verb.add_argument("--seed", type=int, default=0, help="of the samples; absent: 0")
    verb.add_argument("--json", action="store_true", help="an object a line")
    verb.set_defaults(verb=generate_verb)

    verb = add("evaluate", evaluate_verb.__doc__)
    _add_model(verb)
    verb.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks")
    verb.add_argument("--limit", type=_count, metavar="N", help="documents of a task; absent: all")
    verb.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each; absent: as a task says"
    )
    verb.add_argument("--include-path", type=Path, metavar="FOLDER", help="tasks of your own")
    verb.add_argument(
        "--length", type=_count, metavar="N", help="tokens of a sequence; absent: as in training"
    )
    verb.add_argument("--json", action="store_true", help="the results as one object")
    verb.set_defaults(verb=evaluate_verb)


def _add_model(verb: argparse.ArgumentParser) -> None:
    """The words that say what is evaluated, and on what."""
    where = "a run's folder, a checkpoint, or a folder of Hugging Face's or Meta's weights"
    verb.add_argument("source", type=Path, help=where)
    verb.add_argument("--from", dest="format", choices=OPEN, help="absent: by the files")
    verb.add_argument("--model", help="a key of MODELS; absent: as the source says")
    verb.add_argument("--flavor", help="a size of it; absent: as the source says")
    verb.add_argument(
        "--tokenizer", metavar="PATH", help=f"file, folder, or {BYTES}; absent: as the source says"
    )
    verb.add_argument(
        "--imports", nargs="+", default=(), metavar="MODULE", help="modules that add to MODELS"
    )
    verb.add_argument(
        "--tensor-parallel", type=_count, default=1, metavar="N", help="ranks; absent: 1"
    )
    verb.add_argument("--dtype", choices=DTYPES, help="absent: that of training, or of the weights")
    verb.add_argument(
        "--batch-size", type=_count, default=8, metavar="N", help="texts together; absent: 8"
    )


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word}; wanted an integer >= 1")
    return int(word)


def _number(least: float, most: float | None) -> Callable[[str], float]:
    wanted = f"a number >= {least}" if most is None else f"a number from {least} to {most}"

    def read(word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if not least <= number <= (float("inf") if most is None else most):
            raise argparse.ArgumentTypeError(f"got {word}; wanted {wanted}")
        return number

    return read

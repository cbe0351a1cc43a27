"""Samples from a model, as text or as JSON: `torchtitan generate`."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.config import ConfigError
from torchtitan.logging import on_terminal
from torchtitan.tools.evaluate.continuation import Row
from torchtitan.tools.evaluate.continuation import generate as generate_rows
from torchtitan.tools.evaluate.inference import open_model
from torchtitan.tools.evaluate.sampling import Sampling, generator_of
from torchtitan.tools.evaluate.subject import Subject

Result = dict[str, Any]


@dataclass(frozen=True)
class SamplingRequest:
    """A request for samples."""

    prompts: tuple[str, ...]
    dtype: torch.dtype
    samples: int = 1
    """Number of samples for each prompt."""
    tokens: int = 64
    """Maximum number of new tokens."""
    how: Sampling = field(default_factory=Sampling)
    seed: int = 0
    rows: int = 8
    """Number of texts that are continued together."""
    as_json: bool = False

    def longest(self, subject: Subject) -> int:
        """The maximum number of tokens in a text."""
        return max(len(encoded(subject, prompt)) for prompt in self.prompts) + self.tokens


def encoded(subject: Subject, prompt: str) -> list[int]:
    """Encode a prompt like the start of a document of the training data."""
    tokenizer = subject.tokenizer
    tokens = [*subject.begin, *tokenizer.encode(prompt)]
    if not tokens and tokenizer.bos == tokenizer.eos:
        return [tokenizer.eos]  # which separates documents
    if not tokens:
        raise ConfigError("--prompt: it is empty, and the tokenizer has no BOS token; give a text")
    return tokens


@dataclass(frozen=True)
class GeneratedText:
    """One of the requested texts."""

    prompt: str
    number: int
    """Number of the prompt; like `sample`, it counts from 1."""
    sample: int
    row: Row

    def text(self, subject: Subject) -> str:
        """The continuation of the prompt; replacement characters stand for incomplete ones."""
        before = subject.tokenizer.decode(self.row.prompt)
        after = subject.tokenizer.decode([*self.row.prompt, *self.row.tokens])
        return after.removeprefix(before)

    def result(self, subject: Subject) -> Result:
        return {
            "prompt": self.prompt,
            "number": self.number,
            "sample": self.sample,
            "continuation": self.text(subject),
            "tokens": self.row.tokens,
            "ended": self.row.ended,
        }


def generate(wanted: SamplingRequest, subject: Subject) -> list[Result]:
    """Sample, print and return the results."""
    asked = [
        GeneratedText(
            prompt,
            number,
            sample,
            Row(encoded(subject, prompt), generator_of(wanted.seed, number, sample)),
        )
        for number, prompt in enumerate(wanted.prompts, 1)
        for sample in range(1, wanted.samples + 1)
    ]
    with open_model(subject, wanted.longest(subject), wanted.dtype) as model:
        begin = time.perf_counter()
        for start in range(0, len(asked), wanted.rows):
            batch = asked[start : start + wanted.rows]
            printer = Printer(subject, batch, wanted)
            rows = [sample.row for sample in batch]
            generate_rows(model, rows, wanted.tokens, wanted.how, after_step=printer.after_step)
            printer.end()
        seconds = time.perf_counter() - begin
    count = sum(len(sample.row.tokens) for sample in asked)
    speed = f"{count:,} tokens in {seconds:.1f} s: {count / seconds:,.1f} tokens/s"
    print(speed, file=sys.stderr, flush=True)
    return [sample.result(subject) for sample in asked]


class Printer:
    """Printer of a batch: a single text is streamed, several are printed when all have ended."""

    def __init__(
        self, subject: Subject, batch: Sequence[GeneratedText], wanted: SamplingRequest
    ) -> None:
        self.subject, self.batch, self.wanted = subject, batch, wanted
        self.streams = len(batch) == 1 and not wanted.as_json
        self.steps = self.shown = 0
        if self.streams:
            self._head(batch[0])

    def after_step(self) -> None:
        self.steps += 1
        if self.streams:
            text = self.batch[0].text(self.subject)
            # The bytes of a character may be several tokens.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._more(text)
        elif on_terminal():
            progress = f"\r{self.steps} of at most {self.wanted.tokens} tokens"
            print(progress, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the rest."""
        if on_terminal() and not self.streams:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        for sample in self.batch:
            if self.wanted.as_json:
                print(json.dumps(sample.result(self.subject)), flush=True)
                continue
            if not self.streams:
                self._head(sample)
            self._more(sample.text(self.subject))
            self.shown = 0
            print("\n", flush=True)

    def _head(self, sample: GeneratedText) -> None:
        """Print the prompt, which the continuation follows, below a heading if there are more."""
        of = f", sample {sample.sample}" if self.wanted.samples > 1 else ""
        if of or len(self.wanted.prompts) > 1:
            print(f"=== prompt {sample.number}{of}")
        print(sample.prompt, end="", flush=True)

    def _more(self, text: str) -> None:
        print(text[self.shown :], end="", flush=True)
        self.shown = len(text)

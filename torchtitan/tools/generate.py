"""Generate text from the weights of a run, a checkpoint, Hugging Face or Meta."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor, nn

from torchtitan.config import ConfigError, import_modules
from torchtitan.data import Tokenizer
from torchtitan.data.documents import not_text
from torchtitan.logging import on_terminal, tell
from torchtitan.models.attention import SelfAttention, masked_attention
from torchtitan.remote import refuse_pointer
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
    StoredModel,
    converters_of_flags,
    find_model,
    padded,
)
from torchtitan.tools.options import Count, Flag, Flavor, Imports, Model, Text, number, verb

TEMPERATURE = number("0, or a number >= 1e-6", lambda v: v == 0 or 1e-6 <= v < float("inf"))
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
PREFILL_CHUNK = 512
"""Tokens of a prompt that are read together, which bounds the memory of their logits."""
app = verb()


@app.command(cls=ConvertVerb, help=__doc__)
def generate(
    context: typer.Context,
    source: Source,
    prompt: Annotated[list[str] | None, Text("TEXT", "Text to continue; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, Text("FILE", "File with one prompt per line.")] = None,
    tokens: Annotated[int, Count("Maximum number of new tokens (default: 64).")] = 64,
    samples: Annotated[int, Count("Number of samples per prompt (default: 1).")] = 1,
    temperature: Annotated[
        float,
        Text(
            "X",
            "Divisor of the logits; 0: always take the most likely token (default: 1).",
            parser=TEMPERATURE,
        ),
    ] = 1.0,
    top_k: Annotated[
        int | None, Count("Sample from this number of most likely tokens (default: all).")
    ] = None,
    top_p: Annotated[
        float,
        Text(
            "X",
            "Sample from the most likely tokens with this total probability (default: 1).",
            parser=SHARE,
        ),
    ] = 1.0,
    seed: Annotated[int, Text("N", "Random seed (default: 0).")] = 0,
    as_json: Annotated[bool, Flag("--json", "Print a JSON object per line.")] = False,
    format: Format = None,
    model: Model = None,
    flavor: Flavor = None,
    tokenizer: ModelTokenizer = None,
    imports: Imports = None,
    no_convert: NoConvert = False,
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
) -> None:
    import_modules(imports or (), "--imports")
    convert = converters_of_flags(context.args, no_convert)
    place = ModelLocation(source, model, flavor, tokenizer, format, convert)
    stored = find_model(place)
    texts = requested(stored, list(prompts(prompt or [], prompts_file)), samples, seed)
    longest = max(len(text.row.prompt) for text in texts) + tokens
    loaded = InferenceModel(stored, longest, getattr(torch, dtype) if dtype else stored.dtype)
    sampling = Sampling(temperature, top_k or 0, top_p)
    begin = time.perf_counter()
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        printer = Printer(stored.tokenizer, batch, tokens, as_json)
        rows = [text.row for text in batch]
        continue_rows(loaded, rows, tokens, sampling, printer.after_step)
        printer.end()
    seconds = time.perf_counter() - begin
    count = sum(len(text.row.tokens) for text in texts)
    speed = f"{count:,} tokens in {seconds:.1f} s: {count / seconds:,.1f} tokens/s"
    tell(speed)


def prompts(given: list[str], path: Path | None) -> Iterator[str]:
    """The prompts of the command line, then of the file; without any, the empty one."""
    yield from given
    if path is None:
        if not given:
            yield ""
        return
    if not path.is_file():
        raise ConfigError(f"--prompts-file: got {path}; there is no such file")
    refuse_pointer(path)
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts-file: got {path}; {not_text(error)}") from None
    if not lines:
        raise ConfigError(f"--prompts-file: got {path}; it is empty; write one prompt per line")
    yield from lines


def requested(
    stored: StoredModel, prompts: Sequence[str], samples: int, seed: int
) -> list["GeneratedText"]:
    """Return the texts to generate, with their prompts encoded."""
    texts = []
    for place, prompt in enumerate(prompts, 1):
        for sample in range(1, samples + 1):
            heading = f"prompt {place}" * (len(prompts) > 1 or samples > 1)
            heading += f", sample {sample}" * (samples > 1)
            row = Row(encoded(stored, prompt), generator_of(seed, place, sample))
            texts.append(GeneratedText(prompt, place, sample, heading, row))
    return texts


def encoded(stored: StoredModel, prompt: str) -> list[int]:
    """Encode a prompt like the start of a document of the training data."""
    tokenizer = stored.tokenizer
    tokens = [*stored.begin, *tokenizer.encode(prompt)]
    if not tokens and tokenizer.bos == tokenizer.eos:
        return [tokenizer.eos]  # which separates documents
    if not tokens:
        raise ConfigError("--prompt: it is empty, and the tokenizer has no BOS token; give a text")
    return tokens


# --- printing ---


@dataclass
class Row:
    """A text in tokens, and its continuation."""

    prompt: Sequence[int]
    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    ended: Literal["end of text", "length"] | None = None
    """The reason why it is not continued."""


@dataclass(frozen=True)
class GeneratedText:
    """One of the requested texts."""

    prompt: str
    number: int
    """Number of the prompt; like `sample`, it counts from 1."""
    sample: int
    heading: str
    """Line above the text, if there are several."""
    row: Row

    def continuation(self, tokenizer: Tokenizer) -> str:
        """The text after the prompt; replacement characters stand for incomplete ones."""
        before = tokenizer.decode(self.row.prompt)
        return tokenizer.decode([*self.row.prompt, *self.row.tokens]).removeprefix(before)


class Printer:
    """Printer of a batch: a single text is streamed, several are printed when all have ended."""

    def __init__(
        self, tokenizer: Tokenizer, batch: Sequence[GeneratedText], most: int, as_json: bool
    ) -> None:
        """`most` is the maximum number of new tokens."""
        self.tokenizer, self.batch, self.most, self.as_json = tokenizer, batch, most, as_json
        self.streams = len(batch) == 1 and not as_json
        self.steps = self.shown = 0
        if self.streams:
            self._begin(batch[0])

    def after_step(self) -> None:
        self.steps += 1
        if self.streams:
            text = self.batch[0].continuation(self.tokenizer)
            # The bytes of a character may be several tokens.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._extend(text)
        elif on_terminal():
            progress = f"\r{self.steps} of at most {self.most} tokens"
            print(progress, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the rest."""
        if on_terminal() and not self.streams:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        for sample in self.batch:
            text = sample.continuation(self.tokenizer)
            if self.as_json:
                result = {"prompt": sample.prompt, "number": sample.number}
                result |= {"sample": sample.sample, "continuation": text}
                result |= {"tokens": sample.row.tokens, "ended": sample.row.ended}
                print(json.dumps(result), flush=True)
                continue
            if not self.streams:
                self._begin(sample)
            self._extend(text)
            self.shown = 0
            print("\n", flush=True)

    def _begin(self, sample: GeneratedText) -> None:
        """Print the prompt, which the continuation follows, below its heading."""
        if sample.heading:
            print(f"=== {sample.heading}")
        print(sample.prompt, end="", flush=True)

    def _extend(self, text: str) -> None:
        print(text[self.shown :], end="", flush=True)
        self.shown = len(text)


# --- choosing the next token ---


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens."""

    temperature: float = 1.0
    """Divisor of the logits; 0: always take the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to choose from (Fan et al., 2018, arXiv:1805.04833); 0: all."""
    top_p: float = 1.0
    """Probability of the likeliest tokens to choose from (Holtzman et al., 2020, arXiv:1904.09751).
    """


def choose(logits: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
    """Choose a token for each row, by a number of its own: no row depends on the others.

    Args:
        logits: (B, V).
        numbers: (B,) float32, in [0, 1).

    Returns:
        (B,) int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    likeliest, tokens = (logits.float() / sampling.temperature).topk(kept)
    probabilities = likeliest.softmax(-1)
    # A token is needed as long as those before it do not make up `top_p`; the first always is.
    before = probabilities.cumsum(-1) - probabilities
    before[:, 0] = -1.0
    probabilities = probabilities.where(before < sampling.top_p, 0.0)
    sums = probabilities.cumsum(-1)
    place = (sums <= numbers[:, None] * sums[:, -1:]).sum(-1)
    last = (probabilities > 0).sum(-1) - 1
    return tokens.gather(-1, torch.minimum(place, last)[:, None])[:, 0]


def generator_of(seed: int, *names: int) -> torch.Generator:
    """Make a generator that depends only on a seed and the place of a sample."""
    text = ".".join(map(str, (seed, *names)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)


# --- continuing texts ---


class Cache:
    """Keys and values of a batch for each attention of a model, by position.

    They depend only on the tokens before theirs. So a new token is computed by itself: it stores
    its own at its position, and attends to all up to it.
    """

    def __init__(self, length: int) -> None:
        """`length` is the maximum sequence length."""
        self.length = length
        self.kept: dict[SelfAttention, tuple[Tensor, Tensor]] = {}
        self.positions = torch.empty(0)
        self.end = 0

    def move_to(self, positions: Tensor, end: int) -> None:
        """Set the positions (B, S) of the tokens that are read next, all before `end`."""
        self.positions, self.end = positions, end

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Like `causal_attention`, from the tokens at `positions` to all up to them."""
        if module not in self.kept:
            shape = (*k.shape[:2], self.length, k.shape[3])
            self.kept[module] = k.new_zeros(shape), v.new_zeros(shape)
        rows = torch.arange(len(q), device=q.device)[:, None]
        for kept, new in zip(self.kept[module], (k, v), strict=True):
            kept[rows, :, self.positions] = new.transpose(1, 2)
        keys, values = (kept[:, :, : self.end] for kept in self.kept[module])
        places = torch.arange(self.end, device=q.device)
        queries = self.positions[:, None, :, None]
        mask = places <= queries
        if window:
            mask &= places > queries - window
        return masked_attention(q, keys, values, mask, sinks)


@contextmanager
def cached(network: nn.Module, length: int) -> Iterator[Cache]:
    """Let the attention of `network` use a cache inside the block."""
    cache = Cache(length)
    attentions = [module for module in network.modules() if isinstance(module, SelfAttention)]
    cores = [module.core for module in attentions]
    for module in attentions:
        module.core = partial(cache.attend, module)
    try:
        yield cache
    finally:
        for module, core in zip(attentions, cores, strict=True):
            module.core = core


def continue_rows(
    model: InferenceModel,
    rows: Sequence[Row],
    most: int,
    sampling: Sampling,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Continue all `rows` until each has ended; a token that ends a text is left out.

    They may have different lengths. They are padded at their ends, where no token of the row sees
    the padding; its next tokens overwrite the padding in the cache before they attend to it. So no
    row depends on the others.

    Args:
        most: maximum number of new tokens in a row.
        after_step: called when every row has one more token or has ended.
    """
    lengths = torch.tensor([len(row.prompt) for row in rows], device=model.device)
    longest = max(len(row.prompt) for row in rows)
    with cached(model.network, longest + most) as cache:
        logits = read(model, cache, [row.prompt for row in rows])
        for step in range(most):
            # Ids that the tokenizer does not know are padding of the vocabulary.
            numbers = torch.cat([torch.rand(1, generator=row.random) for row in rows])
            chosen = choose(logits[:, : model.vocabulary], numbers.to(model.device), sampling)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row.ended is None:
                    _add(row, token, model.stored.ends, most)
            after_step()
            if all(row.ended for row in rows):
                return
            positions = (lengths + step)[:, None]
            cache.move_to(positions, longest + step + 1)
            logits = model.logits(chosen[:, None], positions)[:, -1]


def read(model: InferenceModel, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Read prompts into the cache; the logits of the token after each of them, (B, V)."""
    tokens = padded(prompts, model.device)
    rows, longest = tokens.shape
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
    found: Tensor | None = None
    for start in range(0, longest, PREFILL_CHUNK):
        end = min(start + PREFILL_CHUNK, longest)
        positions = torch.arange(start, end, device=model.device).expand(rows, -1)
        cache.move_to(positions, end)
        logits = model.logits(tokens[:, start:end], positions)
        found = torch.zeros_like(logits[:, 0]) if found is None else found
        place = (last - start).clamp(0, end - start - 1)
        nearest = logits[torch.arange(rows, device=model.device), place]
        # Of the parts that do not begin after a prompt's end, the last has its end.
        found = torch.where((last >= start)[:, None], nearest, found)
    assert found is not None, "a prompt has at least one token"
    return found


def _add(row: Row, token: int, ends: frozenset[int], most: int) -> None:
    if token in ends:
        row.ended = "end of text"
        return
    row.tokens.append(token)
    if len(row.tokens) == most:
        row.ended = "length"

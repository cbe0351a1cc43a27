"""Next-token prediction of text: batches of token ids, cross entropy, and a tokenizer.

Loss in nats per token says little across tokenizers: longer tokens are fewer and harder. So the
loss on held-out text is also reported per byte, with B the bytes of the target tokens:

    bits per byte = nats / (B ln 2)        perplexity per byte = exp(nats / B)

Special tokens have no bytes, but their loss counts: a model has to know where a text ends.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data import (
    BatchStream,
    DataConfig,
    Tokenizer,
    check_local,
    check_vocabulary,
    leading_tokens,
    load_tokenizer,
    open_source,
    separators,
)
from torchtitan.data.batch import Batch
from torchtitan.data.lanes import ENDED, Lane, Sample, SampleStart, tokenized
from torchtitan.data.order import Document, Identity, Source
from torchtitan.data.sizes import StepSizes
from torchtitan.data.tokenizer import BytesUnknown, NoTokenizer, separator_note
from torchtitan.data.tokens.amounts import Amounts
from torchtitan.data.tokens.mixed_sources import (
    check_text_or_tokens,
    has_no_separator,
    lacks_tokenizer,
    open_stored,
    open_token_sources,
    shards_of,
    untokenized,
)
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.logging import logger
from torchtitan.losses import IGNORED, cross_entropy, vocabulary_parallel_cross_entropy
from torchtitan.models.settings import ModelConfig, TextConfig
from torchtitan.tasks import LossFunction, Task

AHEAD = ("ahead_tokens", "ahead_targets")
PADDING = 128
"""Number of tokens in a document of padding."""


@dataclasses.dataclass(frozen=True)
class TokenBatch(Batch):
    """A microbatch of text; each field is (B, S) int64."""

    tokens: Tensor
    targets: Tensor
    """Next token of each; -100 where there is nothing to predict."""
    positions: Tensor
    """Position of each token in its sequence."""
    documents: Tensor | None = None
    """Document of each token in its sequence: 0, 1, ..., negative for padding; None: attention does
    not need it. On the host, where attention reads its boundaries without waiting for a device."""
    ahead_tokens: Tensor | None = None
    """Tokens that follow each, as far as auxiliary losses need: (B, S, A); 0 beyond the end."""
    ahead_targets: Tensor | None = None
    """Target of each of `ahead_tokens`: (B, S, A); -100 beyond the end, or in another document."""

    on_host: ClassVar = frozenset({"documents"})

    @property
    def inputs(self) -> Tensor:
        return self.tokens

    def context(self) -> dict[str, Tensor]:
        known = {"positions": self.positions}
        more = {name: getattr(self, name) for name in ("documents", *AHEAD)}
        return known | {name: tensor for name, tensor in more.items() if tensor is not None}

    def count(self) -> Tensor:
        """Return the number of targets."""
        return (self.targets != IGNORED).sum()

    def shard(self, part: Callable[[Tensor], Tensor]) -> Self:
        """Shard all fields but `documents`, which stays whole, so that any mask can be made."""
        ahead = AHEAD if self.ahead_tokens is not None else ()
        names = ("tokens", "targets", "positions", *ahead)
        own = {name: part(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **own)


class RoutedBatch(TokenBatch):
    """A microbatch of text for a mixture of experts; its context has the tokens that count."""

    def context(self) -> dict[str, Tensor]:
        return super().context() | {"counted": self.targets != IGNORED}


def batch_type(args: Any) -> type[TokenBatch]:
    """Return the class of a model's batches."""
    return RoutedBatch if getattr(args, "n_experts", 0) else TokenBatch


@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Documents packed into rows of tokens, split into samples of `seq_len` + 1."""

    tokenizer: Tokenizer
    seq_len: int
    add_bos: bool | None
    add_eos: bool | None
    has_documents: bool
    """Whether a batch has the document of each token."""
    ahead: int = 0
    """Number of tokens after the next that a batch provides for each."""
    vocab_size: int | None = None
    """Size of the model's vocabulary. Default: that of the tokenizer."""
    batch_type: type[TokenBatch] = TokenBatch

    @property
    def identity(self) -> Identity:
        """Settings that must be equal when a run resumes."""
        add_bos, add_eos = separators(self.tokenizer, self.add_bos, self.add_eos)
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "add_bos": add_bos,
            "add_eos": add_eos,
            "bos": self.tokenizer.bos,
            "eos": self.tokenizer.eos,
        }

    def lane(self, number: int, documents: Iterator[Document], start: SampleStart | None) -> Lane:
        """Open a lane at its saved state."""
        rows = tokenized(
            documents,
            self.tokenizer,
            add_bos=self.add_bos,
            add_eos=self.add_eos,
            vocab_size=self.vocab_size,
        )
        return Lane(number, rows, self.seq_len, start)

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Join samples into a batch."""
        targets = _stacked([sample.tokens[1:] for sample in samples])
        for row, sample in zip(targets, samples, strict=True):
            if sample.documents[-1] == ENDED:  # padding is at the end
                row[torch.from_numpy(sample.documents[1:] == ENDED)] = IGNORED
            if places := [place - 1 for place in sample.repeated if place]:
                row[places] = IGNORED
        positions = torch.arange(self.seq_len).repeat(len(samples), 1)
        documents = None
        if self.has_documents:
            documents = _stacked([sample.documents[:-1] for sample in samples])
            # In one piece, padding would cost as much attention as a document of its length.
            documents = torch.where(documents == ENDED, ENDED - positions // PADDING, documents)
        batch = self.batch_type(
            tokens=_stacked([sample.tokens[:-1] for sample in samples]),
            targets=targets,
            positions=positions,
            documents=documents,
        )
        return look_ahead(batch, self.ahead) if self.ahead else batch


def look_ahead(batch: TokenBatch, depth: int) -> TokenBatch:
    """Add the following tokens of each token to a batch of whole sequences."""
    tokens = [_later(batch.tokens, k, 0) for k in range(1, depth + 1)]
    targets = [_later(batch.targets, k, IGNORED) for k in range(1, depth + 1)]
    if batch.documents is not None:
        others = [_later(batch.documents, k, -1) != batch.documents for k in range(1, depth + 1)]
        targets = [t.masked_fill(other, IGNORED) for t, other in zip(targets, others, strict=True)]
    ahead = {"ahead_tokens": torch.stack(tokens, -1), "ahead_targets": torch.stack(targets, -1)}
    return dataclasses.replace(batch, **ahead)


def _later(rows: Tensor, positions: int, beyond: int) -> Tensor:
    """Return the values shifted left by `positions` (B, S)."""
    filled = torch.nn.functional.pad(rows, (0, positions), value=beyond)
    return filled[:, positions:].contiguous()


def _stacked(rows: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.stack(rows, dtype=np.int64))


class NextToken(Task):
    """Text models: each token is predicted from those before it."""

    unit, rate, key = "tokens", "tps", "model.tokenizer_path"
    outputs = "tokens"
    splits_sequences = hides_ended = has_logits = True

    def __init__(self, model: ModelConfig, args: Any) -> None:
        assert isinstance(model, TextConfig), "the settings of a text model are a TextConfig"
        self.tokenizer = load_tokenizer(model.tokenizer_path)
        self._is_named = model.tokenizer_path is not None
        if self._is_named:
            check_vocabulary(self.tokenizer, args.vocab_size)
        self.vocab_size: int = args.vocab_size
        self.has_documents = model.separates_documents
        self.ahead: int = getattr(args, "ahead", 0)
        self.batch_type = batch_type(args)
        self._bytes: Tensor | None = None

    def adapt(self, data: DataConfig) -> None:
        if not self._is_named and lacks_tokenizer(data):
            self.tokenizer, self.unknown = NoTokenizer(self.vocab_size), (self.key,)
        check_vocabulary(self.tokenizer, self.vocab_size)

    @classmethod
    def units(cls, seq_len: int) -> int:
        return seq_len

    @classmethod
    def blank_batch(cls, size: int, seq_len: int, args: Any, has_documents: bool) -> TokenBatch:
        """Return texts of zeros, each a single document."""
        tokens, targets, positions, documents = torch.zeros(4, size, seq_len, dtype=torch.int64)
        batch = batch_type(args)(tokens, targets, positions, documents if has_documents else None)
        ahead = getattr(args, "ahead", 0)
        batch = look_ahead(batch, ahead) if ahead else batch
        return batch._map(torch.Tensor.clone)  # with a storage for each tensor

    def packing(self, config: DataConfig, seq_len: int, seed: int) -> PackedTokens:
        if isinstance(self.tokenizer, NoTokenizer) and not self.is_tokenized(config):
            raise ConfigError(f"the data set {config.dataset} is text: {self.tokenizer.needed}")
        leading_tokens(self.tokenizer, config.add_bos, config.add_eos)  # refuses a missing BOS
        return PackedTokens(
            self.tokenizer,
            seq_len,
            config.add_bos,
            config.add_eos,
            has_documents=self.has_documents,
            ahead=self.ahead,
            vocab_size=self.vocab_size,
            batch_type=self.batch_type,
        )

    def open_stream(
        self,
        config: DataConfig,
        *,
        seed: int,
        seq_len: int,
        once: bool = False,
        steps: int | None = None,
        **part: Any,
    ) -> BatchStream:
        check_text_or_tokens(config)
        sources = open_token_sources(config, self.tokenizer, self.vocab_size)
        if sources is None:
            return super().open_stream(config, seed=seed, seq_len=seq_len, once=once, **part)
        packing = self.packing(config, seq_len, seed)
        run = partial(TokenStream, seq_len=seq_len, seed=seed, steps=steps, once=once)
        return run(config, sources, packing, **part)

    def notes(self, config: DataConfig) -> Iterator[str]:
        for _, section in config.sections():
            if (shards := shards_of(section)) is None:
                if note := separator_note(self.tokenizer, config.add_bos, config.add_eos):
                    yield f"data: {note}"
            elif has_no_separator(*shards):
                yield (
                    f"data: the documents of {shards[0]} follow one another without a separator, "
                    "as they were tokenized with neither BOS nor EOS; tokenize them with --eos"
                )

    def is_tokenized(self, config: DataConfig) -> bool:
        return bool(config.sources) or shards_of(config) is not None

    def unprepared(self, config: DataConfig) -> list[str]:
        return untokenized(config, self.tokenizer)

    def check_amounts(self, config: DataConfig, *, steps: int, sizes: Sequence[StepSizes]) -> None:
        if not config.sources:
            return
        found = open_stored(config, self.tokenizer, self.vocab_size)
        tokens = [None if documents is None else documents.tokens for documents in found]
        length = sizes[0].seq_len
        Amounts(
            config, config.sources, tokens, seq_len=length, steps=steps, sizes=sizes
        ).check_new()

    def open_source(self, config: DataConfig, seed: int) -> Source:
        return open_source(config, self.tokenizer, seed=seed)

    @classmethod
    def check_files(cls, config: DataConfig) -> None:
        check_text_or_tokens(config)
        if shards_of(config) is None:
            check_local(config)

    @classmethod
    def left_out(cls, config: DataConfig) -> str | None:
        is_text = not config.sources and shards_of(config) is None
        return "null_texts" if is_text and config.null_text == "skip" else None

    def preview(self, batch: Batch) -> str:
        assert isinstance(batch, TokenBatch)
        return preview(batch, self.tokenizer)

    def reference(
        self, config: DataConfig, seed: int, open_stream: Callable[[], BatchStream]
    ) -> str | None:
        if not config.report_unigram_loss:
            return None
        if self.is_tokenized(config):
            # Padding, which is token 0, is no target.
            targets = (batch.targets[batch.targets != IGNORED] for batch in open_stream())
            loss = entropy(self.vocab_size, targets)
        else:
            source, add_eos = self.open_source(config, seed), config.add_eos
            loss = unigram_loss(source, self.tokenizer, add_bos=config.add_bos, add_eos=add_eos)
        return f"a unigram model of this text has loss {loss:.3f}"

    @classmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    @classmethod
    def split_loss(cls, group: dist.ProcessGroup, size: int) -> LossFunction:
        return partial(vocabulary_parallel_cross_entropy, group=group, vocabulary=size)

    def prepare_validation(self, device: torch.device, is_first: bool) -> None:
        try:
            self._bytes = torch.tensor(self.tokenizer.byte_counts(), device=device)
        except BytesUnknown as reason:
            if is_first:
                logger.warning(
                    "validation: bits and perplexity per byte are null: the number of bytes "
                    "per token is unknown for the tokenizer %s: %s",
                    self.tokenizer.fingerprint,
                    reason,
                )

    def measure(self, batch: Batch) -> Tensor:
        """Count the bytes of text of the targets, if known."""
        if self._bytes is None:
            return super().measure(batch)
        return self._bytes[batch.targets[batch.targets != IGNORED]].sum()[None]

    def derived(self, loss: float, count: int, measured: Sequence[int]) -> dict[str, float | None]:
        if not sum(measured):
            return {"bits_per_byte": None, "perplexity_per_byte": None}
        nats = torch.tensor(loss / sum(measured), dtype=torch.float64)
        return {
            "bits_per_byte": float(nats / math.log(2)),
            "perplexity_per_byte": float(nats.exp()),
        }


def preview(batch: TokenBatch, tokenizer: Tokenizer, chars: int = 400) -> str:
    """Return the start of the first row of `batch` as text, on one line."""
    # No token is shorter than a byte, and no character longer than four.
    tokens = batch.tokens[0, : 4 * chars].tolist()
    text = tokenizer.decode(tokens)
    return repr(text[:chars]) + ("..." if len(text) > chars else "")


def unigram_loss(
    source: Source,
    tokenizer: Tokenizer,
    max_tokens: int = 2**20,
    *,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
) -> float:
    """Return the nats per token of a model that knows only the frequency of each token.

    It is the entropy of the tokens of the first documents, about `max_tokens` of them, BOS and EOS
    included.
    """
    documents = source.read({0: None}, 1)[0]
    found = tokenized(documents, tokenizer, add_bos=add_bos, add_eos=add_eos)
    return entropy(tokenizer.vocab_size, (tokens for _, tokens in found), max_tokens)


def entropy(vocab_size: int, tokens: Iterable[Any], max_tokens: int = 2**20) -> float:
    """Return the entropy of the first `max_tokens` tokens, in nats: H = -sum p log p.

    Args:
        tokens: arrays of them; an empty one is the end.
    """
    counts = np.zeros(vocab_size, np.int64)
    for part in tokens:
        counts += np.bincount(part, minlength=len(counts))
        if not len(part) or counts.sum() >= max_tokens:
            break
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())

"""Next-token prediction of text: batches of token ids, cross entropy, and a tokenizer.

Loss in nats per token says little across tokenizers: longer tokens are fewer and harder. So the
loss on held-out text is also reported per byte, with B the bytes of the target tokens:

    bits per byte = nats / (B ln 2)        perplexity per byte = exp(nats / B)

Special tokens have no bytes, but their loss counts: a model has to know where a text ends.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data import (
    DataConfig,
    Tokenizer,
    check_local,
    check_vocabulary,
    load_tokenizer,
    open_source,
)
from torchtitan.data.batch import Batch
from torchtitan.data.lanes import ENDED, Lane, Sample, SampleStart, tokenized
from torchtitan.data.order import Document, Identity, Source
from torchtitan.data.token_bytes import BytesUnknown
from torchtitan.logging import logger
from torchtitan.losses import IGNORED, cross_entropy, vocabulary_parallel_cross_entropy
from torchtitan.models.settings import ModelConfig, TextConfig
from torchtitan.tasks.task import LossFunction, Task

AHEAD = ("ahead_tokens", "ahead_targets")


@dataclasses.dataclass(frozen=True)
class TokenBatch(Batch):
    """A microbatch of text; each field is (B, S) int64."""

    tokens: Tensor
    targets: Tensor
    """Next token of each; -100 where there is nothing to predict."""
    positions: Tensor
    """Position of each token in its sequence."""
    documents: Tensor | None = None
    """Document of each token in its sequence: 0, 1, ...; None: attention does not need it."""
    ahead_tokens: Tensor | None = None
    """Tokens that follow each, as far as auxiliary losses need: (B, S, A); 0 beyond the end."""
    ahead_targets: Tensor | None = None
    """Target of each of `ahead_tokens`: (B, S, A); -100 beyond the end, or in another document."""

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


@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Documents packed into rows of tokens, split into samples of `seq_len` + 1."""

    tokenizer: Tokenizer
    seq_len: int
    add_bos: bool
    add_eos: bool
    has_documents: bool
    """Whether a batch has the document of each token."""
    ahead: int = 0
    """Number of tokens after the next that a batch provides for each."""

    @property
    def identity(self) -> Identity:
        """Settings that must be equal when a run resumes."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
        }

    def lane(self, number: int, documents: Iterator[Document], start: SampleStart | None) -> Lane:
        """Open a lane at its saved state."""
        rows = tokenized(documents, self.tokenizer, add_bos=self.add_bos, add_eos=self.add_eos)
        return Lane(number, rows, self.seq_len, start)

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Join samples into a batch."""
        tokens = _stacked([sample.tokens for sample in samples])
        documents = _stacked([sample.documents for sample in samples])
        batch = TokenBatch(
            tokens=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].masked_fill(documents[:, 1:] == ENDED, IGNORED),
            positions=torch.arange(self.seq_len).repeat(len(samples), 1),
            documents=documents[:, :-1].contiguous() if self.has_documents else None,
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
    return torch.from_numpy(np.stack(rows).astype(np.int64))


class NextToken(Task):
    """Text models: each token is predicted from those before it."""

    unit, rate, key = "tokens", "tps", "model.tokenizer_path"
    outputs = "tokens"
    splits_sequences = hides_ended = has_logits = True

    def __init__(self, model: ModelConfig, args: Any) -> None:
        assert isinstance(model, TextConfig), "the settings of a text model are a TextConfig"
        self.tokenizer = load_tokenizer(model.tokenizer_path)
        check_vocabulary(self.tokenizer, args.vocab_size)
        self.has_documents = model.attn_mask_type == "block_causal"
        self.ahead: int = getattr(args, "ahead", 0)
        self._bytes: Tensor | None = None

    @classmethod
    def units(cls, seq_len: int) -> int:
        return seq_len

    def packing(self, config: DataConfig, seq_len: int, seed: int) -> PackedTokens:
        if config.add_bos and self.tokenizer.lost_bos:
            raise ConfigError(self.tokenizer.lost_bos)
        return PackedTokens(
            *(self.tokenizer, seq_len, config.add_bos, config.add_eos),
            has_documents=self.has_documents,
            ahead=self.ahead,
        )

    def open_source(self, config: DataConfig, seed: int) -> Source:
        return open_source(config, self.tokenizer, seed=seed)

    @classmethod
    def check_files(cls, config: DataConfig) -> None:
        check_local(config)

    def preview(self, batch: Batch) -> str:
        assert isinstance(batch, TokenBatch)
        return preview(batch, self.tokenizer)

    def reference(self, config: DataConfig, seed: int) -> str | None:
        if not config.report_unigram_loss:
            return None
        loss = unigram_loss(self.open_source(config, seed), self.tokenizer)
        return f"a unigram model of this text has loss {loss:.3f}"

    @classmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    @classmethod
    def split_loss(cls, group: dist.ProcessGroup, size: int) -> LossFunction:
        return partial(vocabulary_parallel_cross_entropy, group=group, vocabulary=size)

    @classmethod
    def split_sums(cls, positions: int) -> Sequence[int]:
        """Return the sizes of three sums over ranks, with one number per token in each: the
        largest logit, the sum of exponentials, and the target's logit (arXiv:1909.08053, section
        3).
        """
        return [positions] * 3

    def prepare_validation(self, device: torch.device, is_first: bool) -> None:
        try:
            self._bytes = torch.tensor(self.tokenizer.byte_counts(), device=device)
        except BytesUnknown as reason:
            if is_first:
                logger.warning(
                    "validation: bits and perplexity per byte are null: the number of bytes "
                    "per token is unknown for the tokenizer %s: %s",
                    *(self.tokenizer.fingerprint, reason),
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


def unigram_loss(source: Source, tokenizer: Tokenizer, max_tokens: int = 2**20) -> float:
    """Return the nats per token of a model that knows only the frequency of each token.

    It is the entropy of the tokens of the first documents, about `max_tokens` of them, BOS and EOS
    included: H = -sum p log p.
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    documents = source.read({0: None}, 1)[0]
    for _, tokens in tokenized(documents, tokenizer, add_bos=True, add_eos=True):
        counts += np.bincount(tokens, minlength=len(counts))
        if counts.sum() >= max_tokens:
            break
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())

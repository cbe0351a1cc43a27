"""What to look at before a run: a decoded batch, and a baseline for the loss."""

from collections.abc import Iterator

import numpy as np

from torchtitan.data.batch import Batch
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Source
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.logging import logger


def previewed(batches: Iterator[Batch], tokenizer: Tokenizer) -> Iterator[Batch]:
    """The batches; of the first, the log shows the beginning as text."""
    first = next(batches)
    logger.info("first sequence: %s", preview(first, tokenizer))
    yield first
    yield from batches


def preview(batch: Batch, tokenizer: Tokenizer, chars: int = 400) -> str:
    """The beginning of the first row of `batch` as text, on one line."""
    # No token is shorter than a byte, and no character longer than four.
    tokens = batch.tokens[0, : 4 * chars].tolist()
    text = tokenizer.decode(tokens)
    return repr(text[:chars]) + ("..." if len(text) > chars else "")


def unigram_loss(source: Source, tokenizer: Tokenizer, max_tokens: int = 2**20) -> float:
    """Nats per token of a model that knows only how frequent each token is.

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

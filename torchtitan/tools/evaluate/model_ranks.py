"""The ranks that a model is split over while it is evaluated."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchtitan.config import ConfigError
from torchtitan.device import pick
from torchtitan.local_ranks import run_ranks
from torchtitan.logging import logger
from torchtitan.parallel import Launch
from torchtitan.tools.evaluate.inference import check_ranks
from torchtitan.tools.evaluate.subject import Subject, check_weights

RANK_TIMEOUT = timedelta(minutes=30)
"""Timeout between ranks, one of which may load or print for long."""


def on_ranks(ranks: int, subject: Subject, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Check everything, and run `function(*args)` on the requested number of ranks."""
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
    return run_ranks(function, ranks, *args, device=device.type, timeout=RANK_TIMEOUT)


def warn_if_longer(subject: Subject, length: int) -> None:
    """Warn where sequences get longer than those that the model was trained on."""
    if subject.seq_len is not None and length > subject.seq_len:
        logger.warning(
            "the model was trained on sequences of %d tokens, and these get up to %d: positions "
            "beyond are new to it",
            *(subject.seq_len, length),
        )


def chosen_dtype(name: str | None, subject: Subject) -> torch.dtype:
    """The requested dtype of computation, or else that of the subject."""
    chosen: torch.dtype = getattr(torch, name) if name else subject.dtype
    return chosen

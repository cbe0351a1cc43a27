"""The evaluations of a trained model, by the name that `--tasks` has."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan.config import Registry
from torchtitan.tools.evaluate.subject import ModelLocation


class EvaluationRequest(NamedTuple):
    """Options of the command."""

    place: ModelLocation
    dataset: str | None
    """Name of a data set; None: that of the run."""
    dataset_path: str | None
    limit: int | None
    """Documents at most; None: all."""
    batch_size: int
    dtype: torch.dtype | None
    """Dtype of computation; None: that of training, or of the weights."""
    length: int | None = None
    """Context length in tokens; None: as in training."""


class Result(NamedTuple):
    """Result of an evaluation, for programs and for people."""

    values: dict[str, Any]
    lines: Sequence[str]


EVALUATIONS = Registry[Callable[[EvaluationRequest], Result]](
    "evaluation", {"loss": "torchtitan.tools.evaluate.held_out:held_out_loss"}
)
"""Each raises `ConfigError` where the model or the data set does not suit it."""

"""Evaluations that are not tasks of the lm-evaluation-harness, by the name that `--tasks` has."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan.config import Registry
from torchtitan.tools.evaluate.subject import ModelLocation


class EvaluationRequest(NamedTuple):
    """Options of the command."""

    place: ModelLocation
    dataset: str | None
    """Name of a data set; None: as in training."""
    dataset_path: str | None
    limit: int | None
    """Documents at most; None: all."""
    batch_size: int
    dtype: torch.dtype


class Result(NamedTuple):
    """Result of an evaluation, for programs and for people."""

    values: dict[str, Any]
    lines: Sequence[str]


EVALUATIONS = Registry[Callable[[EvaluationRequest], Result]]("evaluation", {})
"""Each raises `ConfigError` where the model or the data set does not suit it."""
